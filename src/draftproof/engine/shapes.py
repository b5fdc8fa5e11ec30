"""How much a step computes, and what it is filled up to, so that few sizes come again and again.

Sizes that come again are captured on a GPU and recorded on a CPU. Neither that nor the filling shows in what is
computed. R requests, k drafts of each.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from draftproof.config import EngineConfig
from draftproof.engine.costs import MAX_GRAPH_ROWS, rounded_rows
from draftproof.engine.interface import ScheduledRequest, StepInput
from draftproof.matmul.certify import BUCKETS

# rows of passes with prompts that are filled up: fewer are rare, and more keep a device busy for longer than their
# launches take
LEAST_MIXED_ROWS, MOST_MIXED_ROWS = 16, 512


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How much a pass computes: all that the host must know of it beforehand."""

    num_requests: int
    num_rows: int
    most_rows: int  # one request's, at most; a bound
    num_sampled: int
    most_sampled: int  # one request's, at most; a bound of at least 1
    num_drafts: int  # the most that any request wants after it
    repeats: bool  # passes of this size come again and again: worth running them as graphs
    with_drafter: bool = True
    processing: int = 0  # generation of the sampling table, where logits are processed beyond filters; else 0
    only_sampled: bool = False  # the last layer leaves out rows that are not sampled

    @classmethod
    def of(cls, scheduled: Seq[ScheduledRequest], *, repeats: bool, with_drafter: bool = True) -> BatchShape:
        """The shape of a step as it was scheduled."""
        sampled = [s.num_sampled for s in scheduled]
        rows = [s.num_rows for s in scheduled]
        num_drafts = max(s.num_drafts for s in scheduled)
        num_sampled, most_sampled = sum(sampled), max(1, *sampled)
        return cls(
            len(rows), sum(rows), max(rows), num_sampled, most_sampled, num_drafts, repeats, with_drafter
        )

    @classmethod
    def decoding(
        cls, num_requests: int, each: int, num_drafts: int, *, with_drafter: bool = True
    ) -> BatchShape:
        """Every request samples `each` rows and has no others."""
        num_rows = num_requests * each
        return cls(
            num_requests, num_rows, each, num_rows, each, num_drafts, repeats=True, with_drafter=with_drafter
        )


def numbers_of_requests(config: EngineConfig, num_drafts: int) -> tuple[int, ...]:
    """What decoding passes are filled up to: 1, 2, 4, each multiple of 8 up to 64, of 32 up to 256, and the most there
    can be."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens // (1 + num_drafts), 256)
    numbers = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32)]
    return tuple(sorted({n for n in numbers if n < most} | {most} - {0}))


def mixed_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of rows that products have certificates for, and the budget, which a prompt that is cut fills."""
    most = min(config.max_num_batched_tokens, MOST_MIXED_ROWS)
    return () if config.enforce_eager else (*(n for n in BUCKETS if LEAST_MIXED_ROWS <= n < most), most)


@dataclass(slots=True, kw_only=True)
class Shapes:
    """The shapes that steps are given. `levels`: numbers of drafts, ascending, that captured steps are made for, 0:
    without drafter; `buckets`: numbers of requests, ascending, that decoding passes are filled up to; `mixed`: numbers
    of rows, ascending, that passes with prompts are filled up to, while larger ones run as they are. `costs_alike`: the
    drafter has no model, so that few drafts take it as long as many.
    """

    num_drafts: int
    max_model_len: int
    has_drafter: bool
    costs_alike: bool = False
    levels: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def padded(self, step: StepInput) -> BatchShape | None:
        """The graph bucket that a step in which everybody decodes is padded to, with as many rows each as its level of
        drafts asks for; None for others."""
        scheduled = step.scheduled
        num_requests = next((R for R in self.buckets if len(scheduled) <= R), None)
        if not step.all_decode or num_requests is None:
            return None
        most = max(max(s.num_rows - 1, s.num_drafts) for s in scheduled)
        if not step.without_drafter and self.num_drafts:
            most = max(most, 1)
        level = next((k for k in self.levels if k >= most), most)
        with_drafter = self.has_drafter and not step.without_drafter
        return BatchShape.decoding(num_requests, 1 + level, level, with_drafter=with_drafter)

    def fitted(
        self, step: StepInput, *, has_items: bool, is_recorded: bool
    ) -> tuple[Seq[ScheduledRequest], BatchShape]:
        """The rows of a step that is in no bucket, and its shape. has_items: it is not a function of the slots' memory
        alone; is_recorded: sizes that come again are recorded."""
        scheduled = step.scheduled
        is_small = sum(s.num_rows for s in scheduled) <= MAX_GRAPH_ROWS
        repeats = is_small and not self.buckets and not has_items
        if step.all_decode and repeats and is_recorded:
            scheduled = self._rounded(scheduled)
        shape = BatchShape.of(scheduled, repeats=repeats, with_drafter=not step.without_drafter)
        if step.all_decode:
            return scheduled, self.widened(shape, is_recorded=is_recorded)
        return scheduled, shape if has_items else self._filled_up(shape)

    def _rounded(self, scheduled: Seq[ScheduledRequest]) -> list[ScheduledRequest]:
        """Rows that verify nothing beside those that are there, so that sizes come again. Drafting has the pages for
        them; beyond a request's limit they go to the scrap page."""
        num_rows = sum(s.num_rows for s in scheduled)
        missing = rounded_rows(len(scheduled), num_rows, self.num_drafts) - num_rows
        filled = []
        for s in scheduled:
            more = min(missing, 1 + self.num_drafts - s.num_rows)
            missing -= more
            filled.append(s._replace(num_rows=s.num_rows + more, num_sampled=s.num_sampled + more))
        return filled

    def _filled_up(self, shape: BatchShape) -> BatchShape:
        """A step with prompts, of a size that comes again: rows that belong to nobody are added, as one request more.
        They are few enough to have places in the scratch slot. Without such sizes (a row costs a CPU more than what a
        program saves) whose rows they are matters as little."""
        if not self.mixed:
            return replace(shape, most_rows=shape.num_rows)
        num_rows = next((n for n in self.mixed if n >= shape.num_rows), 0)
        missing = num_rows - shape.num_rows
        if not num_rows or missing > self.max_model_len:
            return shape
        return replace(
            shape,
            num_requests=shape.num_requests + (missing > 0),
            num_rows=num_rows,
            most_rows=num_rows,
            num_drafts=next(k for k in (0, *self.levels, shape.num_drafts) if k >= shape.num_drafts),
            repeats=True,
        )

    def widened(self, shape: BatchShape, *, is_recorded: bool) -> BatchShape:
        """A step of the same rows that any number of drafts fits into, so that there are fewer shapes to record."""
        most = 1 + self.num_drafts
        if self.buckets or not self.has_drafter:
            return shape
        if not shape.with_drafter:
            return replace(shape, most_rows=most) if is_recorded else shape
        num_drafts = self.num_drafts if self.costs_alike else shape.num_drafts
        return replace(shape, most_rows=most, most_sampled=most, num_drafts=num_drafts)
