"""Recording a function of fixed buffers so that repeating it costs one call.

`Graphs.run(key, function, inputs)` returns `function(*inputs)`. The caller guarantees that equal keys mean the same
function and inputs of the same shapes. A key is a tuple. The result may be overwritten by the next run of any key with
the same first element, or of a function that runs some of the same parts through the service; other runs leave it
intact. So it is no input of such a run, and no function runs one whose key begins as its own.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof.runtime import collector
from draftproof.runtime.native import Library, Program, Recorder
from draftproof.runtime.scratch import Scratch

T = TypeVar("T")  # what a function returns: tensors, or an object that holds them
E = TypeVar("E", bound="_Kept")
Key = tuple[Hashable, ...]
MOST_GRAPHS = 256
# Recorded programs are small, since they share their memory, and where drafts differ in number from request to request
# passes have many sizes. Example: 16 requests of which some have ended, with up to 16 drafts each: 250 sizes came in 20
# texts, with two programs each. When only 256 programs were kept, every sixth of those steps had to be recorded again.
MOST_PROGRAMS = 1024
MOST_MET = 4096  # keys whose runs are counted
OFTEN = 3  # runs until an unprepared function is recorded, which takes longer than a few runs
# The same if its parts are recorded already. Not the first: to record what is around the parts takes 3 ms, to call it
# one, and where requests end many sizes do not come again.
SOON = 2
# Recordings' own memory: copies of inputs, on a GPU also what graphs add to their pool.
MOST_BYTES = 1 << 30
# Operators that may occur between recorded ones: allocations and views.
_ALLOCATING = {"empty", "new_empty", "empty_like", "empty_strided"}
_HARMLESS = {
    *_ALLOCATING,
    "view",
    "split",
    "split_with_sizes",
    "slice",
    "select",
    "alias",
    "detach",
}
_HARMLESS |= {"_unsafe_view", "unsqueeze", "squeeze", "t", "unbind", "as_strided", "expand"}


def often() -> int:
    return OFTEN


def at_once() -> int:
    return 1


class Graphs(Protocol):
    """The service that repeats functions. Functions may themselves call `run`.

    `calls_once`: functions may modify memory that they read. If False, only prepared functions may, since the first run
    of any other may call it twice.

    `latest`: the unique number of the recording that the last run has made or replayed, if every run of it returns the
    same object with its tensors overwritten; 0 if none. Recordings that use these tensors must have this number in
    their key: once this recording is evicted, the tensors are no longer valid.
    """

    calls_once: bool
    latest: int

    @property
    def num_warming(self) -> int:
        """Number of slow runs so far of functions that may still be recorded."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that recordings keep, except prepared ones on a GPU."""
        ...

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        """Record `function` now, which calls it. Returns False if nothing was recorded."""
        ...

    def run(
        self,
        key: Key,
        function: Callable[..., T],
        inputs: tuple[Tensor, ...],
        *,
        when: Callable[[], int] = often,
    ) -> T:
        """The result of `function(*inputs)`, replayed if recorded.

        when: asked if it is not recorded: the number of the run that is to be recorded, 1 to `OFTEN`, where
        `calls_once`.
        """
        ...

    def holds(self, key: Key) -> int:
        """The number of `key`'s recording, as in `latest`; 0 if not recorded."""
        ...

    @property
    def is_recording(self) -> bool:
        """Whether a function is being recorded, which must not read values on the host."""
        ...

    def unless(self, flag: Tensor) -> AbstractContextManager[None]:
        """A context: what a function does in it may be left out of a replay in which `flag`, int64 [1], is not 0 by
        then."""
        ...


class _Kept(Protocol):
    """An entry of the table. `num_bytes`: memory of its own; `used`: when it last was, by the table's count."""

    num_bytes: int
    used: int


