"""The wall between host and device: what crosses it, in both directions, and what each side must offer.

Everything here is plain Python. The core plans with it and the runner computes from it, so a step can be recorded,
sent to another process and run again. Shapes: R requests of a step, K drafts, T rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from draftproof.types import SamplingParams

if TYPE_CHECKING:
    from draftproof.grammar.matcher import Grammar


class StepSize(NamedTuple):
    """How much a step of decoding computes: R requests of `context` tokens each verify so many drafts each, and then
    make so many; none of either: plain decoding."""

    num_requests: int
    num_verified: int
    num_drafts: int
    context: int = 0


class DeviceFaultError(RuntimeError):
    """The device failed and takes no more work from this process."""


class Item(NamedTuple):
    """Rows of a prompt, from `start` on, that carry embeddings in place of their tokens'; equal contents (32 bytes, a
    hash) have equal embeddings, of which the runner knows what to make them of. `is_whole`: its rows see each other, so
    one pass computes all of them, or all that are left behind a cached prefix."""

    content: bytes
    start: int
    num_rows: int
    is_whole: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What the engine needs to know of one choice of one request: ids and numbers, no text.

    `limit`: the most tokens it may grow to, min(max_model_len, prompt + max_tokens). `eos_ids` end the output without a
    stop reason; `params.stop_token_ids` end it with one. `stop_ids`: both, which min_tokens holds back.
    `most_drafts`: the most drafts a round; `members`: the members of a chain that may draft for it, none named: all.
    `priority`: among requests that wait, those with the least come first. These three change speed only.
    `grammar`: what the output must follow; its matcher is the core's.
    """

    token_ids: list[int]
    params: SamplingParams
    row_seed: int
    limit: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    bad_words_ids: list[list[int]] = field(default_factory=list)
    prompt_logprobs: int | None = None  # alternatives beside each prompt token; None: not wanted
    most_drafts: int | None = None  # None: as many as the policy wants
    members: tuple[int, ...] = ()
    priority: int = 0
    grammar: Grammar | None = None
    reads_prefix_cache: bool = True  # prompt logprobs need every prompt row computed, and so does `draft`
    items: tuple[Item, ...] = ()  # in order; the ids of their rows stand for them wherever only ids count

    def contents(self, tokens: Sequence[int]) -> Sequence[int | bytes]:
        """What the rows of prompt and output so far, `tokens`, are made of: a token, or its item's content."""
        if not self.items:
            return tokens
        contents: list[int | bytes] = list(tokens)
        for item in self.items:
            contents[item.start : item.start + item.num_rows] = [item.content] * item.num_rows
        return contents


class Resumed(NamedTuple):
    """How far another engine came with a request: the tokens of its output, and so many of its prompt's scores."""

    token_ids: Sequence[int]
    num_scores: int = 0


@dataclass(slots=True)
class LogprobRow:
    """One token's id, logprob and rank, and the likeliest ids with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request takes a slot. `token_ids` are known (prompt and, after a preemption, output); the first `num_computed`
    of them are in the cache. `members`: as in `RequestSpec`; `is_masked`: its sampled rows come with masks."""

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

    `start`: position of the first, an upper bound while an earlier pass is in flight. `num_drafts` are wanted after the
    pass. `num_logprobs`: alternatives beside each sampled token, None where no logprobs are wanted. `scored`: rows of
    the request (first, number) whose next prompt token is scored, with `num_prompt_logprobs` alternatives.

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


