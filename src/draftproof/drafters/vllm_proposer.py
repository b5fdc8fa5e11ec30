"""Runs a class written as a custom proposer for vLLM: builds its config, calls it vLLM's way, converts its lists.

Shapes: R requests, S maximum number of requests, L maximum number of tokens, K drafts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from draftproof.drafters.base import DraftSpec, Verified
from draftproof.drafters.context import DraftContext
from draftproof.drafters.vllm_names import defaults

# vLLM's arguments of `propose`, by position and by name. A drafter of ours takes two.
POSITIONAL = ("sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu")
NAMED = ("slot_mappings",)


def is_proposer(maker: object) -> bool:
    """Whether `maker` is a class whose `propose` can be called as vLLM does, and without our `spec`."""
    propose = getattr(maker, "propose", None)
    if not isinstance(maker, type) or hasattr(maker, "spec") or not callable(propose):
        return False
    bound = isinstance(inspect.getattr_static(maker, "propose"), (staticmethod, classmethod))
    try:
        own = () if bound else (None,)  # self
        inspect.signature(propose).bind(*own, *POSITIONAL, **dict.fromkeys(NAMED))
    except (TypeError, ValueError):  # other arguments, or no signature available
        return False
    return True


def needs_vllm(error: BaseException) -> bool:
    """Whether code failed because vLLM is not installed."""
    missing = error.name if isinstance(error, ImportError) else None
    return missing is not None and missing.split(".")[0] == "vllm"


def advice(name: str) -> str:
    """The error message for the class `name` if it `needs_vllm`."""
    return (
        f"speculative_config: {name!r} imports vllm, which is not installed here, and is not needed to run a proposer: "
        "put what it imports for annotations under `if TYPE_CHECKING:`, or remove it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """The part of vLLM's config that is provided. `speculative_config` has all of vLLM's keys, `model_config` has
    max_model_len, `scheduler_config` has max_num_seqs."""

    speculative_config: SimpleNamespace
    model_config: SimpleNamespace
    scheduler_config: SimpleNamespace

    @classmethod
    def of(cls, name: str, ctx: DraftContext) -> VllmConfig:
        own: Mapping[str, Any] = {
            "method": "custom_class",
            "model": name,
            "num_speculative_tokens": ctx.num_drafts,
        }
        return cls(
            speculative_config=SimpleNamespace(**{**defaults(), **ctx.options, **own}),
            model_config=SimpleNamespace(max_model_len=ctx.max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=ctx.config.max_num_seqs),
        )


class VllmProposer:
    """A drafter around an object with vLLM's `propose`; it is wrapped like any user's drafter. The object sees arrays
    of this class only."""

    spec = DraftSpec(host_tokens=True)

    def __init__(self, proposer: Any, config: VllmConfig) -> None:
        self._proposer = proposer
        self._num_known: dict[int, int] = {}  # slot -> number of tokens at the last call
        shape_SL = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
        self._tokens_SL = np.zeros(shape_SL, dtype=np.int32)
        self._lengths_S = np.zeros(shape_SL[0], dtype=np.int32)

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        self._num_known[slot] = len(tokens)

    def release(self, slot: int) -> None:
        self._num_known.pop(slot, None)

    def propose(self, verified: Verified, num_drafts: int) -> object:
        """The object's result, unchecked. Rows of the arrays are this round's requests, in order. A request whose
        prompt is not finished has sampled nothing."""
        sampled = [self._look(r, verified) for r in range(verified.num_requests)]
        if not any(sampled):
            return [[] for _ in sampled]
        found = self._proposer.propose(sampled, self._lengths_S, self._tokens_SL, **dict.fromkeys(NAMED))
        return found.tolist() if isinstance(found, (np.ndarray, torch.Tensor)) else found

    def _look(self, r: int, verified: Verified) -> list[int]:
        """Write request r's row; returns the tokens sampled since the last call."""
        slot = int(verified.slots_R[r])
        known = np.asarray(verified.history(r))
        start = self._num_known.get(slot, len(known))
        if (
            start == len(known) and verified.k_R[r] > 0
        ):  # drafts wanted right after admission: count the last token as sampled
            start -= 1
        self._num_known[slot] = len(known)
        self._tokens_SL[r, : len(known)] = known
        self._lengths_S[r] = len(known)
        return known[start:].tolist()


def load(name: str, maker: Any, ctx: DraftContext) -> VllmProposer:
    """A drafter around a new object of the class, its model loaded if it has one. Raises whatever the class does."""
    config = VllmConfig.of(name, ctx)
    proposer = maker(config)
    if hasattr(proposer, "load_model"):
        proposer.load_model(None)  # vLLM passes its target module, which has no counterpart here
    return VllmProposer(proposer, config)