class _Table(Generic[E]):
    """Recordings, and run counts of functions not recorded.

    Beyond `most` entries or `MOST_BYTES` the least recently used entry is evicted. Pinned entries are never
    evicted and not counted.
    """

    def __init__(self, most: int) -> None:
        self.num_bytes = 0
        self.num_warming = 0
        self.most = most
        self._entries: dict[Key, E] = {}
        self._num_gets = 0
        self._pinned: dict[Key, E] = {}
        self._num_met: OrderedDict[Key, int] = OrderedDict()

    def recorded_keys(self) -> list[Key]:
        return [*self._pinned, *sorted(self._entries, key=lambda key: self._entries[key].used)]

    def get(self, key: Key) -> E | None:
        """The entry of this key, if there is one. Hashes the key once: after a pass even that takes microseconds."""
        entry = self._entries.get(key)
        if entry is None:
            return self._pinned.get(key)
        self._use(entry)
        return entry

    def _use(self, entry: E) -> None:
        self._num_gets += 1
        entry.used = self._num_gets

    def pin(self, key: Key, entry: E) -> None:
        self._pinned[key] = entry

    def put(self, key: Key, entry: E) -> None:
        """Add an entry, which must itself be no larger than `MOST_BYTES`."""
        self._entries[key] = entry
        self._use(entry)
        self.num_bytes += entry.num_bytes
        while len(self._entries) > self.most or self.num_bytes > MOST_BYTES:
            self._let_go()

    def _let_go(self) -> None:
        """Evict the least recently used entry."""
        gone = self._entries.pop(min(self._entries, key=lambda key: self._entries[key].used))
        self.num_bytes -= gone.num_bytes

    def is_due(self, key: Key, often: int = OFTEN) -> bool:
        """Count a run of an unrecorded function. Returns whether to record it now; if that fails, it is not tried
        again.
        """
        number = self._num_met.pop(key, 0) + 1
        self._num_met[key] = OFTEN if number >= often else number
        self.num_warming += number <= OFTEN
        if len(self._num_met) > MOST_MET:
            self._num_met.popitem(last=False)
        return often <= number <= OFTEN

    def met_anew(self, key: Key) -> None:
        """Reset the count, so that a recorded function can be recorded again after eviction."""
        self._num_met.pop(key, None)


class Eager:
    """The service that records nothing and always calls the function."""

    calls_once = True
    is_recording = False
    latest = 0
    num_warming = 0
    num_bytes = 0

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        return False

    def run(
        self,
        key: Key,
        function: Callable[..., T],
        inputs: tuple[Tensor, ...],
        *,
        when: Callable[[], int] = often,
    ) -> T:
        return function(*inputs)

    def holds(self, key: Key) -> int:
        return 0

    def unless(self, flag: Tensor) -> AbstractContextManager[None]:
        return nullcontext()


EAGER = Eager()


@dataclass(slots=True)
class _Entry:
    inputs: tuple[Tensor, ...]
    outputs: Any
    program: Program
    num_bytes: int
    number: int
    used: int = 0


