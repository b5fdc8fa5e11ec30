"""What a step adds to a request: its new tokens up to a stop, and why the output ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.engine.interface import NONE_LEFT, LogprobRow, RequestSpec, RowResult, ScheduledRequest
from draftproof.engine.progress import Progress
from draftproof.types import FinishReason


@dataclass(slots=True)
class TokenDelta:
    """What one step added to one request; the first `num_accepted` tokens were drafts.

    `is_round`: a decoding round; False for the first token, which a prompt's last chunk gives. `drafter`: index of the
    drafter of these drafts; `drafter_faults`: drafters that failed the request, one entry per fault. `stop_reason`: the
    stop token's id, None for an end-of-text token. `error`: why it ended with finish_reason "error". `queue_seconds`:
    from arrival to first admission.
    """

    id: str
    token_ids: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    is_round: bool = False
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    drafter: int = 0
    drafter_faults: list[int] = field(default_factory=list)
    queue_seconds: float = 0.0

    @property
    def says_something(self) -> bool:
        return bool(self.token_ids or self.finish_reason is not None or self.prompt_logprobs)


def take_over(request: Progress, scheduled: ScheduledRequest, result: RowResult) -> tuple[TokenDelta, int]:
    """Apply a pass's result to a request: (its delta, number of drafts that count for acceptance: the accepted ones
    and the first rejected one)."""
    delta = TokenDelta(request.id, prompt_logprobs=result.prompt_logprobs, drafter=request.drafter)
    request.num_scores_out += len(result.prompt_logprobs)
    first = min(scheduled.start, request.num_computed)  # `start` is an upper bound where steps overlap
    num_observed = 0
    if scheduled.num_sampled:
        request.num_pending -= scheduled.num_sampled
        num_observed = _emit(request, result, delta)
    if request.num_pending == 0:
        request.num_drafts = result.num_proposed
    request.drafter = result.drafter
    request.drafter_faults += result.drafter_faults
    if result.draft_state_lost:
        request.miss_drafter(first, is_partial=not result.nobody_drafts)
    if delta.says_something:
        delta.num_cached_tokens = request.num_cached
        delta.num_preemptions = request.num_preemptions
        delta.drafter_faults, request.drafter_faults = request.drafter_faults, []
        delta.queue_seconds = request.queue_seconds or 0.0
    return delta, num_observed


def _emit(request: Progress, result: RowResult, delta: TokenDelta) -> int:
    """Append the new tokens up to a stop, and fill in `delta`. Returns how many drafts count for acceptance."""
    num_kept, delta.finish_reason, delta.stop_reason = stopping_point(
        request.spec, len(request.tokens), result.token_ids
    )
    if request.matcher is not None:
        request.matcher.advance(result.token_ids[:num_kept])
    if result.failure and delta.finish_reason is None:
        delta.error = _why_no_token(request, num_kept, result.failure)
        delta.finish_reason = None if delta.error is None else "error"
    num_accepted = len(result.token_ids) - (not result.failure)
    delta.is_round = request.num_outputs > 0
    delta.token_ids = result.token_ids[:num_kept]
    delta.logprobs = result.logprobs[:num_kept]
    delta.num_drafted, delta.num_accepted = result.num_drafted, min(num_accepted, num_kept)
    request.tokens += delta.token_ids
    request.num_computed = len(request.tokens) - 1
    # drafts past the end of the output say nothing about acceptance
    is_whole = num_kept == len(result.token_ids) and not result.failure
    num_observed = delta.num_drafted if is_whole else delta.num_accepted
    if is_whole and request.is_cut and num_observed == delta.num_accepted == len(request.drafts):
        num_observed += 1  # the draft that the grammar refused counts as a rejected one
    return num_observed


def stopping_point(
    spec: RequestSpec, num_tokens: int, token_ids: Sequence[int]
) -> tuple[int, FinishReason | None, int | None]:
    """How many of the new tokens are kept, and why the output ends there: (number, finish reason, stop reason).

    num_tokens: length of prompt and output before them.
    """
    num_outputs = num_tokens - len(spec.token_ids)
    for number, token in enumerate(token_ids, start=1):
        enough = num_outputs + number >= spec.params.min_tokens
        if enough and token in spec.stop_ids:
            return number, "stop", None if token in spec.eos_ids else token
        if num_tokens + number == spec.limit:
            return number, "length", None
    return len(token_ids), None, None


def _why_no_token(request: Progress, num_kept: int, failure: str) -> str | None:
    """The error of a row for which no token could be sampled. None: no error; the grammar is complete and allowed only
    the end-of-text token, which something else, such as min_tokens, ruled out."""
    if failure != NONE_LEFT:
        return "the target's logits held no number"
    if request.matcher is not None and request.matcher.is_complete:
        return None
    params = request.spec.params
    if request.matcher is not None and request.matcher.error:
        return f"structured_outputs: the grammar cannot be followed any further: {request.matcher.error}"
    fields = ("structured_outputs", "allowed_token_ids", "bad_words", "stop_token_ids")
    names = [name for name in fields if getattr(params, name)]
    if params.min_tokens:
        names.append(f"min_tokens={params.min_tokens}")
    num_outputs = request.num_outputs + num_kept
    return f"no token is possible after {num_outputs}: {', '.join(names)} rule out all of them; ask for less"
