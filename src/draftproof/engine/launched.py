"""A launched step of `ModelRunner`: the one place where results are read back from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.engine.interface import (
    NO_NUMBER,
    NONE_LEFT,
    DeviceFaultError,
    RowResult,
    ScheduledRequest,
)
from draftproof.engine.logprobs import Scores
from draftproof.runtime.transfer import ArrivingRows
from draftproof.sampling import sampler


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """Implements `interface.PendingStep`. `result`: one tensor with a row per request, then padding; columns: W tokens,
    numbers of tokens emitted, drafts verified and drafts proposed, bit mask of the drafters that proposed bad ids,
    index of the drafter. `faults`: drafters that raised."""

    sandboxes: Sequence[DrafterSandbox]
    scheduled: Sequence[ScheduledRequest]
    result: ArrivingRows | None = None  # None: nothing was computed
    is_warming: bool = False
    output_scores: Scores | None = None
    prompt_scores: Scores | None = None
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_state_lost: bool = False
    undrafted_slots: tuple[int, ...] = ()
    faults: tuple[int, ...] = ()

    def fail(self, faults: tuple[int, ...]) -> None:
        """Note that these drafters raised, so what they should have kept of this step's rows is missing."""
        self.faults = faults
        failed, slots = [self.sandboxes[i] for i in faults], [s.slot for s in self.scheduled]
        for sandbox in failed:
            sandbox.lose(slots)
        self.draft_state_lost = any(sandbox.spec.kv for sandbox in failed)
        self.undrafted_slots = tuple(
            slot for slot in slots if not any(s.drafts_for(slot) for s in self.sandboxes)
        )

    def wait(self) -> list[RowResult]:
        """Wait for the results: one per scheduled request."""
        if self.result is None:
            return []
        try:
            rows = self.result.wait()[: len(self.scheduled)]
            self._count_bad_ids(rows)
            results = [self._row(r, row) for r, row in enumerate(rows)]
        except torch.AcceleratorError as error:
            raise device_fault(error) from error
        return results

    def _count_bad_ids(self, rows: Sequence[Sequence[int]]) -> None:
        """Count a fault of each drafter, by slot, whose drafts were cut at an id outside the vocabulary."""
        if not any(row[-2] for row in rows):
            return
        for number, sandbox in enumerate(self.sandboxes):
            slots = [s.slot for s, row in zip(self.scheduled, rows, strict=True) if row[-2] >> number & 1]
            if slots:
                sandbox.count_bad_ids(slots)

    def _row(self, index: int, row: list[int]) -> RowResult:
        *tokens, num_emitted, num_drafted, num_proposed, broken, drafter = row
        token_ids, failure = tokens[:num_emitted], ""
        if token_ids and token_ids[-1] < 0:  # only the last can be: no draft equals it, so none follows it
            failure = NONE_LEFT if token_ids.pop() == sampler.NONE_LEFT else NO_NUMBER
        result = RowResult(token_ids, num_drafted, num_proposed, drafter=drafter, failure=failure)
        result.drafter_faults = self.faults
        if broken:
            sandboxes, slot = self.sandboxes, self.scheduled[index].slot
            wrong = [number for number in range(len(sandboxes)) if broken >> number & 1]
            result.drafter_faults += tuple(wrong)
            result.draft_state_lost = any(sandboxes[number].spec.kv for number in wrong)
            result.nobody_drafts = not any(s.drafts_for(slot) for s in sandboxes)
        if self.output_scores is not None:
            result.logprobs = self.output_scores.rows_of(index, token_ids)
        if self.prompt_scores is not None:
            result.prompt_logprobs = self.prompt_scores.rows_of(index, None)
        return result


def device_fault(error: torch.AcceleratorError) -> DeviceFaultError:
    """The error for a GPU fault that the process cannot recover from; running out of memory is not one."""
    first_line = str(error).strip().partition("\n")[0]
    return DeviceFaultError(f"the GPU failed ({first_line}); start a new process")
