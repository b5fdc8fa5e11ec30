"""Converts a .gguf file to a checkpoint folder, once, in draftproof's cache; it is then used like any other folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.models.config import ModelConfig, language_model, reading
from draftproof.models.gguf import config as metadata
from draftproof.models.gguf import layout, tokenizer
from draftproof.models.gguf.file import GgufFile
from draftproof.runtime import native

VERSION = 1  # raise with every change to what is written, so that older folders are not used
SUFFIX = ".gguf"
_DTYPE, _DTYPE_NAME = torch.bfloat16, "BF16"
_IGNORED = frozenset({layout.ROPE_DIVISORS})  # covered by config.json
_STALE = 24 * 3600.0  # seconds after which an unfinished folder counts as abandoned

Progress = Callable[[str, int, int], None]  # what, done, total


def checkpoint_of(path: Path, progress: Progress | None = None) -> Path:
    """The checkpoint folder of a .gguf file; converts the file if that was not done before.

    The folder holds config.json, generation_config.json, the tokenizer and model.safetensors in bf16. It is renamed to
    its final name when complete. Raises ValueError for files that cannot be converted.
    """
    folder = _place(path)
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        _remove_stale(folder.parent)
        partial.mkdir(parents=True)
        with reading(path):
            _convert(path, partial, progress)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be converted into {folder.parent} ({error}); free some room there, or set XDG_CACHE_HOME "
            "to a folder elsewhere"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _place(path: Path) -> Path:
    """The folder for this file's current version (path, size and modification time)."""
    real = path.resolve()
    found = real.stat()
    key = json.dumps([str(real), found.st_size, found.st_mtime_ns, VERSION])
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return native.default_cache_dir() / "models" / name


def _remove_stale(models: Path) -> None:
    """Remove partial folders of killed conversions."""
    for left in models.glob("*.partial"):
        if time.time() - left.stat().st_mtime > _STALE:
            shutil.rmtree(left, ignore_errors=True)


def _convert(path: Path, folder: Path, progress: Progress | None) -> None:
    file = GgufFile(path)
    raw = metadata.read(file)
    config = language_model(raw, f"{path}, as config.json")
    wanted = list(layout.names(config, "model."))
    lost = sorted(set(file.tensors) - {theirs for theirs, _, _ in wanted} - _IGNORED)
    if lost:
        raise ValueError(
            f"{path}: {len(lost)} tensors have no place in a model of architecture "
            f"{file.fields['general.architecture']!r}, such as {', '.join(lost[:3])}; results would be wrong without "
            "them: take the checkpoint that this file was made of"
        )
    _write_json(folder / "config.json", raw)
    defaults = metadata.generation(file)
    if defaults:
        _write_json(folder / "generation_config.json", defaults)
    tokenizer.write(file, folder, config.vocab_size)
    show = progress or (lambda what, done, total: None)
    what = f"converting {path.name}"
    with (folder / "model.safetensors").open("wb") as out:
        out.write(_header([(ours, shape) for _, ours, shape in wanted]))
        for done, (theirs, _, shape) in enumerate(wanted):
            show(what, done, len(wanted))
            out.write(_tensor(file, config, theirs, shape).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
    show(what, len(wanted), len(wanted))


def _tensor(file: GgufFile, config: ModelConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor in checkpoint form."""
    if config.norm_offset and name.endswith("norm.weight"):
        # GGUF stores norm weights with the offset already added
        return (file.read(name, shape, torch.float32) - config.norm_offset).to(_DTYPE)
    tensor = file.read(name, shape, _DTYPE)
    num_heads = layout.rotated_heads(name, config)
    return layout.separate(tensor, num_heads).contiguous() if num_heads else tensor


def _header(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> bytes:
    """The header of a safetensors file whose tensors follow in this order; written by hand, because the library needs
    all tensors in memory."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in tensors:
        end = start + torch.Size(shape).numel() * _DTYPE.itemsize
        entries[name] = {"dtype": _DTYPE_NAME, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: dict[str, Any]) -> None:
    stated = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(stated, indent=1), encoding="utf-8")
