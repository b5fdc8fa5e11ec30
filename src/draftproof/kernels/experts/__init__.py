"""Routing, grouping rows by expert and combining outputs: versions of the operators."""

from __future__ import annotations

from draftproof.kernels.experts.compiled import CompiledExperts
from draftproof.kernels.experts.reference import TORCH_EXPERTS
from draftproof.kernels.experts.spec import ExpertOps
from draftproof.kernels.versions import Versions


def _triton() -> ExpertOps:
    from draftproof.kernels.experts.triton import TritonExperts

    return TritonExperts()


EXPERTS: Versions[ExpertOps] = Versions(TORCH_EXPERTS, compiled=CompiledExperts, triton=_triton)
