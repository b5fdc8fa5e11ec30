"""draftproof: speculative decoding that cannot change a model's output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.config import EngineConfig, SpeculativeConfig
    from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Taps, Verified
    from draftproof.drafters.head import HeadLayout
    from draftproof.engine.core import EngineCore
    from draftproof.engine.deltas import TokenDelta
    from draftproof.engine.interface import RequestSpec
    from draftproof.frontend.llm import LLM
    from draftproof.types import (
        CompletionOutput,
        Delta,
        Logprob,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "DraftSpec",
    "Drafter",
    "EngineConfig",
    "EngineCore",
    "HeadLayout",
    "Logprob",
    "Proposal",
    "RequestOutput",
    "RequestSpec",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "Taps",
    "TokenDelta",
    "Verified",
]

__version__ = "0.1.0"

_MODULES = {
    "config": ("EngineConfig", "SpeculativeConfig"),
    "drafters.base": ("Drafter", "DraftSpec", "Proposal", "Taps", "Verified"),
    "drafters.head": ("HeadLayout",),
    "engine.core": ("EngineCore",),
    "engine.deltas": ("TokenDelta",),
    "engine.interface": ("RequestSpec",),
    "frontend.llm": ("LLM",),
    "types": (
        "CompletionOutput",
        "Delta",
        "Logprob",
        "RequestOutput",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
}
_HOME = {name: f"draftproof.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Names are imported when first used: `draftproof --help` must not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'draftproof' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
