"""Running a function of fixed buffers again and again for the price of one call.

`Graphs.run(key, function, inputs)` returns `function(*inputs)`. Whoever calls promises that for equal keys the function
is the same and the inputs have the same shapes. A key is a tuple; what comes back may be overwritten by the next run of
any key that begins alike, and stays as it is while others run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.kernels.native import Library, Program

T = TypeVar("T")  # what a function gives: tensors, or an object that holds them
Key = tuple[Hashable, ...]
MOST_PROGRAMS = 256
OFTEN = 3  # runs after which what nobody prepared is recorded: that takes longer than a few runs
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
    """The service that runs a function again. Functions may themselves call `run`.

    `calls_once`: a function may change memory that it reads. Else only one that was prepared may, since any other first
    run may call the function twice.
    """

    calls_once: bool

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        """Record `function` now, which calls it. False if nothing was recorded."""
        ...

    def run(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T: ...

    def holds(self, key: Key) -> bool:
        """Whether every run of `key` gives the same object, its tensors overwritten."""
        ...


class Eager:
    """The service that records nothing and calls the function."""

    calls_once = True

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        return False

    def run(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        return function(*inputs)

    def holds(self, key: Key) -> bool:
        return False


EAGER = Eager()


@dataclass(slots=True)
class _Entry:
    inputs: tuple[Tensor, ...]
    outputs: Any
    program: Program | None  # None: the function does something that cannot be recorded


class Recorded:
    """The service of a CPU with the compiled operators: their calls are recorded once, and later run without Python.

    A function is recorded when it has come often. One that computes anything by other means than those operators is
    found out then, and runs as it is from then on. What a function runs through this service becomes part of its
    program.
    """

    calls_once = True

    def __init__(self, library: Library) -> None:
        self._library = library
        self._entries: dict[Key, _Entry] = {}
        self._num_met: Counter[Key] = Counter()
        self._num_bytes = 0

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        return False

    def run(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        if self._library.is_recording:
            return function(*inputs)
        key = (*key, torch.get_num_threads())
        entry = self._entries.get(key)
        if entry is None:
            self._num_met[key] += 1
            full = len(self._entries) >= MOST_PROGRAMS or self._num_bytes >= MOST_BYTES
            if full or self._num_met[key] < OFTEN:
                return function(*inputs)
            entry = self._entries[key] = self._record(function, inputs)
            return cast(T, entry.outputs)
        if entry.program is None:
            return function(*inputs)
        for static, given in zip(entry.inputs, inputs, strict=True):
            static.copy_(given)
        entry.program()
        return cast(T, entry.outputs)

    def holds(self, key: Key) -> bool:
        return not self._library.is_recording and self.program(key) is not None

    def program(self, key: Key) -> Program | None:
        """What was recorded under `key`, for measuring."""
        entry = self._entries.get((*key, torch.get_num_threads()))
        return None if entry is None else entry.program

    def _record(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Entry:
        static = tuple(t.clone() for t in inputs)
        with self._library.record() as recorder, _Watch() as watch:
            outputs = function(*static)
        whole = not watch.others and not recorder.incomplete
        if whole:
            self._num_bytes += sum(t.nbytes for t in recorder.outputs)
        return _Entry(static, outputs, recorder.program() if whole else None)


def capture(call: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """(the graph of a call, which ran once as it is before, what it gave). `pool`: the memory pool it may share."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        given = call()
    return graph, given


@dataclass(slots=True)
class _Capture:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Any


class Captured:
    """The service of a GPU: CUDA graphs, for functions that were prepared and for those that come back often. A
    function runs once as it is before it is captured, which compiles its kernels; what it runs through this service
    becomes part of its graph."""

    calls_once = False

    def __init__(self) -> None:
        self._entries: dict[Key, _Capture] = {}
        self._num_met: Counter[Key] = Counter()
        self._is_capturing = False
        # Memory pools by the first part of a key: graphs that share one may overwrite each other's results.
        self._pools: dict[Hashable, Any] = {}

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        self._entries[key] = self._capture(key[0], function, inputs)
        return True

    def run(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        if self._is_capturing:
            return function(*inputs)
        entry = self._entries.get(key)
        if entry is None:
            self._num_met[key] += 1
            if self._num_met[key] < OFTEN or len(self._entries) >= MOST_PROGRAMS:
                return function(*inputs)
            entry = self._entries[key] = self._capture(key[0], function, inputs)
        for static, given in zip(entry.inputs, inputs, strict=True):
            static.copy_(given)
        entry.graph.replay()
        return cast(T, entry.outputs)

    def holds(self, key: Key) -> bool:
        return key in self._entries

    def _capture(self, kind: Hashable, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Capture:
        static = tuple(t.clone() for t in inputs)
        self._is_capturing = True
        try:
            graph, outputs = capture(lambda: function(*static), self._pools.get(kind))
        finally:
            self._is_capturing = False
        self._pools.setdefault(kind, graph.pool())
        return _Capture(graph, static, outputs)


class _Watch(TorchDispatchMode):
    """Collects the names of torch operators that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's guard against being compiled imports its compiler, two seconds of the first prompt."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name not in _HARMLESS:
            self.others.add(name)
        return func(*args, **(kwargs or {}))


def select(device: torch.device, library: Library | None, *, eager: bool) -> Graphs:
    """The service for `device`."""
    if eager:
        return EAGER
    if device.type == "cuda":
        return Captured()
    return EAGER if library is None else Recorded(library)
