"""draftproof: speculative decoding that cannot change a model's output."""

from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.drafters.base import Drafter, DraftSpec, InputLayout, Proposal, Taps, Verified
from draftproof.engine.llm import LLM
from draftproof.types import CompletionOutput, Delta, Logprob, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "DraftSpec",
    "Drafter",
    "EngineConfig",
    "InputLayout",
    "Logprob",
    "Proposal",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "Taps",
    "Verified",
]
