"""Running a function of fixed buffers again and again for the price of one call.

`Graphs.run(key, function, inputs)` returns `function(*inputs)`. Whoever calls promises that for equal keys the function
is the same and the inputs have the same shapes. A key is a tuple; what comes back may be overwritten by the next run of
any key that begins alike, or that runs what this one ran through the service too, and stays as it is while others run.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.runtime.native import Library, Program, Recorder

T = TypeVar("T")  # what a function gives: tensors, or an object that holds them
E = TypeVar("E", bound="_Kept")
Key = tuple[Hashable, ...]
MOST_PROGRAMS = 256
MOST_MET = 4096  # keys whose runs are counted
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

    @property
    def num_warming(self) -> int:
        """Runs so far that took longer than such runs will, since what they run may yet be recorded."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that recordings keep, but for what was prepared on a GPU."""
        ...

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        """Record `function` now, which calls it. False if nothing was recorded."""
        ...

    def run(
        self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...], *, at_once: bool = False
    ) -> T:
        """at_once: recording it takes hardly longer than running it, since its parts are recorded: where functions
        are called once, the first run is recorded."""
        ...

    def holds(self, key: Key) -> int:
        """The number of `key`'s recording, never another's, while every run of it gives the same object, its tensors
        overwritten; 0 where it is not recorded. What is recorded over these tensors goes under a key with this number:
        once the recording has given way to others, they are nobody's."""
        ...


class _Kept(Protocol):
    """An entry of the table. `sizes`: bytes of the memory that it keeps, by address; entries may share some."""

    sizes: Mapping[int, int]


class _Table(Generic[E]):
    """What was recorded, least recently used first, and how often other functions have come. Beyond `MOST_PROGRAMS`
    entries or `MOST_BYTES` the least recently used one goes. Entries that are pinned stay, and do not count."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_warming = 0
        self._num_keepers = Counter[int]()  # entries that keep a piece of memory
        self._entries: OrderedDict[Key, E] = OrderedDict()
        self._pinned: dict[Key, E] = {}
        self._num_met: OrderedDict[Key, int] = OrderedDict()

    def recorded_keys(self) -> list[Key]:
        return [*self._pinned, *self._entries]

    def get(self, key: Key) -> E | None:
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        return self._pinned.get(key)

    def pin(self, key: Key, entry: E) -> None:
        self._pinned[key] = entry

    def put(self, key: Key, entry: E) -> None:
        """Keep an entry that is no larger than all may be together."""
        self._entries[key] = entry
        for address, size in entry.sizes.items():
            self.num_bytes += size if not self._num_keepers[address] else 0
            self._num_keepers[address] += 1
        while len(self._entries) > MOST_PROGRAMS or self.num_bytes > MOST_BYTES:
            self._let_go()

    def _let_go(self) -> None:
        """The least recently used entry goes; memory that no other keeps is free."""
        _, gone = self._entries.popitem(last=False)
        self._num_keepers.subtract(gone.sizes.keys())
        for address, size in gone.sizes.items():
            if not self._num_keepers[address]:
                del self._num_keepers[address]
                self.num_bytes -= size

    def is_due(self, key: Key, often: int = OFTEN) -> bool:
        """Count a run of what is not recorded; whether it has now come often enough to be. What could not be recorded
        then is not tried again."""
        number = self._num_met.pop(key, 0) + 1
        self._num_met[key] = OFTEN if number >= often else number
        self.num_warming += number <= often > 1
        if len(self._num_met) > MOST_MET:
            self._num_met.popitem(last=False)
        return often <= number <= OFTEN

    def met_anew(self, key: Key) -> None:
        """Count from the start: what has been recorded may be again, should it go."""
        self._num_met.pop(key, None)


class Eager:
    """The service that records nothing and calls the function."""

    calls_once = True
    num_warming = 0
    num_bytes = 0

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        return False

    def run(
        self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...], *, at_once: bool = False
    ) -> T:
        return function(*inputs)

    def holds(self, key: Key) -> int:
        return 0


EAGER = Eager()


@dataclass(slots=True)
class _Entry:
    inputs: tuple[Tensor, ...]
    outputs: Any
    program: Program
    sizes: Mapping[int, int]
    number: int


class Recorded:
    """The service of a CPU with the compiled operators: their calls are recorded once, and later run without Python.

    A function is recorded when it has come often. One that computes anything by other means than those operators is
    found out then, and runs as it is from then on. What a function runs through this service becomes part of its
    program, and is kept for itself, too: other functions' programs take it over as it is.
    """

    calls_once = True

    def __init__(self, library: Library) -> None:
        self._library = library
        self._table: _Table[_Entry] = _Table()
        self._numbers = itertools.count(1)

    @property
    def num_warming(self) -> int:
        return self._table.num_warming

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        key = (*key, torch.get_num_threads())
        if self._table.get(key) is None:
            self._record(key, function, inputs)
        return self._table.get(key) is not None

    def run(
        self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...], *, at_once: bool = False
    ) -> T:
        key = (*key, torch.get_num_threads())
        entry, recorder = self._table.get(key), self._library.recorder
        if recorder is not None:
            return self._run_part(recorder, key, function, inputs)
        if entry is None:
            is_due = self._table.is_due(key, 1 if at_once else OFTEN)
            return self._record(key, function, inputs) if is_due else function(*inputs)
        for static, given in zip(entry.inputs, inputs, strict=True):
            static.copy_(given)
        entry.program()
        return cast(T, entry.outputs)

    def recorded_keys(self) -> list[Key]:
        """The keys of all programs, least recently used first."""
        return [key[:-1] for key in self._table.recorded_keys()]

    @property
    def num_bytes(self) -> int:
        """Memory that programs keep: the tensors that their calls write, and copies of what they are given."""
        return self._table.num_bytes

    def holds(self, key: Key) -> int:
        entry = None if self._library.recorder else self._table.get((*key, torch.get_num_threads()))
        return 0 if entry is None else entry.number

    def program(self, key: Key) -> Program | None:
        """What was recorded under `key`, for measuring."""
        entry = self._table.get((*key, torch.get_num_threads()))
        return None if entry is None else entry.program

    def _record(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        """Run the function, and keep its program if it is one."""
        static = tuple(t.clone() for t in inputs)
        with self._library.record() as recorder, _Watch(recorder):
            return self._recorded(recorder, key, function, static)

    def _run_part(
        self, recorder: Recorder, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]
    ) -> T:
        """Run what a function that is being recorded runs: what is recorded already is taken over."""
        if not all(given.is_contiguous() for given in inputs):
            return function(*inputs)
        entry = self._table.get(key)
        statics = tuple(torch.empty_like(given) for given in inputs) if entry is None else entry.inputs
        for static, given in zip(statics, inputs, strict=True):
            self._library.copy(static, given)
        if entry is None:
            return self._recorded(recorder, key, function, statics)
        recorder.take_over(entry.program)
        return cast(T, entry.outputs)

    def _recorded(
        self, recorder: Recorder, key: Key, function: Callable[..., T], static: tuple[Tensor, ...]
    ) -> T:
        """What the function gives; what is recorded of it meanwhile is kept, if that is all it does."""
        num_others, start = recorder.num_others, recorder.mark()
        outputs = function(*static)
        if recorder.num_others > num_others:
            return outputs
        program = recorder.program(start)
        sizes = _sizes([*static, *program.outputs])
        if sum(sizes.values()) <= MOST_BYTES:
            self._table.put(key, _Entry(static, outputs, program, sizes, next(self._numbers)))
            self._table.met_anew(key)
        return outputs


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes behind the tensors by address, so that what several share counts once."""
    storages = (t.untyped_storage() for t in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages}


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
    sizes: Mapping[int, int]
    number: int


