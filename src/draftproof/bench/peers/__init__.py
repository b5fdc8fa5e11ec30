"""Table of other engines that are compared with ours: what each needs, and where its class is.

Each engine runs in its own process (`worker`), controlled over pipes (`processes`); they take turns (`comparison`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

OURS = "draftproof"
MEMORY = "memory"  # only reads a buffer


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine. `where`: module and class; `module`: must be importable for it; `package`: provides that module."""

    where: str
    module: str
    package: str
    needs_cpu: bool = False


ENGINES = {
    OURS: Entry("draftproof.bench.peers.ours:Ours", "draftproof", "draftproof"),
    "transformers": Entry("draftproof.bench.peers.hf:Transformers", "transformers", "transformers"),
    "llama.cpp": Entry(
        "draftproof.bench.peers.llama_cpp:LlamaCpp", "llama_cpp", "llama-cpp-python", needs_cpu=True
    ),
    "openvino": Entry(
        "draftproof.bench.peers.openvino:OpenVino", "openvino_genai", "openvino-genai", needs_cpu=True
    ),
    MEMORY: Entry("draftproof.bench.peers.memory:Memory", "torch", "torch"),
}
NAMES = tuple(name for name in ENGINES if name not in (OURS, MEMORY))
READ_GGUF = ("llama.cpp", "openvino")


def check(names: Sequence[str]) -> None:
    """Raise ValueError for a peer that is unknown, named twice, or not installed."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--against {name}: unknown; choose from {', '.join(NAMES)}")
        if names.count(name) > 1:
            raise ValueError(f"--against {','.join(names)}: names {name} twice")
        needed = [(ENGINES[name].module, ENGINES[name].package)]
        needed += [("gguf", "gguf")] if name in READ_GGUF else []
        for module, package in needed:
            if importlib.util.find_spec(module) is None:
                raise ValueError(
                    f"--against {name}: {package} is not installed; pip install 'draftproof[peers]'"
                )
