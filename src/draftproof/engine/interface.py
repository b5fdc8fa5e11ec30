"""The wall between host and device: the data that crosses it in both directions, and the `Runner` protocol.

Everything here is plain Python data, so a step can be recorded, sent to another process and replayed.
Shapes: R requests of a step, K drafts, T rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from draftproof.types import SamplingParams

if TYPE_CHECKING:
    from draftproof.grammar.matcher import Grammar


class StepSize(NamedTuple):
    """The size of a decode-only step: R requests of `context` tokens each verify `num_verified` drafts and then make
    `num_drafts`, each. Both 0: plain decoding."""

    num_requests: int
    num_verified: int
    num_drafts: int
    context: int = 0


class RowPrice(NamedTuple):
    """When a further draft row of a pass pays: if it brings more tokens than the other rows do on average. Without
    drafts of its own a request shares a pass that brings `others` tokens to other requests and takes as long as `rows`
    rows; 0 rows: its length does not depend on drafts. See `DraftRuntime.price`.

    For drafters that make one draft after the other: tokens that come in the time in which a further draft is made for
    each request, and in that of its row; 0: each pays. See `kernels.stopping`."""

    others: float = 0.0
    rows: float = 0.0
    of_draft: float = 0.0
    of_row: float = 0.0


class DeviceFaultError(RuntimeError):
    """The device failed and cannot be used by this process any more."""


class Item(NamedTuple):
    """Rows of a prompt, from `start` on, whose inputs are embeddings (an image's, say) instead of tokens.

    `content`: a hash of 32 bytes; equal contents have equal embeddings, whose source the runner holds. `is_whole`: its
    rows attend to each other, so one pass computes all of them, or all that a cached prefix leaves.
    """

    content: bytes
    start: int
    num_rows: int
    is_whole: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What the engine needs to know about one choice of a user's request: ids and numbers, no text.

    `limit`: maximum length in tokens, min(max_model_len, prompt + max_tokens). `eos_ids` end the output without a
    stop reason; `params.stop_token_ids` end it with one. `stop_ids`: both, which min_tokens holds back.
    `most_drafts`: maximum drafts per round; `members`: the members of a chain that may draft for it, empty: all.
    `priority`: waiting requests with the lowest value are admitted first. These three change speed only.
    `grammar`: what the output must follow; the core makes a matcher from it.
    """

    token_ids: list[int]
    params: SamplingParams
    row_seed: int
    limit: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    bad_words_ids: list[list[int]] = field(default_factory=list)
    prompt_logprobs: int | None = None  # alternatives beside each prompt token; None: not wanted
    most_drafts: int | None = None  # None: the policy decides
    members: tuple[int, ...] = ()
    priority: int = 0
    grammar: Grammar | None = None
    reads_prefix_cache: bool = True  # prompt logprobs need every prompt row computed, and so does `draft`
    items: tuple[Item, ...] = ()  # in order of position; their rows have placeholder ids in `token_ids`

    def contents(self, tokens: Sequence[int]) -> Sequence[int | bytes]:
        """The input of each row of `tokens`, prompt and output so far: its token, or its item's content."""
        if not self.items:
            return tokens
        contents: list[int | bytes] = list(tokens)
        for item in self.items:
            contents[item.start : item.start + item.num_rows] = [item.content] * item.num_rows
        return contents


class Resumed(NamedTuple):
    """How far another engine came with a request: its output tokens, and the number of prompt logprobs delivered."""

    token_ids: Sequence[int]
    num_scores: int = 0


@dataclass(slots=True)
class LogprobRow:
    """One token's id, logprob and rank, and the most likely ids with their logprobs."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that takes a slot. `token_ids`: its known tokens (prompt and, after a preemption, output); the first
    `num_computed` are in the cache. `members`: see `RequestSpec`; `is_masked`: its sampled rows have grammar masks."""

    slot: int
    token_ids: list[int]
    num_computed: int
    num_prompt: int
    limit: int
    row_seed: int
    params: SamplingParams
    stop_ids: frozenset[int]
    bad_words_ids: list[list[int]]
    members: tuple[int, ...] = ()
    items: tuple[Item, ...] = ()
    is_masked: bool = False


class ScheduledRequest(NamedTuple):
    """One request's rows in a pass: `num_rows`, of which the last `num_sampled` are sampled (0 in mid-prefill).

    `start`: position of the first, an upper bound while an earlier pass is in flight. `num_drafts`: drafts wanted after
    the pass. `num_logprobs`: alternatives beside each sampled token, None: no logprobs wanted. `scored`: rows of the
    request (first, number) whose next prompt token is scored, with `num_prompt_logprobs` alternatives.

    Example: a prompt of 10 tokens in chunks of 6 gives (start 0, 6 rows, 0 sampled), then (start 6, 4 rows, 1 sampled);
    with prompt logprobs the first scores tokens 1..6 from rows (0, 6), the second tokens 7..9 from rows (0, 3).
    """

    slot: int
    start: int
    num_rows: int
    num_sampled: int
    num_drafts: int = 0
    num_logprobs: int | None = None
    scored: tuple[int, int] = (0, 0)
    num_prompt_logprobs: int = 0


# (table, slot, page, block); table 0 is that of full-attention layers, the others each of one window.
TableEntry = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """All that the runner needs for one step. `released` slots are freed before `admitted` ones are taken.

    `table_entries`: changes of the block tables. `fresh_blocks`: allocated since the last step; their draft keys and
    values are cleared. `all_decode`: every request samples all its rows and no draft was dropped, so the pass may be
    padded to a captured size. `without_drafter`: the drafter neither drafts nor sees the rows. `without_models`: those
    drafters that run a model do not; `most_model_drafts`: the most drafts that they make for a request, None: no limit;
    both only where others are lookups. `price`: of a further row of the next pass. `masks`: for each scheduled request
    the tokens that its sampled rows may have, one bit per id in 32-bit words, row after row; empty for a request
    without grammar, and () if no request has one. `forced`: (slot, first position, ids) of drafts that replace the
    slot's.
    """

    released: Sequence[int] = ()
    admitted: Sequence[Admission] = ()
    table_entries: Sequence[TableEntry] = ()
    fresh_blocks: Sequence[int] = ()
    scheduled: Sequence[ScheduledRequest] = ()
    all_decode: bool = False
    without_drafter: bool = False
    without_models: bool = False
    most_model_drafts: int | None = None
    price: RowPrice = RowPrice()  # noqa: RUF009 (immutable)
    masks: Sequence[bytes] = ()
    forced: Sequence[tuple[int, int, Sequence[int]]] = ()


@dataclass(slots=True)
class RowResult:
    """What a pass did to one request.

    `token_ids`: emitted tokens; on `failure` the last is missing. `num_drafted`: drafts verified. `num_proposed`:
    drafts proposed for the next pass, by the drafter with index `drafter`. `drafter_faults`: drafters that failed the
    request in this pass. `draft_state_lost`: some drafter's cache now has a hole at these rows; `nobody_drafts`: then,
    whether no drafter is left for the request.
    """

    token_ids: list[int]
    num_drafted: int
    num_proposed: int
    draft_state_lost: bool = False
    nobody_drafts: bool = False
    drafter: int = 0
    drafter_faults: tuple[int, ...] = ()
    failure: str = ""  # why the last token is missing: NO_NUMBER or NONE_LEFT
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)


