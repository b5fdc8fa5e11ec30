"""What a peer's class is: made from a `Spec`, it generates greedily, ends of text ignored, and says how it is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Ids = list[list[int]]
Reach = Literal["single", "largest"]  # which batch sizes: only 1, or only the largest that is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Which engine is loaded, and how; it travels as JSON.

    `num_seqs`: most prompts at once; `max_len`: tokens of the longest sequence; `scratch`: a folder for files that it
    needs; `settings`: more keywords of `LLM`, for ours.
    """

    where: str  # module:class
    model: str
    dtype: str
    device: str = "cpu"
    dummy: bool = False
    num_threads: int = 1
    num_seqs: int = 1
    max_len: int = 0
    scratch: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return Path(self.model)


class Engine(Protocol):
    """Made by `Class(spec)`, which may raise whatever its library raises for a model that it cannot load.

    `version`: of the library; `settings`: what a reader should know of how it ran; `ways`: its ways to generate
    beside the usual one, "", and where they are measured; `weight_bytes`: that a step of one request reads, None where
    the engine does not say and the dtype is what is known.
    """

    version: str
    settings: Mapping[str, Any]
    ways: Mapping[str, Reach]
    weight_bytes: float | None

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        """Exactly `num_new` ids for each prompt, all prompts in one batch; and the seconds that it took."""
        ...
