"""The interface of a peer: built from a `Spec`, it generates greedily, ignores EOS, and reports its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Ids = list[list[int]]
Reach = Literal["single", "largest"]  # batch sizes: only 1, or only the largest measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Which engine is loaded, and how; sent as JSON.

    `num_seqs`: maximum prompts at once; `max_len`: tokens of the longest sequence; `scratch`: a folder for temporary
    files; `settings`: more keywords of `LLM`, for our engine.
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
    """An engine, built by `Class(spec)`, which may raise whatever its library raises for a model that it cannot load.

    `version`: of the library; `settings`: those that the report shows; `ways`: other ways to generate than the default
    "", and at which batch size they are measured; `weight_bytes`: read by a step of one request, None if the engine
    does not report it (then computed from the dtype).
    """

    version: str
    settings: Mapping[str, Any]
    ways: Mapping[str, Reach]
    weight_bytes: float | None

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        """(exactly `num_new` ids per prompt, all prompts in one batch; seconds taken)."""
        ...
