"""A checkpoint's tensors: read lazily from safetensors, held in memory, or drawn from a seed."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftproof.schema import read_json, section, shown

_OFFSETS = ("d2t",)  # tensors of target id minus draft id
_ORDERS = ("masked_embedding.token_ordering",)  # tensors that are permutations of all ids
_BRANCHES = {
    "o_proj": 1.0,
    "down_proj": 8.0,
    ".w2.": 8.0,
}  # random weights: gain of a layer's parts in the stream
_ROOTS = (
    "model.",
    "model.language_model.",
    "language_model.model.",
)  # prefixes, some of text models within multimodal ones


# "finite": numbers where NaN or infinity would silently give wrong outputs, as in the choice of experts.
Kind = Literal["numbers", "finite", "ids"]
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Allowed dtypes of each kind: the numbers of others (int8, float8, complex, bool) are not the values they encode.
_DTYPES: Mapping[Kind, tuple[torch.dtype, ...]] = {
    "numbers": _NUMBERS,
    "finite": _NUMBERS,
    "ids": (torch.int64, torch.int32),
}


class WeightSource(Protocol):
    """Where layers get their tensors."""

    def __contains__(self, name: object) -> bool: ...

    def get(self, name: str, shape: Sequence[int] | None = None, kind: Kind = "numbers") -> Tensor:
        """The tensor `name`, on the CPU and as stored; ValueError if it is missing, not of `shape`, or its dtype is not
        one of `kind`."""
        ...

    def shape(self, name: str, *num_dims: int) -> tuple[int, ...] | None:
        """The stored shape of `name`, None if the source accepts any; ValueError if it is missing or its number of
        dimensions is not in `num_dims`."""
        ...


def root_of(weights: WeightSource) -> str:
    """The prefix of a language model's tensor names; empty for a model saved without its head."""
    return next((root for root in _ROOTS if f"{root}embed_tokens.weight" in weights), "")


def head_of(weights: WeightSource) -> str:
    """The name of a language model's output matrix, without ".weight"."""
    return next(
        (name for name in ("lm_head", "language_model.lm_head") if f"{name}.weight" in weights), "lm_head"
    )


def check_dense(tensor: Tensor, what: str) -> None:
    """Raise ValueError, beginning with `what`, for a tensor not stored in full: sparse, quantized or expanded."""
    stored_as = None
    if tensor.device.type != "cpu":
        stored_as = "without data"
    elif tensor.is_quantized:
        stored_as = "quantised"
    elif tensor.layout != torch.strided:
        stored_as = str(tensor.layout).removeprefix("torch.")
    elif tensor.untyped_storage().nbytes() < tensor.nbytes:
        stored_as = "as a repeated part"
    if stored_as is not None:
        raise ValueError(f"{what} is stored {stored_as}: must be a plain dense tensor; convert the file")


class Weights:
    """The tensors of one checkpoint, read on request; it tracks which were requested."""

    __slots__ = ("_asked", "_names", "_read", "stored", "where")

    def __init__(
        self,
        where: str,
        names: Iterable[str],
        read: Callable[[str], Tensor],
        stored: Callable[[str], str] = lambda name: name,
    ) -> None:
        """stored: the files' name of a tensor, for errors."""
        self.where = where
        self._names = frozenset(names)
        self._read = read
        self.stored = stored
        self._asked: set[str] = set()

    @classmethod
    def open(cls, directory: Path) -> Weights:
        """The safetensors of a folder: by index, `model.safetensors`, or the only file."""
        files = _Files(directory)
        return cls(str(directory), files.names(), files.read)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], where: str) -> Weights:
        """Tensors already in memory; `where` names their source in errors."""
        return cls(where, tensors, tensors.__getitem__)

    def renamed(self, rename: Callable[[str], str]) -> Weights:
        """These tensors under the names given by `rename`."""
        names = {rename(name): name for name in self._names}
        return Weights(
            self.where,
            names,
            lambda name: self._read(names[name]),
            lambda name: self.stored(names.get(name, name)),
        )

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        return sorted(self._names)

    def read(self, name: str) -> Tensor:
        """An existing tensor, as stored, without checks."""
        return self._read(name)

    def get(self, name: str, shape: Sequence[int] | None = None, kind: Kind = "numbers") -> Tensor:
        """See `WeightSource`."""
        stored = self.stored(name)
        if name not in self._names:
            raise ValueError(f"{self.where}: tensor {stored!r} is missing{self._nearby(stored)}")
        tensor = self._read(name)
        check_dense(tensor, f"{self.where}: tensor {stored!r}")
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{self.where}: tensor {stored!r} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(shape)}; the two files are not of the same model"
            )
        if tensor.dtype not in _DTYPES[kind]:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES[kind])
            raise ValueError(
                f"{self.where}: tensor {stored!r} is stored as {str(tensor.dtype).removeprefix('torch.')}: must be one "
                f"of {allowed}; quantised checkpoints are not supported here, take the unquantised one"
            )
        if kind == "finite" and not tensor.isfinite().all():
            raise ValueError(
                f"{self.where}: tensor {stored!r} holds NaN or infinity; download the files again"
            )
        self._asked.add(name)
        return tensor.detach()

    def shape(self, name: str, *num_dims: int) -> tuple[int, ...]:
        """See `WeightSource`."""
        found = tuple(self.get(name).shape)
        if len(found) not in num_dims:
            allowed = " or ".join(map(str, num_dims))
            raise ValueError(
                f"{self.where}: tensor {self.stored(name)!r} has shape {list(found)}: must have {allowed} dimensions; "
                "the files are not of this model"
            )
        return found

    def _nearby(self, name: str) -> str:
        tail = ".".join(name.split(".")[-2:])
        near = [n for n in self.names() if n.endswith(tail)][:2]
        return (
            f"; similar ones there: {', '.join(near)}"
            if near
            else "; the files are incomplete or of another model: download them again"
        )

    def unused(self, ignorable: Sequence[str] = ()) -> list[str]:
        """Tensors never requested, except those that match one of the regular expressions `ignorable`."""
        left = self._names - self._asked
        return sorted(n for n in left if not any(re.fullmatch(pattern, n) for pattern in ignorable))

    def check_used(self, own: Callable[[str], bool], ignorable: Sequence[str] = ()) -> None:
        """Raise ValueError for unused tensors that are part of the model, by `own(name)`; warn about others."""
        left = self.unused(ignorable)
        lost = [name for name in left if own(name)]
        if lost:
            raise ValueError(
                f"{self.where}: {len(lost)} tensors have no place in this model, such as "
                f"{', '.join(map(self.stored, lost[:3]))}; "
                "results would be wrong without them: check that config.json belongs to these files"
            )
        if left:
            logging.getLogger(__name__).warning(
                "%s: %d tensors are not used, such as %s",
                self.where,
                len(left),
                ", ".join(map(self.stored, left[:3])),
            )


