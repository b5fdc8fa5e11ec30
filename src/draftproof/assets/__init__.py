"""The embedded default model, its drafter, and prompts for the demo and for benchmarks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

TARGET = "tiny"
PROMPTS = "prompts/demo.jsonl"
QUESTIONS = "prompts/gsm8k.jsonl"  # with their answers; from the test split (MIT licence)


def path(name: str) -> Path:
    """Where the asset `name` (for example `TARGET`) lies on disk. Raises ValueError for one that does not exist."""
    found = Path(str(resources.files(__name__))) / name
    if not found.exists():
        raise ValueError(f"asset {name!r}: not part of this installation; reinstall draftproof")
    return found