NO_NUMBER = "no number"  # the target's logits held NaN or inf
NONE_LEFT = "none left"  # the request's masks, bans and stop rules left no token


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """Faults of the drafters. `off`: all are switched off after too many faults. `faults_each`: number per drafter."""

    off: bool = False
    num_faults: int = 0
    last_fault: str = ""
    faults_each: tuple[int, ...] = ()


HEALTHY = DrafterHealth()


class PendingStep(Protocol):
    """A launched step. The seconds are host time; on a GPU that is the time to launch, not to compute."""

    @property
    def is_warming(self) -> bool:
        """Whether the step was slowed by recording or warming up, so that its time is not typical."""
        ...

    @property
    def target_seconds(self) -> float: ...
    @property
    def draft_seconds(self) -> float: ...
    @property
    def draft_state_lost(self) -> bool:
        """Known at launch: a drafter failed for all requests of this step, which leaves holes in its cache."""
        ...

    @property
    def undrafted_slots(self) -> Collection[int]:
        """Slots for which no drafter is left after that."""
        ...

    def wait(self) -> list[RowResult]:
        """One result for each scheduled request, in order. Raises DeviceFaultError."""
        ...


class Runner(Protocol):
    """The device half of an engine.

    `num_drafts`: maximum number of drafts, 0 without a drafter. `async_depth`: steps that may be in flight when `run`
    is called again. `most_forced`: maximum number of forced drafts of a request (`StepInput.forced`), attributed to the
    last drafter. `drafter_names`: by the drafters' indices. `max_model_len`: maximum tokens of a request.
    """

    num_drafts: int
    async_depth: int
    most_forced: int
    drafter_names: tuple[str, ...]

    @property
    def drafter_has_kv(self) -> bool:
        """Whether the drafter keeps keys and values, so that rows it does not see leave a hole in its cache."""
        ...

    @property
    def drafter_estimates(self) -> bool:
        """Whether the drafter ends proposals by `StepInput.price`."""
        ...

    @property
    def drafter_stops(self) -> bool:
        """Whether it also makes no drafts beyond the end of a proposal; in a chain: those of its members that run a
        model."""
        ...

    @property
    def lookups(self) -> frozenset[int]:
        """Indices of the drafters that run no model: they find drafts in known tokens alone."""
        ...

    @property
    def is_divided(self) -> bool:
        """Whether some drafters run a model and others are lookups."""
        ...

    @property
    def drafter_may_rest(self) -> bool:
        """Whether steps without drafts may skip the drafter. A user's drafter is called after every pass."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def run(self, step: StepInput) -> PendingStep:
        """Launch a step. Raises DeviceFaultError. After any other exception the slots of this step are in an unknown
        state, and a later step must release them first."""
        ...

    def drafter_health(self) -> DrafterHealth: ...

    def known_drafts(self, slot: int, num_known: int, num_drafts: int) -> list[int]:
        """The drafts that follow a slot's `num_known` known tokens."""
        ...

    def keep_drafts(self, slot: int, num_drafts: int) -> None:
        """Drop a slot's drafts beyond the first `num_drafts`, so that no padding row verifies them. Only where no step
        is in flight."""
        ...

    def shutdown(self) -> None:
        """Free all memory."""
        ...