def index_names(index: Path) -> dict[str, str]:
    """File of each tensor, from an index; ValueError if it is empty or names files outside the folder."""
    weight_map = section(read_json(index), "weight_map", str(index))
    if not weight_map:
        raise ValueError(f"{index}: has no 'weight_map'; download the model again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{index}: weight_map: {shown(name)}={shown(file)}: must be the name of a file beside it; download the "
                "model again"
            )
    return dict(weight_map)


class _Files:
    """The safetensors files of a folder; opened on first use, and kept open."""

    __slots__ = ("_file_of", "_open", "directory")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, Any] = {}
        index = directory / "model.safetensors.index.json"
        self._file_of = self._from_index(index) if index.is_file() else self._from_single()

    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        file = self._file_of[name]
        try:
            return self._handle(file).get_tensor(name)
        except (
            SafetensorError,
            KeyError,
            AttributeError,
            TypeError,
            RuntimeError,
        ) as error:  # a dtype torch lacks
            raise self._broken(file, error) from error

    def _from_index(self, index: Path) -> dict[str, str]:
        weight_map = index_names(index)
        for file in sorted(set(weight_map.values())):
            if not (self.directory / file).is_file():
                raise ValueError(f"{index}: names {file}, which is not there; download the model again")
            stored = set(self._handle(file).keys())
            lost = next((n for n, f in weight_map.items() if f == file and n not in stored), None)
            if lost is not None:
                raise ValueError(f"{self.directory / file}: tensor {lost!r} of {index.name} is not in it")
        return weight_map

    def _from_single(self) -> dict[str, str]:
        files = sorted(p.name for p in self.directory.glob("*.safetensors"))
        if "model.safetensors" in files:
            files = ["model.safetensors"]
        if len(files) != 1:
            found = (
                f"several ({', '.join(files[:4])}) and no model.safetensors.index.json" if files else "none"
            )
            pickled = any(self.directory.glob("*.bin")) and not files
            if pickled:
                fix = "only safetensors are read: convert the .bin files"
            else:
                fix = "download the model again, or give load_format='dummy' for random weights"
            raise ValueError(f"{self.directory}: safetensors files: {found}; {fix}")
        return dict.fromkeys(self._handle(files[0]).keys(), files[0])

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise self._broken(file, error) from error
        return self._open[file]

    def _broken(self, file: str, error: Exception) -> ValueError:
        path = self.directory / file
        size = path.stat().st_size if path.is_file() else 0
        return ValueError(
            f"{path} ({size} bytes): cannot be read, it is probably cut short ({error}); download it again"
        )


class RandomWeights:
    """Weights of any name and shape, drawn from a seed: for tests and benchmarks without files.

    Norms and the scale of logits are around 1, tied or not. The MLPs' terms outweigh the embedding in the stream: else
    tied logits would repeat the input token. A tensor depends only on the seed, its name, dtype and device type.
    """

    __slots__ = ("_device", "_dtype", "_seed")

    def __init__(
        self,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._seed = seed
        self._device = device
        self._dtype = dtype

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, shape: Sequence[int] | None = None, kind: Kind = "numbers") -> Tensor:
        """A random tensor, unlike files in the constructor's dtype and on its device; `shape` is required.

        A reduced vocabulary has the first ids: int64 offsets of 0, on the CPU. Orderings of ids are ascending.
        """
        if shape is None:
            raise ValueError(f"random weights: tensor {name!r} was asked for without a shape")
        if name in _ORDERS:
            return torch.arange(*shape)
        if name in _OFFSETS:
            return torch.zeros(tuple(shape), dtype=torch.int64)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        noise = torch.randn(tuple(shape), generator=generator, device=self._device, dtype=self._dtype)
        if len(shape) == 1:
            return noise.mul_(0.1) if name.endswith("bias") else noise.mul_(0.1).add_(1.0)
        # terms added to the stream are as small as an embedding, whose rows have length 1
        gain = next((gain * shape[0] ** -0.5 for part, gain in _BRANCHES.items() if part in name), 1.0)
        return noise.mul_(gain * shape[-1] ** -0.5)

    def shape(self, name: str, *num_dims: int) -> None:
        """See `WeightSource`."""
        return
