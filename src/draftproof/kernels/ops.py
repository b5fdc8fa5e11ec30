"""The operators of passes and steps: the table of all operators, and the choice of versions for a device.

Every operator is row-safe (law 2): every bit of a row's output depends only on that row's inputs, not on how many rows
share the call, nor on the number of threads; those that only draft, `continuation`, `confidence` and `stopping`, also
read what they were told before. Each operator has a folder, whose `__init__.py` defines its interface and registers its
versions. The versions are chosen once per process and passed on as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draftproof.kernels import (
    activation,
    confidence,
    continuation,
    experts,
    logits,
    lookup,
    norm,
    process,
    rope,
    rows,
    sample,
    step,
    stopping,
)
from draftproof.kernels.continuation.spec import ContinuationOps
from draftproof.kernels.experts.spec import ExpertOps
from draftproof.kernels.step.spec import StepOps
from draftproof.kernels.versions import Versions
from draftproof.runtime import gpu
from draftproof.runtime.native import Library


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each operator."""

    name: str
    rms_norm: norm.RMSNorm
    add_rms_norm: norm.AddRMSNorm
    rope_store: rope.RopeStore
    silu_mul: activation.GateMul
    gelu_mul: activation.GateMul
    gather: rows.Gather
    concat: rows.Concat
    swap: rows.Swap
    sample: sample.Sample
    process: process.Process
    log_normalizer: logits.LogNormalizer
    soft_cap: activation.SoftCap
    lookup: lookup.Lookup
    confidence: confidence.Confidence
    stopping: stopping.Stopping
    continuation: ContinuationOps
    step: StepOps
    experts: ExpertOps


OPERATORS: dict[str, Versions[Any]] = {
    "rms_norm": norm.RMS_NORM,
    "add_rms_norm": norm.ADD_RMS_NORM,
    "rope_store": rope.ROPE_STORE,
    "silu_mul": activation.SILU_MUL,
    "gelu_mul": activation.GELU_MUL,
    "gather": rows.GATHER,
    "concat": rows.CONCAT,
    "swap": rows.SWAP,
    "sample": sample.SAMPLE,
    "process": process.PROCESS,
    "log_normalizer": logits.LOG_NORMALIZER,
    "soft_cap": activation.SOFT_CAP,
    "lookup": lookup.LOOKUP,
    "confidence": confidence.CONFIDENCE,
    "stopping": stopping.STOPPING,
    "continuation": continuation.CONTINUATION,
    "step": step.STEP,
    "experts": experts.EXPERTS,
}
TORCH = Ops("torch", **{name: operator.reference for name, operator in OPERATORS.items()})


def select(device: torch.device, library: Library | None) -> Ops:
    """The fastest operators for `device`; on a CPU without `library` (no compiler, or not wanted) the torch
    references.
    """
    return next(iter(versions(device, library).values()))


def versions(device: torch.device, library: Library | None) -> dict[str, Ops]:
    """The sets of operators that run on `device`, by name, fastest first.

    A GPU has no fallback: torch's reductions and sorts choose their layout by the number of rows there.
    """
    if gpu.available(device):
        return {"triton": triton_ops()}
    if device.type != "cpu" or library is None:
        return {TORCH.name: TORCH}
    return {"compiled": compiled_ops(library), TORCH.name: TORCH}


def compiled_ops(library: Library) -> Ops:
    """The operators in C++."""
    return Ops("compiled", **{name: operator.compiled(library) for name, operator in OPERATORS.items()})


def triton_ops() -> Ops:
    """The operators in Triton, or in torch where there is no Triton version; needs triton."""
    made = {
        name: operator.triton() if operator.triton else operator.reference
        for name, operator in OPERATORS.items()
    }
    return Ops("triton", **made)
