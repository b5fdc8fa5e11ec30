"""The attention backends by name. Backends listed here are also covered by the conformance tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftproof.attention.base import AttentionBackend
from draftproof.attention.chunked import PRODUCTS, TREES, ChunkedAttention
from draftproof.attention.compiled.backend import CompiledAttention
from draftproof.attention.exactness import AttentionShape
from draftproof.attention.reference import REFERENCE
from draftproof.attention.sdpa import SDPA
from draftproof.attention.torch_sdpa import TorchSdpa
from draftproof.runtime import gpu
from draftproof.runtime.native import Library
from draftproof.schema import did_you_mean

MOST_TRITON_DIM = 512  # maximum head size
MOST_TRITON_TILE = 16384  # group size times head size: a program's smallest accumulator


@dataclass(frozen=True, slots=True)
class Entry:
    """How to make a backend. `build` gets the compiled library, which is None only if `needs_library` is False."""

    build: Callable[[Library | None], AttentionBackend]
    devices: tuple[str, ...]
    needs_library: bool = False
    needs_triton: bool = False
    by_name_only: bool = False  # for comparison: never chosen automatically
    is_exact: bool = True  # False: usable with exact=False only
    most_dim: int | None = None  # maximum head size
    most_together: int | None = None  # maximum of group size times head size


def _compiled(library: Library | None) -> AttentionBackend:
    assert library is not None
    return CompiledAttention(library)


def _triton(library: Library | None) -> AttentionBackend:
    from draftproof.attention.triton.backend import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Entry] = {
    "compiled": Entry(_compiled, ("cpu",), needs_library=True),
    "sdpa": Entry(lambda _: SDPA, ("cpu",)),
    "chunked": Entry(lambda _: ChunkedAttention(PRODUCTS), ("cpu",)),
    "elementwise": Entry(lambda _: ChunkedAttention(TREES), ("cpu",)),
    "triton": Entry(
        _triton, ("cuda",), needs_triton=True, most_dim=MOST_TRITON_DIM, most_together=MOST_TRITON_TILE
    ),
    "torch_sdpa": Entry(lambda _: TorchSdpa(), ("cpu", "cuda"), by_name_only=True, is_exact=False),
    "reference": Entry(lambda _: REFERENCE, ("cpu", "cuda"), by_name_only=True),
}


def check_sizes(
    device: torch.device, name: str | None, shapes: Sequence[AttentionShape], whose: str = "this model"
) -> None:
    """Raise ValueError for head sizes that no backend supports here."""
    if not gpu.available(device) or name not in (None, *BACKENDS):
        return
    entry = BACKENDS[name or "triton"]
    most_dim, most_together = entry.most_dim, entry.most_together
    for shape in shapes:
        group = shape.num_heads // shape.num_kv_heads
        is_wide = most_dim is not None and shape.head_dim > most_dim
        if is_wide or (most_together is not None and group * shape.head_dim > most_together):
            raise ValueError(
                f"device={str(device)!r}: a group of {group} heads of size {shape.head_dim}, as of {whose}, is more "
                f"than attention on a GPU takes yet (size {most_dim}, {most_together} together); use "
                "device='cpu'"
            )


def select(device: torch.device, library: Library | None, name: str | None = None) -> AttentionBackend:
    """The backend `name`, or the first in the table that `device` and `library` allow; see `versions`."""
    return next(iter(versions(device, library, name).values()))


def versions(
    device: torch.device, library: Library | None, name: str | None = None
) -> dict[str, AttentionBackend]:
    """The backends that run on `device` with `library`, fastest first; only `name` if given.

    They give different bits, so an engine chooses once. Raises ValueError for a name that cannot run here.
    """
    usable = [
        key
        for key, entry in BACKENDS.items()
        if device.type in entry.devices
        and (library is not None or not entry.needs_library)
        and (gpu.available(device) or not entry.needs_triton)
    ]
    if name is None:
        return {key: BACKENDS[key].build(library) for key in usable if not BACKENDS[key].by_name_only}
    if name not in BACKENDS:
        hint = did_you_mean(name, BACKENDS) or f"known: {', '.join(BACKENDS)}"
        raise ValueError(f"attention_backend={name!r}: unknown: {hint}")
    if name not in usable:
        raise ValueError(
            f"attention_backend={name!r}: cannot run on {device.type}"
            f"{' without a C++ compiler' if library is None else ''}; usable here: {', '.join(usable)}"
        )
    return {name: BACKENDS[name].build(library)}
