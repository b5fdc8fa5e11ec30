"""The bookkeeping of a step: versions of the operators."""

from __future__ import annotations

from draftproof.kernels.step.compiled import CompiledStep
from draftproof.kernels.step.reference import TORCH_STEP
from draftproof.kernels.step.spec import StepOps
from draftproof.kernels.versions import Versions


def _triton() -> StepOps:
    from draftproof.kernels.step.triton import TritonStep

    return TritonStep()


STEP: Versions[StepOps] = Versions(TORCH_STEP, compiled=CompiledStep, triton=_triton)
