"""The shape of a pass, and the shape that it is padded to, so that few shapes recur.

Recurring shapes are captured as CUDA graphs on a GPU and recorded on a CPU. Neither that nor padding changes any
output bit. R requests, k drafts each.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from draftproof.config import EngineConfig
from draftproof.engine.costs import MAX_GRAPH_ROWS, MOST_RECORDED_ROWS, rounded_rows
from draftproof.engine.interface import ScheduledRequest, StepInput
from draftproof.matmul.certify import BUCKETS

# numbers of rows for which passes with prompts are padded: fewer rows are rare, and more keep a device busy for longer
# than their launches take
LEAST_MIXED_ROWS, MOST_MIXED_ROWS = 16, 512


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sizes of a pass: all that the host must know of it beforehand."""

    num_requests: int
    num_rows: int
    most_rows: int  # upper bound of the rows of one request
    num_sampled: int
    most_sampled: int  # upper bound of the sampled rows of one request; at least 1
    num_drafts: int  # maximum that a request wants after the pass
    repeats: bool  # passes of this shape recur, so graphs pay
    with_drafter: bool = True
    processing: int = 0  # generation of the sampling table if logits are processed beyond filters, else 0
    only_sampled: bool = False  # the last layer skips rows that are not sampled

    @classmethod
    def of(cls, scheduled: Seq[ScheduledRequest], *, repeats: bool, with_drafter: bool = True) -> BatchShape:
        """The unpadded shape of a step."""
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
        """The shape of a pass in which every request has `each` rows, all sampled."""
        num_rows = num_requests * each
        return cls(
            num_requests, num_rows, each, num_rows, each, num_drafts, repeats=True, with_drafter=with_drafter
        )


def numbers_of_requests(config: EngineConfig, num_drafts: int) -> tuple[int, ...]:
    """Numbers of requests that decode-only passes are padded to: 1, 2, 4, the multiples of 8 up to 64 and of 32 up to
    256, and the maximum."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens // (1 + num_drafts), 256)
    numbers = [1, 2, 4, *range(8, 65, 8), *range(96, 257, 32)]
    return tuple(sorted({n for n in numbers if n < most} | {most} - {0}))


def mixed_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of rows that passes with prompts are padded to: those that products have certificates for, and the token
    budget, which a chunked prompt fills."""
    most = min(config.max_num_batched_tokens, MOST_MIXED_ROWS)
    return () if config.enforce_eager else (*(n for n in BUCKETS if LEAST_MIXED_ROWS <= n < most), most)


@dataclass(slots=True, kw_only=True)
class Shapes:
    """Chooses the shape of each step.

    `max_num_seqs`: most requests. `levels`: numbers of drafts, ascending, for which steps are captured; 0: without
    drafter. `buckets`: numbers of requests, ascending, that decode-only passes are padded to. `mixed`: numbers of rows,
    ascending, that passes with prompts are padded to; larger ones are not padded. `costs_alike`: few drafts take the
    drafter as long as many, since it has no model; `only_lookups`: it is a built-in lookup, or a chain of such.
    """

    num_drafts: int
    max_model_len: int
    has_drafter: bool
    max_num_seqs: int
    costs_alike: bool = False
    only_lookups: bool = False
    levels: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    # Shapes of recorded decode-only steps, by numbers of requests, rows and drafts and whether the drafter sees them:
    # making one takes a notable part of a small model's step.
    _known: dict[tuple[int, int, int, bool], BatchShape] = field(default_factory=dict)

    def padded(self, step: StepInput) -> BatchShape | None:
        """The graph bucket that a decode-only step is padded to: number of requests and level of drafts. None for other
        steps, and for those with too many requests."""
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
        """The rows and shape of a step that is in no bucket. has_items: rows carry embeddings, so the step cannot be
        recorded; is_recorded: recurring shapes are recorded."""
        scheduled = step.scheduled
        num_rows = sum(s.num_rows for s in scheduled)
        most_rows = MOST_RECORDED_ROWS if step.all_decode else MAX_GRAPH_ROWS
        repeats = num_rows <= most_rows and not self.buckets and not has_items
        if step.all_decode and repeats and is_recorded:
            return self._recorded(step, num_rows)
        shape = BatchShape.of(scheduled, repeats=repeats, with_drafter=not step.without_drafter)
        if step.all_decode:
            return scheduled, self.widened(shape, is_recorded=is_recorded)
        return scheduled, shape if has_items else self._filled_up(shape)

    def _recorded(self, step: StepInput, num_rows: int) -> tuple[Seq[ScheduledRequest], BatchShape]:
        """The rows and shape of a decode-only step of `num_rows` rows that is to be recorded."""
        scheduled = step.scheduled
        with_drafter = not step.without_drafter
        rounded = rounded_rows(len(scheduled), num_rows, self.num_drafts)
        if rounded > num_rows:
            scheduled = self._padded_by(rounded - num_rows, scheduled)
        num_requests, num_drafts = len(scheduled), 0
        if with_drafter:
            is_alike = self.costs_alike or step.without_models
            num_drafts = self.num_drafts if is_alike else max([s.num_drafts for s in scheduled])
            if self.only_lookups or step.without_models:
                num_requests = self._padded_requests(num_requests)
        key = num_requests, rounded, num_drafts, with_drafter
        shape = self._known.get(key)
        if shape is None:
            shape = BatchShape.of(scheduled, repeats=True, with_drafter=with_drafter)
            shape = replace(shape, num_requests=num_requests, num_drafts=num_drafts)
            shape = self.widened(shape, is_recorded=True)
            is_shown = self.has_drafter and with_drafter
            # else the key does not tell the most rows of a request
            if is_shown or rounded == len(scheduled):
                self._known[key] = shape
        return scheduled, shape

    def _padded_requests(self, num_requests: int) -> int:
        """The next power of two, or the most there may be. Requests without rows take lookups no time, and rows vary
        from step to step. Example: of 16 requests of `small` one after the other ended, with up to 16 drafts each.
        Every fifth step had to be recorded, a tenth of the time."""
        return min(1 << (num_requests - 1).bit_length(), self.max_num_seqs)

    def _padded_by(self, missing: int, scheduled: Seq[ScheduledRequest]) -> list[ScheduledRequest]:
        """The requests with so many padding rows more, which verify nothing, so that sizes recur. They lie in pages
        held for drafting; past a request's limit they go to the scrap page."""
        filled = []
        for s in scheduled:
            more = min(missing, 1 + self.num_drafts - s.num_rows)
            missing -= more
            filled.append(s._replace(num_rows=s.num_rows + more, num_sampled=s.num_sampled + more))
        return filled

    def _filled_up(self, shape: BatchShape) -> BatchShape:
        """Pad a step with prompts to one of the `mixed` sizes, by a dummy request whose rows fit into the scratch slot.
        Without such sizes (as on a CPU, where a row costs more than a recorded program saves) only the bound on a
        request's rows is widened."""
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
        """The shape with bounds that hold for any number of drafts, so that there are fewer shapes to record."""
        most = 1 + self.num_drafts
        if self.buckets or not self.has_drafter:
            return shape
        if not shape.with_drafter:
            return replace(shape, most_rows=most) if is_recorded else shape
        num_drafts = self.num_drafts if self.costs_alike else shape.num_drafts
        return replace(shape, most_rows=most, most_sampled=most, num_drafts=num_drafts)
