"""Reads a GGUF file: metadata and dequantized tensors; every length is checked against the file's size.

The format is that of ggml's docs/gguf.md (github.com/ggml-org/ggml): little-endian, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.schema import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Fixed-size metadata types as format characters of the struct module.
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MOST_DIMS = 4
_MOST_NAME = 256  # characters; the format allows no more than 64 for tensors
_ALIGNMENT = 32  # default
_PIECE = 1 << 24  # elements dequantized at once: fp32 copies of whole matrices would set the peak of memory


@dataclass(frozen=True, slots=True)
class Stored:
    """Location of a tensor. `kind`: storage type by the gguf library's name; `shape`: in torch's order; `start` and
    `num_bytes` within the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def library() -> ModuleType:
    """The gguf library; ValueError with how to install it if it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"reading a .gguf file needs the gguf library ({error}): pip install 'draftproof[gguf]'"
        ) from error
    return gguf


class GgufFile:
    """Metadata by key, tensors by name. Raises ValueError, one line with the file's name, for a broken file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = library()
        with path.open("rb") as opened:
            size = opened.seek(0, 2)
            if size < 24:
                raise ValueError(f"{path} ({size} bytes): too short for a GGUF file; download it again")
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._bytes, f"{path} ({size} bytes)")
        num_tensors, num_fields = _header(cursor)
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.name("the name of a field")
            self.fields[key] = cursor.value(key)
        self._check_split()
        self.tensors = self._table(cursor, num_tensors)

    def field(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A metadata value, or `default`; ValueError if it is not of `kind`."""
        value = self.fields.get(key, default)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is int)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(one.__name__ for one in kinds)
            raise ValueError(
                f"{self.path}: {key}={shown(value)}: must be of type {expected}; download the file again"
            )
        return value

    def unsupported(self, key: str, known: Iterable[str]) -> ValueError:
        """The error for a value that is not in `known`; without a hint, since a similar name means something else."""
        return ValueError(
            f"{self.path}: {key}={shown(self.fields.get(key))}: not supported, only {', '.join(sorted(known))}; take "
            "the checkpoint that this file was made of"
        )

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor, dequantized in fp32 and rounded to `dtype`; ValueError if it is missing or not of `shape`."""
        stored = self.tensors.get(name)
        if stored is None:
            raise ValueError(
                f"{self.path}: tensor {name!r} is missing; the file is incomplete: download it again"
            )
        if stored.shape != shape:
            raise ValueError(
                f"{self.path}: tensor {name!r} has shape {list(stored.shape)}, but the metadata asks for "
                f"{list(shape)}; download the file again"
            )
        raw = np.frombuffer(self._bytes, np.uint8, stored.num_bytes, stored.start)
        rows = raw.reshape(prod(shape[:-1]), -1)
        result = torch.empty(len(rows), shape[-1], dtype=dtype)
        step = max(1, _PIECE // shape[-1])
        for first in range(0, len(rows), step):
            result[first : first + step] = self._numbers(name, stored.kind, rows[first : first + step])
        return result.view(shape)

    def _numbers(self, name: str, kind: str, rows: np.ndarray[Any, Any]) -> Tensor:
        """Rows of bytes as fp32."""
        try:
            numbers = self._gguf.dequantize(rows, self._gguf.GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} is stored as {kind}, which the gguf library cannot read; take a file of "
                "another quantisation, such as Q8_0 or Q4_K_M, or update gguf"
            ) from error
        return torch.from_numpy(np.array(numbers, dtype=np.float32))

    def _check_split(self) -> None:
        parts = self.fields.get("split.count", 0)
        if parts not in (0, 1):
            raise ValueError(
                f"{self.path}: split.count={shown(parts)}: is one of several parts; join them with "
                "`llama-gguf-split --merge`"
            )

    def _table(self, cursor: _Cursor, num_tensors: int) -> dict[str, Stored]:
        """The tensors, in the order of the file."""
        found = {}
        for _ in range(num_tensors):
            name = cursor.name("the name of a tensor")
            num_dims = cursor.number("I", f"tensor {name!r}")
            if not 1 <= num_dims <= _MOST_DIMS:
                raise cursor.broken(f"tensor {name!r} has {num_dims} dimensions, not 1 to {_MOST_DIMS}")
            # GGUF lists torch's last dimension first
            shape = tuple(reversed([cursor.number("Q", f"tensor {name!r}") for _ in range(num_dims)]))
            kind = self._kind(name, cursor.number("I", f"tensor {name!r}"))
            offset = cursor.number("Q", f"tensor {name!r}")
            found[name] = Stored(kind, shape, offset, self._num_bytes(name, kind, shape))
        alignment = self.field("general.alignment", int, _ALIGNMENT)
        if alignment < 1:
            raise cursor.broken(f"general.alignment={alignment}: must be at least 1")
        data = -(-cursor.position // alignment) * alignment
        placed = {
            name: Stored(one.kind, one.shape, data + one.start, one.num_bytes) for name, one in found.items()
        }
        for name, one in placed.items():
            if one.start + one.num_bytes > len(self._bytes):
                raise cursor.broken(
                    f"ends before byte {one.start + one.num_bytes}, the end of tensor {name!r}"
                )
        return placed

    def _kind(self, name: str, number: int) -> str:
        try:
            return str(self._gguf.GGMLQuantizationType(number).name)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} is stored as type {number}, which the gguf library does not know; take "
                "a file of another quantisation, such as Q8_0 or Q4_K_M, or update gguf"
            ) from error

    def _num_bytes(self, name: str, kind: str, shape: tuple[int, ...]) -> int:
        block, num_bytes = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType[kind]]
        if 0 in shape or shape[-1] % block:
            raise ValueError(
                f"{self.path}: tensor {name!r} has shape {list(shape)}: rows of {kind} must be multiples of {block} "
                "numbers; download the file again"
            )
        return prod(shape) // int(block) * int(num_bytes)