# Number of the table (0: of layers that see all positions, then of each window), slot, page, block.
TableEntry = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step, whole; carried out in the order of the fields.

    `table_entries` are new in the block tables. `fresh_blocks`: handed out since the last
    step; their draft keys and values are cleared. `all_decode`: every request samples all its rows and no draft was
    dropped, so the pass may be padded to a captured size. `without_drafter`: the drafter neither drafts nor sees the
    rows. `price`: tokens that one more row of the next pass must bring (`DraftRuntime.price`). `masks`: for each
    scheduled request what its sampled rows may have, a bit an id in words of 32, row after row; empty where it has no
    grammar, and for everybody where nobody has one. `forced`: (slot, position of the first, ids) of drafts that take
    the place of those that lie there.
    """

    released: Sequence[int] = ()
    admitted: Sequence[Admission] = ()
    table_entries: Sequence[TableEntry] = ()
    fresh_blocks: Sequence[int] = ()
    scheduled: Sequence[ScheduledRequest] = ()
    all_decode: bool = False
    without_drafter: bool = False
    price: float = 0.0
    masks: Sequence[bytes] = ()
    forced: Sequence[tuple[int, int, Sequence[int]]] = ()


@dataclass(slots=True)
class RowResult:
    """What a pass did to one request: tokens emitted (the last may be missing for `failure`), drafts verified, drafts
    proposed for the next pass, and the index of the drafter that did; which drafters failed the request in this pass;
    whether the draft cache now has a hole where it is, and then whether no drafter is left that drafts for it."""

    token_ids: list[int]
    num_drafted: int
    num_proposed: int
    draft_state_lost: bool = False
    nobody_drafts: bool = False
    drafter: int = 0
    drafter_faults: tuple[int, ...] = ()
    failure: str = ""  # NO_NUMBER or NONE_LEFT in place of the last token
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)


NO_NUMBER = "no number"  # the target's logits held NaN or inf
NONE_LEFT = "none left"  # what the request asks for ruled every token out


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """`off`: all drafters are switched off after too many faults. `faults_each`: the number of each drafter's."""

    off: bool = False
    num_faults: int = 0
    last_fault: str = ""
    faults_each: tuple[int, ...] = ()


HEALTHY = DrafterHealth()


class PendingStep(Protocol):
    """A step that was launched. The seconds are host time: what a GPU takes beyond its launch does not show."""

    @property
    def is_warming(self) -> bool:
        """Whether it took longer than such steps will: parts of it may yet be recorded."""
        ...

    @property
    def target_seconds(self) -> float: ...
    @property
    def draft_seconds(self) -> float: ...
    @property
    def draft_state_lost(self) -> bool:
        """Known at the launch: a drafter failed for everybody in this step, and its cache has holes."""
        ...

    @property
    def undrafted_slots(self) -> Collection[int]:
        """Slots for which no drafter is left then."""
        ...

    def wait(self) -> list[RowResult]:
        """One result for each scheduled request, in order. Raises DeviceFaultError."""
        ...


class Runner(Protocol):
    """The device half of an engine. `num_drafts`: the most that are drafted, 0 without a drafter; `async_depth`: steps
    that may be in flight when `run` is called again; `drafter_names`: one a drafter, by its index; `max_model_len`: the
    most tokens of a request; `most_forced`: the most drafts of a request that the host may put in the place of others,
    which count for the last drafter."""

    num_drafts: int
    async_depth: int
    most_forced: int
    drafter_names: tuple[str, ...]

    @property
    def drafter_has_kv(self) -> bool:
        """Whether rows that the drafter does not see leave a hole in its cache."""
        ...

    @property
    def drafter_estimates(self) -> bool:
        """Whether the drafter ends proposals by a step's `price`."""
        ...

    @property
    def drafter_may_rest(self) -> bool:
        """Whether steps without drafts may be hidden from it: a user's drafter is called after every pass."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def run(self, step: StepInput) -> PendingStep:
        """Launch a step. Raises DeviceFaultError; any other exception leaves the slots of this step in no known state,
        and a later step must release them first."""
        ...

    def drafter_health(self) -> DrafterHealth: ...

    def known_drafts(self, slot: int, num_known: int, num_drafts: int) -> list[int]:
        """The drafts that lie beyond a slot's known tokens."""
        ...

    def shutdown(self) -> None:
        """Give all memory back."""
        ...