class Captured:
    """The service of a GPU: CUDA graphs, for functions that were prepared and for those that come back often. A
    function runs once as it is before it is captured, which compiles its kernels; what it runs through this service
    becomes part of its graph. What was prepared is pinned: its first run could not be repeated."""

    calls_once = False

    def __init__(self) -> None:
        self._table: _Table[_Capture] = _Table()
        self._numbers = itertools.count(1)
        self._is_capturing = False
        # Memory pools by the first part of a key: graphs that share one may overwrite each other's results.
        self._pools: dict[Hashable, Any] = {}

    @property
    def num_warming(self) -> int:
        return self._table.num_warming

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        self._table.pin(key, self._capture(key[0], function, inputs))
        return True

    def run(
        self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...], *, at_once: bool = False
    ) -> T:
        if self._is_capturing:
            return function(*inputs)
        entry = self._table.get(key)
        if entry is None:
            if not self._table.is_due(key):
                return function(*inputs)
            entry = self._capture(key[0], function, inputs)
            if sum(entry.sizes.values()) <= MOST_BYTES:
                torch.cuda.synchronize()  # a graph that gives way may still be running
                self._table.put(key, entry)
                self._table.met_anew(key)
        for static, given in zip(entry.inputs, inputs, strict=True):
            static.copy_(given)
        entry.graph.replay()
        return cast(T, entry.outputs)

    def holds(self, key: Key) -> int:
        entry = self._table.get(key)
        return 0 if entry is None else entry.number

    def recorded_keys(self) -> list[Key]:
        """The keys of all graphs: those that were prepared, then the others, least recently used first."""
        return self._table.recorded_keys()

    def _capture(self, kind: Hashable, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Capture:
        static, before = tuple(t.clone() for t in inputs), torch.cuda.memory_allocated()
        self._is_capturing = True
        try:
            graph, outputs = capture(lambda: function(*static), self._pools.get(kind))
        finally:
            self._is_capturing = False
        self._pools.setdefault(kind, graph.pool())
        sizes, number = _sizes(static), next(self._numbers)
        sizes[-number] = max(0, torch.cuda.memory_allocated() - before)  # addresses are not negative
        return _Capture(graph, static, outputs, sizes, number)


class _Watch(TorchDispatchMode):
    """Tells a recorder of torch operators that compute."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's guard against being compiled imports its compiler, two seconds of the first prompt."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        self._recorder.num_others += name not in _HARMLESS
        return func(*args, **(kwargs or {}))


def select(device: torch.device, library: Library | None, *, eager: bool) -> Graphs:
    """The service for `device`."""
    if eager:
        return EAGER
    if device.type == "cuda":
        return Captured()
    return EAGER if library is None else Recorded(library)
