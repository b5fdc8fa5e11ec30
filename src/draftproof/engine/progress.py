"""The core's record of one request: how far it has come, and which blocks it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftproof.cache.pages import ROOT
from draftproof.engine.acceptance import AcceptanceRecord
from draftproof.engine.interface import Admission, RequestSpec, Resumed, TableEntry
from draftproof.engine.shadows import Shadow
from draftproof.grammar.matcher import Matcher
from draftproof.types import FinishReason


@dataclass(slots=True)
class WindowBlocks:
    """A request's blocks in the layers of one window, by page; 0: given back, since no row sees the page any more.

    Of the first `num_gone` pages all blocks are given back. The device's table has entries of the first `num_sent`
    pages, of which the first `num_cleared` have been set to 0.
    """

    blocks: list[int]
    num_gone: int
    num_sent: int = 0
    num_cleared: int = 0

    def give_back(self, first: int) -> list[int]:
        """Drop the pages before `first`, and return their blocks."""
        pages = range(self.num_gone, min(first, len(self.blocks)))
        blocks = [self.blocks[page] for page in pages]
        for page in pages:
            self.blocks[page] = 0
        self.num_gone = max(self.num_gone, pages.stop)
        return blocks

    def held(self) -> list[int]:
        return self.blocks[self.num_gone :]

    def new_entries(self, number: int, slot: int) -> list[TableEntry]:
        """Changes of table `number` since the last call: pages given back and pages added."""
        gone = [
            (number, slot, page, 0) for page in range(self.num_cleared, min(self.num_gone, self.num_sent))
        ]
        first = max(self.num_sent, self.num_gone)
        came = [(number, slot, page, self.blocks[page]) for page in range(first, len(self.blocks))]
        self.num_sent, self.num_cleared = len(self.blocks), self.num_gone
        return gone + came


class Round(NamedTuple):
    """What a step has shown of a request's drafts: `num_observed` of them count, of which `num_accepted` were accepted,
    and of the `num_asked` next ones there are `num_proposed`. `num_outputs`: tokens of the output before the step."""

    num_observed: int
    num_accepted: int
    num_asked: int
    num_proposed: int
    num_outputs: int


@dataclass(slots=True, kw_only=True, eq=False)
class Progress:
    """One request. `tokens`: prompt and output so far, as the host knows them; the first `num_computed` have keys and
    values in the cache.

    The device may run ahead of the host: `num_pending` is the most tokens that passes in flight may have added.
    `num_drafts`: drafts on the device, waiting to be verified; an upper bound while a pass is in flight. `drafter`:
    index of the drafter that made the drafts of the last processed pass.
    """

    id: str
    spec: RequestSpec
    arrival: int
    tokens: list[int]

    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    windows: list[WindowBlocks] = field(default_factory=list)  # blocks of windowed layers, by window
    num_sent_blocks: int = 0  # blocks that are in the device's table
    num_computed: int = 0
    num_pending: int = 0
    num_drafts: int = 0
    drafter: int = 0
    drafter_faults: list[int] = field(default_factory=list)  # drafters that failed it, not in a delta yet
    num_registered: int = 0  # pages of `blocks` that are in the prefix cache
    node: int = ROOT  # id of the last registered page
    num_scored: int = 0  # prompt tokens whose logprobs are delivered or in flight
    num_scores_out: int = 0  # prompt tokens whose logprobs are delivered
    draft_hole: int | None = None  # first position whose draft KV is missing in some drafter's cache
    is_hole_partial: bool = False  # another drafter's cache has no hole
    num_preemptions: int = 0
    num_cached: int = 0
    queued: float = 0.0  # arrival: seconds of `time.perf_counter`
    queue_seconds: float | None = None  # from arrival to first admission
    matcher: Matcher | None = None  # None: no grammar
    drafts: list[int] = field(default_factory=list)  # drafts to be verified next; known only with a matcher
    forced: list[int] = field(default_factory=list)  # drafts that replace those on the device, by its grammar
    is_cut: bool = False  # its matcher refused the draft after `drafts`
    # of the drafters that a policy chooses for, in a chain of lookups and others of each kind
    records: tuple[AcceptanceRecord, AcceptanceRecord] = field(
        default_factory=lambda: (AcceptanceRecord(), AcceptanceRecord())
    )
    shadows: list[Shadow] = field(default_factory=list)  # drafts that are compared with the output
    # since the policy was told: steps in which lookups were asked for drafts, and in which they had some
    num_asked: int = 0
    num_given: int = 0
    rounds: list[Round] = field(default_factory=list)  # what the policy is yet to hear of
    is_followed: bool = False  # the policy is to hear what verifying its lookup's last drafts has shown
    finish_reason: FinishReason | None = None

    def resume(self, resumed: Resumed) -> None:
        """Continue where another engine stopped, as after a preemption."""
        self.tokens += resumed.token_ids
        self.num_scored = self.num_scores_out = resumed.num_scores
        if self.matcher is not None:
            self.matcher.advance(resumed.token_ids)

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key of waiting requests: lowest first."""
        return self.spec.priority, self.arrival

    @property
    def num_prompt(self) -> int:
        return len(self.spec.token_ids)

    @property
    def contents(self) -> Sequence[int | bytes]:
        """The prefix cache's keys: each row's token, or its item's content. All rows of an item have the same key; the
        chain of pages before a page tells which of them it begins with."""
        return self.spec.contents(self.tokens)

    def whole_rows(self, start: int, num_rows: int) -> int:
        """`num_rows` rows from `start` on, but fewer or more if they would end inside an item that must stay whole.

        Example: an item of rows 10 to 19. 8 rows from 4 on become 6, 8 rows from 10 on become 10.
        """
        for item in self.spec.items:
            if item.is_whole and item.start < start + num_rows < item.end:
                return item.start - start if item.start > start else item.end - start
        return num_rows

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.spec.token_ids)

    @property
    def most_outputs(self) -> int:
        """Tokens that its output may have."""
        return self.spec.limit - len(self.spec.token_ids)

    @property
    def can_draft(self) -> bool:
        """Whether drafts are allowed for it, and some drafter has seen all its rows."""
        return (self.draft_hole is None or self.is_hole_partial) and self.spec.most_drafts != 0

    @property
    def room(self) -> int:
        """Most drafts that may follow its tokens: the round that verifies them brings one token more."""
        return self.spec.limit - len(self.tokens) - 1

    def at_most(self, num_drafts: int) -> int:
        """`num_drafts`, limited to what the request allows."""
        most = self.spec.most_drafts
        return num_drafts if most is None else min(num_drafts, most)

    def miss_drafter(self, position: int, *, is_partial: bool = False) -> None:
        """Note that a drafter misses the rows from `position` on. `is_partial`: another saw them and can draft on."""
        self.is_hole_partial = is_partial and self.can_draft
        self.draft_hole = min(
            position, self.num_computed, position if self.draft_hole is None else self.draft_hole
        )

    @property
    def num_to_compute(self) -> int:
        """Known tokens whose rows are not computed yet; always 1 after a pass that samples."""
        return 1 if self.num_pending else len(self.tokens) - self.num_computed

    def admission(self) -> Admission:
        """What the runner needs to know when the request takes its slot."""
        return Admission(
            slot=self.slot,
            token_ids=list(self.tokens),
            num_computed=self.num_computed,
            num_prompt=self.num_prompt,
            limit=self.spec.limit,
            row_seed=self.spec.row_seed,
            params=self.spec.params,
            stop_ids=self.spec.stop_ids,
            bad_words_ids=self.spec.bad_words_ids,
            members=self.spec.members,
            items=self.spec.items,
            is_masked=self.matcher is not None,
        )

    def new_entries(self) -> list[TableEntry]:
        """Changes of the device's block tables since the last call."""
        first, self.num_sent_blocks = self.num_sent_blocks, len(self.blocks)
        entries = [(0, self.slot, page, self.blocks[page]) for page in range(first, len(self.blocks))]
        for number, held in enumerate(self.windows, 1):
            entries += held.new_entries(number, self.slot)
        return entries

    def scored_rows(self, start: int, num_rows: int) -> tuple[int, int]:
        """Rows of a pass (first, number) that score prompt tokens not scored before; the row at position p scores
        prompt token p + 1. Example: 10 prompt tokens, 6 scored, rows from 6 on: rows (0, 3)."""
        if self.spec.prompt_logprobs is None:
            return 0, 0
        first = self.num_scored - start
        end = min(num_rows, self.num_prompt - 1 - start)
        return (first, end - first) if 0 <= first < end else (0, 0)

    def forget(self) -> None:
        """Reset to nothing computed: the request has lost its slot and blocks."""
        self.slot = -1
        self.blocks = []
        self.windows = []
        self.num_sent_blocks = self.num_computed = self.num_pending = self.num_drafts = (
            self.num_registered
        ) = 0
        self.forced = []
        self.num_scored = self.num_scores_out
        self.draft_hole = None
        self.is_hole_partial = False
