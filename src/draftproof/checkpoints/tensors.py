"""The tensors of a draft checkpoint: safetensors where there are any, else a pickle of plain tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from draftproof.models.loading import Weights

_SAFE = ("model.safetensors", "model.safetensors.index.json")
_PICKLE = "pytorch_model.bin"


def open_weights(directory: Path) -> Weights:
    """A pickle only through `weights_only`, which runs no code; ValueError where there is neither."""
    path = directory / _PICKLE
    if not _is_pickled(directory):
        return Weights.open(directory)
    try:
        return Weights.of(torch.load(path, map_location="cpu", weights_only=True), str(path))
    except Exception as error:
        raise ValueError(
            f"{path}: cannot be read as plain tensors ({type(error).__name__}: {error}); convert it to safetensors"
        ) from error


def tensor_names(directory: Path) -> frozenset[str]:
    """Names alone, to tell formats apart by; none where nothing can be read, which is for the reader to say."""
    try:
        if _is_pickled(directory):
            path = directory / _PICKLE
            return frozenset(torch.load(path, map_location="meta", weights_only=True, mmap=True))
        return frozenset(Weights.open(directory).names())
    except Exception:
        return frozenset()


def _is_pickled(directory: Path) -> bool:
    return (directory / _PICKLE).is_file() and not any((directory / name).is_file() for name in _SAFE)
