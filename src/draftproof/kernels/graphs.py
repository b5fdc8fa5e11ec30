"""Running a function of fixed buffers again and again for the price of one call.

`Graphs.run(key, function, inputs)` returns `function(*inputs)`. Whoever calls promises that for equal keys the function
is the same and the inputs have the same shapes; what comes back is overwritten by the next run of that key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.kernels.native import Library, Program

Function = Callable[..., tuple[Tensor, ...]]
MOST_PROGRAMS = 256
MOST_BYTES = 1 << 30  # a program keeps every tensor of its pass
# What may stand between recorded operators: making room, and looking at it otherwise.
_HARMLESS = {
    "empty",
    "new_empty",
    "empty_like",
    "view",
    "split",
    "split_with_sizes",
    "slice",
    "select",
    "alias",
    "detach",
}
_HARMLESS |= {"_unsafe_view", "unsqueeze", "squeeze", "t", "unbind", "as_strided", "expand", "empty_strided"}


class Graphs(Protocol):
    """A way of running again."""

    def run(self, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...


class Eager:
    """Calls the function."""

    def run(self, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return function(*inputs)


EAGER = Eager()


@dataclass(slots=True)
class _Entry:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    program: Program | None  # None: the function does something that cannot be recorded


class Recorded:
    """On a CPU with the compiled operators: their calls are written down once, and later run without Python.

    A function that computes anything by other means than those operators is found out while it is recorded, and runs
    as it is from then on.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._entries: dict[Hashable, _Entry] = {}
        self._num_bytes = 0

    def run(self, key: Hashable, function: Function, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        key = (key, torch.get_num_threads())
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= MOST_PROGRAMS or self._num_bytes >= MOST_BYTES:
                return function(*inputs)
            entry = self._entries[key] = self._record(function, inputs)
            return entry.outputs
        if entry.program is None:
            return function(*inputs)
        for static, given in zip(entry.inputs, inputs, strict=True):
            static.copy_(given)
        entry.program()
        return entry.outputs

    def program(self, key: Hashable) -> Program | None:
        """What was recorded under `key`, for measuring."""
        entry = self._entries.get((key, torch.get_num_threads()))
        return None if entry is None else entry.program

    def _record(self, function: Function, inputs: tuple[Tensor, ...]) -> _Entry:
        static = tuple(t.clone() for t in inputs)
        with self._library.record() as recorder, _Watch() as watch:
            outputs = function(*static)
        whole = not watch.others and not recorder.incomplete
        if whole:
            self._num_bytes += sum(t.nbytes for t in recorder.outputs)
        return _Entry(static, outputs, recorder.program() if whole else None)


class _Watch(TorchDispatchMode):
    """Notes every torch operator that computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name not in _HARMLESS:
            self.others.add(name)
        return func(*args, **(kwargs or {}))


def select(device: torch.device, library: Library | None) -> Graphs:
    """The service for `device`."""
    return Recorded(library) if device.type == "cpu" and library is not None else EAGER
