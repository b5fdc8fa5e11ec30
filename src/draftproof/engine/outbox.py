"""From the device's verdict to the host's records: tokens, logprobs, statistics, and who has finished.

Shapes: R requests of a pass, W the most that one of them samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.engine.scheduler import Plan
from draftproof.engine.scores import Scores
from draftproof.engine.sequence import Sequence
from draftproof.kernels.transfer import Arrivals
from draftproof.sampling.sampler import NONE_LEFT
from draftproof.types import FinishReason


@dataclass(slots=True)
class Emission:
    """What one pass added to one sequence; the first `num_accepted` tokens were drafts."""

    sequence: Sequence
    token_ids: list[int]
    text: str
    num_drafted: int
    num_accepted: int
    is_round: bool  # not the token that a prompt's last chunk gives
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(slots=True)
class Flight:
    """A pass on its way to the host. `result`: one tensor, a row a request of the plan and perhaps more; columns: W
    tokens, emitted, drafted, proposed, broken."""

    plan: Plan
    result: Arrivals
    output_scores: Scores
    prompt_scores: Scores


def deliver(flight: Flight) -> tuple[list[Emission], list[Sequence]]:
    """Apply a pass to its sequences: what each emitted, and those whose drafts a bad id cut short.

    The one place where results are read from the device. Sequences that emitted nothing are left out, and so are those
    that ended while the pass was in flight.
    """
    emissions: list[Emission] = []
    broken: list[Sequence] = []
    (result_RX,) = flight.result.wait()
    for r, (work, row) in enumerate(zip(flight.plan.work, result_RX.tolist(), strict=False)):
        *tokens, emitted, drafted, proposed, is_broken = row
        s = work.sequence
        if s.finish_reason is not None or s.slot < 0:
            continue
        if r in flight.prompt_scores.shares:
            first = len(s.prompt_logprobs) + 1
            num = flight.prompt_scores.shares[r][1]
            s.prompt_logprobs += flight.prompt_scores.of(r, s.tokens[first : first + num])
        if work.num_sampled:
            s.num_pending -= work.num_sampled
            emission = _emit(s, tokens[:emitted], drafted)
            s.logprobs += flight.output_scores.of(r, emission.token_ids)
            emissions.append(emission)
        if s.num_pending == 0:
            s.num_drafts = proposed
        if is_broken:
            broken.append(s)
    return emissions, broken


def _emit(s: Sequence, token_ids: list[int], num_drafted: int) -> Emission:
    is_round = s.num_outputs > 0
    failed = token_ids[-1] < 0  # no token; by law 1 only the last can be, since a draft never equals it
    verdict = s.checker.push(token_ids[:-1] if failed else token_ids)
    kept, text, reason = token_ids[: verdict.kept], verdict.text, verdict.finish_reason
    if failed and reason is None:
        text, reason = text + s.checker.flush(), "error"
        s.none_left = token_ids[-1] == NONE_LEFT
    s.tokens += kept
    s.num_computed = len(s.tokens) - 1
    s.finish_reason = reason
    num_accepted = min(len(token_ids) - 1, verdict.kept)
    if is_round:
        s.speculation.record(num_drafted, num_accepted)
    return Emission(s, kept, text, num_drafted, num_accepted, is_round, reason, verdict.stop_reason)
