"""The tensors of a draft checkpoint: safetensors if present, else a pickle of plain tensors."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftproof.models.weights import Weights, index_names

_INDEX = "model.safetensors.index.json"
_SAFE = ("model.safetensors", _INDEX)
_PICKLE = "pytorch_model.bin"
_CODE = re.compile(r"(?:GLOBAL|global|class) ([\w.]+)")


def open_weights(directory: Path) -> Weights:
    """The tensors of `directory`; ValueError if there are none. A pickle is read with `weights_only`, which runs no
    code."""
    path = directory / _PICKLE
    if not _is_pickled(directory):
        return Weights.open(directory)
    return Weights.of(_plain_tensors(path, "cpu"), str(path))


def tensor_names(directory: Path) -> frozenset[str]:
    """The tensors' names, which identify formats; empty without a file. ValueError for an unreadable file."""
    if _is_pickled(directory):
        return frozenset(_plain_tensors(directory / _PICKLE, "meta"))
    if (directory / _INDEX).is_file():
        return frozenset(index_names(directory / _INDEX))
    if len(list(directory.glob("*.safetensors"))) == 1 or (directory / _SAFE[0]).is_file():
        return frozenset(Weights.open(directory).names())
    return frozenset()


def _is_pickled(directory: Path) -> bool:
    return (directory / _PICKLE).is_file() and not any((directory / name).is_file() for name in _SAFE)


def _plain_tensors(path: Path, device: str) -> Mapping[str, Tensor]:
    """The dict of tensors that torch.save wrote; device "meta": without their data."""
    fix = "download it again, or convert it to safetensors"
    if _is_compressed(path):  # could unpack to any size; torch.save never compresses
        raise ValueError(f"{path}: cannot be read as plain tensors: its parts are compressed; {fix}")
    try:
        # a zip is mapped, so that names can be read without data; legacy files cannot be mapped
        found = torch.load(path, map_location=device, weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # the unpickler raises whatever a broken file makes it raise
        code = _CODE.search(str(error))
        why = f"it holds {code[1]}, which is never run" if code else "it is damaged, or no file of torch.save"
        raise ValueError(f"{path}: cannot be read as plain tensors: {why}; {fix}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: holds no dict of tensors but a {type(found).__name__}; {fix}")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path}: entry {name!r:.80} is no tensor with a name but of type {type(tensor).__name__}; {fix}"
            )
    return found


def _is_compressed(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
        return False  # torch.load reports what is wrong