class Recorded:
    """The service for CPUs with compiled operators: their calls are recorded once and then replayed without Python.

    A function is recorded after repeated runs. If it turns out to compute with anything but those operators, it is
    always called from then on. Functions that it runs through this service become part of its program and are also kept
    as programs of their own, which other functions' programs include unchanged.
    """

    calls_once = True

    def __init__(self, library: Library) -> None:
        self.latest = 0
        self._library = library
        self._table: _Table[_Entry] = _Table(MOST_PROGRAMS)
        self._numbers = itertools.count(1)
        # By the first element of a key: recordings that share one may overwrite each other's results.
        self._scratches: dict[Hashable, Scratch] = defaultdict(Scratch)

    @property
    def num_warming(self) -> int:
        return self._table.num_warming

    def prepare(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> bool:
        key = (*key, torch.get_num_threads())
        if self._table.get(key) is None:
            self._record(key, function, inputs)
        return self._table.get(key) is not None

    def run(
        self,
        key: Key,
        function: Callable[..., T],
        inputs: tuple[Tensor, ...],
        *,
        when: Callable[[], int] = often,
    ) -> T:
        key = (*key, torch.get_num_threads())
        entry, recorder = self._table.get(key), self._library.recorder
        if recorder is not None:
            return self._run_part(recorder, key, function, inputs)
        if entry is None:
            is_due = self._table.is_due(key, when())
            found = self._record(key, function, inputs) if is_due else function(*inputs)
            entry = self._table.get(key)
            self.latest = 0 if entry is None else entry.number
            return found
        for static, given in zip(entry.inputs, inputs, strict=True):
            static.copy_(given)
        entry.program()
        self.latest = entry.number
        return cast(T, entry.outputs)

    def recorded_keys(self) -> list[Key]:
        """The keys of all programs, least recently used first."""
        return [key[:-1] for key in self._table.recorded_keys()]

    @property
    def num_bytes(self) -> int:
        """Memory of all recordings: what their calls write to, which grows with the largest, and copies of inputs."""
        return self._table.num_bytes + sum(scratch.num_bytes for scratch in self._scratches.values())

    def holds(self, key: Key) -> int:
        entry = None if self._library.recorder else self._table.get((*key, torch.get_num_threads()))
        return 0 if entry is None else entry.number

    @property
    def is_recording(self) -> bool:
        return self._library.recorder is not None

    def unless(self, flag: Tensor) -> AbstractContextManager[None]:
        return self._library.unless(flag)

    def program(self, key: Key) -> Program | None:
        """The program recorded under `key`, for measurements."""
        entry = self._table.get((*key, torch.get_num_threads()))
        return None if entry is None else entry.program

    def _record(self, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        """Run the function, and keep its program if it could be recorded."""
        static = tuple(t.clone() for t in inputs)
        with self._library.record() as recorder, _Watch(recorder), recorder.using(self._scratches[key[0]]):
            return self._recorded(recorder, key, function, static, sum(t.nbytes for t in static))

    def _run_part(
        self, recorder: Recorder, key: Key, function: Callable[..., T], inputs: tuple[Tensor, ...]
    ) -> T:
        """Run a function called by one that is being recorded; a recorded program is included as it is."""
        if not all(given.is_contiguous() for given in inputs):
            return function(*inputs)
        entry, scratch = self._table.get(key), self._scratches[key[0]]
        assert not any(map(scratch.has, inputs)), "what a run of this kind returned is given to another one"
        with recorder.using(scratch):
            statics = tuple(torch.empty_like(given) for given in inputs) if entry is None else entry.inputs
            for static, given in zip(statics, inputs, strict=True):
                self._library.copy(static, given)
            if entry is None:
                return self._recorded(recorder, key, function, statics, 0)
        recorder.take_over(entry.program)
        return cast(T, entry.outputs)

    def _recorded(
        self,
        recorder: Recorder,
        key: Key,
        function: Callable[..., T],
        static: tuple[Tensor, ...],
        num_bytes: int,
    ) -> T:
        """The function's result. Its recorded calls are kept as a program if it did nothing else. `num_bytes`: of
        `static`, unless it is in the scratch memory."""
        num_others, start = recorder.num_others, recorder.mark()
        outputs = function(*static)
        if recorder.num_others > num_others:
            return outputs
        program = recorder.program(static, start)
        if num_bytes <= MOST_BYTES:
            self._table.put(key, _Entry(static, outputs, program, num_bytes, next(self._numbers)))
            self._table.met_anew(key)
        return outputs


def capture(call: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """(the CUDA graph of a call, its result). The call runs once uncaptured before. `pool`: a memory pool to share."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with collector.held_back(), torch.cuda.graph(graph, pool=pool):
        given = call()
    return graph, given


@dataclass(slots=True)
class _Capture:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Any
    num_bytes: int
    number: int
    used: int = 0


class Captured:
    """The service for GPUs: CUDA graphs for prepared functions and for those that repeat.

    A function runs once uncaptured, which compiles its kernels, and is then captured. Functions that it runs through
    this service become part of its graph. Prepared graphs are pinned: their first run could not be repeated.
    """

    calls_once = False

    def __init__(self) -> None:
        self.latest = 0
        self._table: _Table[_Capture] = _Table(MOST_GRAPHS)
        self._numbers = itertools.count(1)
        self._is_capturing = False
        # Memory pools by the first element of a key: graphs that share one may overwrite each other's results.
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
        self,
        key: Key,
        function: Callable[..., T],
        inputs: tuple[Tensor, ...],
        *,
        when: Callable[[], int] = often,
    ) -> T:
        if self._is_capturing:
            return function(*inputs)
        entry = self._table.get(key)
        if entry is None:
            if not self._table.is_due(key):
                found = function(*inputs)
                self.latest = 0  # the function may have run others
                return found
            entry = self._capture(key[0], function, inputs)
            if entry.num_bytes <= MOST_BYTES:
                torch.cuda.synchronize()  # an evicted graph may still be running
                self._table.put(key, entry)
                self._table.met_anew(key)
        for static, given in zip(entry.inputs, inputs, strict=True):
            static.copy_(given)
        entry.graph.replay()
        self.latest = entry.number
        return cast(T, entry.outputs)

    def holds(self, key: Key) -> int:
        entry = self._table.get(key)
        return 0 if entry is None else entry.number

    @property
    def is_recording(self) -> bool:
        return self._is_capturing

    def unless(self, flag: Tensor) -> AbstractContextManager[None]:
        return nullcontext()  # a graph's kernels all run

    def recorded_keys(self) -> list[Key]:
        """The keys of all graphs: the prepared ones, then the others, least recently used first."""
        return self._table.recorded_keys()

    def _capture(self, kind: Hashable, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> _Capture:
        static, before = tuple(t.clone() for t in inputs), torch.cuda.memory_allocated()
        self._is_capturing = True
        try:
            graph, outputs = capture(lambda: function(*static), self._pools.get(kind))
        finally:
            self._is_capturing = False
        self._pools.setdefault(kind, graph.pool())
        num_bytes = sum(t.nbytes for t in static) + max(0, torch.cuda.memory_allocated() - before)
        return _Capture(graph, static, outputs, num_bytes, next(self._numbers))


class _Watch(TorchDispatchMode):
    """Counts torch operators that compute, in a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's guard against compilation imports its compiler, which would delay the first prompt by two
        seconds.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        self._recorder.num_others += name not in _HARMLESS
        found = func(*args, **(kwargs or {}))
        return self._recorder.allocated(found) if name in _ALLOCATING else found


def select(device: torch.device, library: Library | None, *, eager: bool) -> Graphs:
    """The service for `device`."""
    if eager:
        return EAGER
    if device.type == "cuda":
        return Captured()
    return EAGER if library is None else Recorded(library)
