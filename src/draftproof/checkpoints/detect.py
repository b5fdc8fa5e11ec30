"""Detects the format of a draft checkpoint, by its content, never by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.checkpoints import (
    compressed,
    gemma4_assistant,
    language_model,
    safeailab,
    speculators,
    zlab,
)
from draftproof.drafters.context import DraftCheckpoint
from draftproof.models.config import read_raw, reading
from draftproof.models.weights import Weights, WeightSource

_HEADS = (gemma4_assistant, zlab, speculators, safeailab)
_READERS = (*_HEADS, language_model)  # the first that matches reads


def read(
    directory: Path, weights: WeightSource | None = None, overrides: Mapping[str, Any] | None = None
) -> DraftCheckpoint:
    """The checkpoint in `directory`. `weights` replaces the files' tensors, `overrides` replaces keys of config.json.

    ValueError if no format matches.
    """
    raw, _ = read_raw(directory, overrides)
    for reader in _READERS:
        with reading(directory / "config.json"):
            if not reader.matches(directory, raw):
                continue
            if reader is language_model:
                return reader.read(directory, raw, weights)
            raw, scheme = compressed.split(raw, str(directory / "config.json"))
            head = reader.read(directory, raw, weights)
            if scheme is None or not isinstance(head.weights, Weights):
                return head
            return dataclasses.replace(head, weights=compressed.dequantized(head.weights, scheme))
    raise ValueError(
        f"{directory / 'config.json'}: no draft checkpoint that is known: neither speculators "
        "(speculators_model_type), nor z-lab's (dflash_config), nor Gemma's (gemma4_assistant), nor a flat EAGLE head "
        "(fc.weight), nor a language model (model_type)"
    )


def is_draft_head(directory: Path, overrides: Mapping[str, Any] | None = None) -> bool:
    """Whether the folder holds a draft head rather than a language model; overrides as in `read`."""
    path = directory / "config.json"
    if not path.is_file():
        return False
    raw, _ = read_raw(directory, overrides)
    with reading(path):
        return any(reader.matches(directory, raw) for reader in _HEADS)


def target_of(checkpoint: DraftCheckpoint) -> str | None:
    """The target that the checkpoint names: a hub id, or a path, absolute or relative to its folder or the parent."""
    name = checkpoint.target
    if name is None:
        return None
    for folder in (checkpoint.directory, checkpoint.directory.parent):
        path = folder / name  # an absolute name stays as it is
        if path.is_dir():
            return str(path.resolve())
    return name
