"""The likeliest continuation of texts: versions of the operator."""

from __future__ import annotations

from draftproof.kernels.continuation.compiled import CompiledContinuation
from draftproof.kernels.continuation.reference import TORCH_CONTINUATION
from draftproof.kernels.continuation.spec import ContinuationOps
from draftproof.kernels.versions import Versions

CONTINUATION: Versions[ContinuationOps] = Versions(
    TORCH_CONTINUATION, compiled=CompiledContinuation, triton=None
)