class _Cursor:
    """A read position in the file."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data = data
        self.where = where
        self.position = 0

    def broken(self, why: str) -> ValueError:
        return ValueError(f"{self.where}: {why}; it is cut short or damaged: download it again")

    def take(self, num_bytes: int, what: str) -> bytes:
        """Read the next bytes; ValueError if the file ends before."""
        end = self.position + num_bytes
        if end > len(self._data):
            raise self.broken(f"ends in the middle of {what}")
        found = self._data[self.position : end]
        self.position = end
        return found

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form), what))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"{what} is no text ({error.reason})") from None

    def name(self, what: str) -> str:
        """Read a text that is printable in one line."""
        found = self.text(what)
        if len(found) > _MOST_NAME or not found.isprintable():
            raise self.broken(f"{what}, {shown(found)}, is none")
        return found

    def value(self, key: str) -> Any:
        """Read a metadata value and the type before it."""
        kind = self.number("I", key)
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self.broken(f"{key} is of type {kind}, which there is not")
        return self.number(_SCALARS[kind], key)

    def _array(self, key: str) -> list[Any]:
        kind = self.number("I", key)
        count = self.number("Q", key)
        if kind == _STRING:
            if count > len(self._data):  # else a corrupt count would loop for hours
                raise self.broken(f"ends in the middle of {key}")
            return [self.text(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.broken(f"{key} is an array of type {kind}, which is not supported")
        form = _SCALARS[kind]
        raw = self.take(count * struct.calcsize(form), key)
        return list(struct.unpack(f"<{count}{form}", raw))


def _header(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of fields)."""
    magic = cursor.take(4, "its first bytes")
    if magic != _MAGIC:
        raise cursor.broken(f"begins with {magic!r}, so it is no GGUF file")
    version = cursor.number("I", "its version")
    if version not in _VERSIONS:
        allowed = " or ".join(map(str, _VERSIONS))
        raise ValueError(
            f"{cursor.where}: GGUF version={version}: must be {allowed}; convert the model again with a newer llama.cpp"
        )
    return cursor.number("Q", "its header"), cursor.number("Q", "its header")
