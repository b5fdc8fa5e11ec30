"""Times of a runner's steps by size, measured with dummy requests, for the profile at an engine's start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from draftproof.drafters.base import Drafter
from draftproof.engine.costs import MOST_RECORDED_ROWS
from draftproof.engine.interface import ScheduledRequest, StepSize
from draftproof.engine.launched import LaunchedStep
from draftproof.engine.runner import ModelRunner, Pass, target_key
from draftproof.engine.shapes import BatchShape
from draftproof.runtime.graphs import EAGER
from draftproof.runtime.threads import as_certified
from draftproof.runtime.transfer import device_seconds

MOST_PREPARED_BYTES = 1 << 26  # memory of recorded programs beyond which no more are recorded in advance


class StepMeter:
    """Runs steps of a runner that serves no requests yet; leaves its slots empty, and tokens and keys in their memory,
    which those that are admitted overwrite."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_threads = runner.num_threads
        self.on_device = runner.on_device
        self.costs_alike = runner.shapes.costs_alike
        self.buckets = runner.shapes.buckets
        self.max_num_seqs = runner.max_num_seqs
        self.max_model_len = runner.max_model_len

    @as_certified
    def prepare_rows(self, num_rows: int) -> bool:
        """Record the target's pass over `num_rows` rows, which all steps with as many rows share. False if it was not
        recorded, or if programs now take so much memory that it should be the last."""
        runner = self._runner
        if num_rows > self.max_model_len:
            return False
        idle = ScheduledRequest(runner.state.scratch_slot, 0, num_rows, 1, runner.num_drafts)
        shape = self._widened(BatchShape.of([idle], repeats=True))
        rows, _ = runner.state.fill(shape, runner.state.load([idle], shape))
        taps = runner.taps(shape)
        target = partial(runner.target_pass, shape.most_rows, taps, None, None, None)
        is_recorded = runner.graphs.prepare(target_key(shape, taps), target, rows.inputs)
        return is_recorded and runner.graphs.num_bytes < MOST_PREPARED_BYTES

    @as_certified
    def measure(self, size: StepSize) -> tuple[float, float]:
        """Seconds of a step of dummy requests, by the device's clock: (target's pass, draft pass). A step that is one
        graph counts as the target's. A drafter that runs on the host is not called."""
        return self._of_size(size, self._runner.drafter)

    @as_certified
    def lookup_seconds(self, num_requests: int) -> float:
        """Seconds of the draft pass of a chain's lookups, without its other members, for dummy requests."""
        runner = self._runner
        assert runner.is_divided and runner.drafter is not None
        lookups = runner.drafter.limit_models((), 0, are_shown=False)
        return self._of_size(StepSize(num_requests, 0, runner.num_drafts), lookups)[1]

    def _of_size(self, size: StepSize, drafter: Drafter | None) -> tuple[float, float]:
        """See `measure`; `drafter` is asked."""
        state, num_requests, each = self._runner.state, size.num_requests, 1 + size.num_verified
        with_drafter = self._runner.drafter is not None and size.num_verified + size.num_drafts > 0
        shape = BatchShape.decoding(num_requests, each, size.num_drafts, with_drafter=with_drafter)
        shape = self._widened(shape)
        # with context each request reads keys of its own blocks, as in serving
        slots = list(range(num_requests)) if size.context else [state.scratch_slot] * num_requests
        scheduled = [ScheduledRequest(slot, size.context, each, each, size.num_drafts) for slot in slots]
        try:
            state.slots.computed_S[slots] = size.context
            if size.context:
                self._spread(slots)
                # with room for drafts: else the drafter would read no keys
                state.slots.length_S[slots] = size.context + 1
                state.slots.limit_S[slots] = state.max_len
            return self._measured(scheduled, Pass(shape, state.load(scheduled, shape)), drafter)
        finally:
            state.slots.computed_S[slots] = 0
            if size.context:
                self._forget(slots)

    @as_certified
    def prompt_seconds(self, num_rows: int) -> float:
        """Seconds that the drafter takes to see a prompt of so many rows; 0 if it need not, or nobody can time it."""
        runner = self._runner
        is_timed = self.on_device and not (self.buckets or runner.async_depth)
        if not is_timed or not runner.drafter_has_kv:
            return 0.0
        scheduled = [ScheduledRequest(runner.state.scratch_slot, 0, num_rows, 1, 0)]
        shape = BatchShape.of(scheduled, repeats=False)
        try:
            given = Pass(shape, runner.state.load(scheduled, shape))
            return self._measured(scheduled, given, runner.drafter)[1]
        finally:
            runner.state.slots.computed_S[runner.state.scratch_slot] = 0

    def _measured(
        self, scheduled: Sequence[ScheduledRequest], given: Pass, drafter: Drafter | None
    ) -> tuple[float, float]:
        """See `measure`; `drafter` is asked."""
        runner, shape = self._runner, given.shape
        if shape in runner.captured:
            function = partial(runner.step_tensors, shape)
            run = partial(runner.graphs.run, ("step", shape), function, (given.scheduled_4R,))
            return device_seconds(run), 0.0
        recorded = shape.repeats and runner.graphs.calls_once and shape.num_rows <= MOST_RECORDED_ROWS
        if shape.with_drafter and not self.on_device:
            start = time.perf_counter()
            runner.checked(given, runner.graphs if recorded else EAGER)
            return time.perf_counter() - start, 0.0
        launched = LaunchedStep(sandboxes=runner.sandboxes, scheduled=scheduled)
        runner.run_parts(launched, given, drafter, recorded=recorded)
        return launched.target_seconds, launched.draft_seconds

    def _widened(self, shape: BatchShape) -> BatchShape:
        return self._runner.shapes.widened(shape, is_recorded=self._runner.graphs is not EAGER)

    # Slot by slot: on a CPU a large operator of torch wakes torch's threads, which spin for milliseconds afterwards and
    # would take a core from the pass that is measured.
    def _spread(self, slots: Sequence[int]) -> None:
        """Point every page of these slots at a block of the empty cache; blocks are reused if there are too few."""
        layers = *self._runner.cache.layers, *self._runner.draft_cache.layers
        each_table = {layer.block_table_SB.data_ptr(): layer for layer in layers}  # most layers share one
        for layer in each_table.values():
            table_SB = layer.block_table_SB
            num_pages, num_blocks = table_SB.shape[1], max(1, len(layer.k) - 1)
            page_B = torch.arange(num_pages, device=table_SB.device)
            for place, slot in enumerate(slots):
                table_SB[slot] = ((page_B * len(slots) + place) % num_blocks + 1).int()

    def _forget(self, slots: Sequence[int]) -> None:
        """Empty these slots and their block tables."""
        state = self._runner.state
        for numbers_S in (state.slots.length_S, state.slots.limit_S, state.slots.draft_count_S):
            numbers_S[slots] = 0
        for slot in slots:
            state.block_tables_GSB[:, slot] = 0
