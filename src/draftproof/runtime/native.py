"""The compiled operators: one plain C library, loaded with ctypes.

A wheel contains it for several processor variants, and the fastest that this processor can run is loaded. From a source
tree it is compiled for this machine on first use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.runtime import compiling
from draftproof.runtime.scratch import Scratch

Progress = compiling.Progress
default_cache_dir = compiling.default_cache_dir
PREBUILT = Path(__file__).parent / "prebuilt"  # VARIANT.so files, in wheels only
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # common.h's Dtype
_CTYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class Library:
    """The loaded library. Functions release the GIL and take the number of threads as an argument.

    `build_key`: hash of sources, compiler and processor; for a wheel's library its variant and the hash of the file.
    """

    def __init__(self, path: Path, build_key: str, origin: str = "compiled here") -> None:
        self.path = path
        self.build_key = build_key
        self.description = f"{build_key}, {origin}"
        self._dll = ctypes.CDLL(str(path))
        self.recorder: Recorder | None = None  # while calls are being recorded

    @property
    def bf16_arithmetic(self) -> str:
        """The arithmetic that determines the bits of bf16 results: "widened" to fp32, "dot product" of pairs, or "AMX"
        tiles.

        fp32 has one arithmetic on every processor with fused multiply-adds.
        """
        name = self._dll.dp_bf16_arithmetic
        name.restype = ctypes.c_char_p
        return bytes(name()).decode()

    def function(self, name: str, arguments: str, returns: str = "") -> Callable[..., int]:
        """The C function `name`. `arguments` has one letter per argument: p address (int or None), i int64, f float.

        Calls of it cannot be recorded.
        """
        function = getattr(self._dll, name)
        function.argtypes = [_CTYPES[letter] for letter in arguments]
        function.restype = _CTYPES[returns] if returns else None

        def run(*values: Any) -> int:
            if self.recorder is not None:
                self.recorder.num_others += 1
            return function(*values)

        return run

    def packed(self, name: str, fields: str) -> tuple[Callable[[bytes], None], Callable[..., bytes]]:
        """(run, pack) of the C function `name`, whose one argument is a struct: run(pack(*values)).

        `fields` has one letter per field: P address (int, 0 = null), q int64, d double. Four times faster than many
        arguments, which matters where a pass makes forty calls.
        """
        function = getattr(self._dll, name)
        function.argtypes = [ctypes.c_char_p]
        function.restype = None
        address = ctypes.cast(function, ctypes.c_void_p).value

        def run(args: bytes) -> None:
            function(args)
            if self.recorder is not None:
                self.recorder.calls.append((name, address or 0, args))

        return run, struct.Struct(fields).pack

    def copy(self, to: Tensor, given: Tensor) -> None:
        """A recordable `to.copy_(given)`, for contiguous tensors of equal shape and dtype."""
        size = given.nbytes
        run, pack = self._place
        run(pack(given.data_ptr(), to.data_ptr(), 1, size, size))

    @functools.cached_property
    def _place(self) -> tuple[Callable[[bytes], None], Callable[..., bytes]]:
        return self.packed("dp_place", "2P3q")

    @contextlib.contextmanager
    def unless(self, flag: Tensor) -> Iterator[None]:
        """What is recorded in this context is left out of a replay in which `flag`, int64 [1], is not 0 by then. While
        recording it runs in any case."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        at = len(recorder.calls)
        recorder.calls.append(("skip", 0, b""))
        yield
        skip = struct.pack("Pq", flag.data_ptr(), len(recorder.calls) - at - 1)
        recorder.calls[at] = "skip", 0, skip
        recorder.keep(flag)

    @contextlib.contextmanager
    def record(self) -> Iterator[Recorder]:
        """Record the packed calls made in this context. Recordings do not nest."""
        assert self.recorder is None
        self.recorder = recorder = Recorder(self._dll)
        try:
            yield recorder
        finally:
            self.recorder = None


class Recorder:
    """A recording of packed calls. `num_others`: calls of other kinds meanwhile, which a program cannot repeat."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self.calls: list[tuple[str, int, bytes]] = []
        self.num_others = 0
        self._dll = dll
        self._scratches: list[Scratch] = []  # one for each function that is running; the innermost last
        self._kept: list[object] = []  # besides: whatever has memory that calls read or write

    @contextlib.contextmanager
    def using(self, scratch: Scratch) -> Iterator[None]:
        """Record a function, the calls of which write to `scratch`."""
        assert scratch not in self._scratches, (
            "a function would write over what the one that runs it still reads"
        )
        scratch.begin()
        self._scratches.append(scratch)
        try:
            yield
        finally:
            self._scratches.pop()

    def allocated(self, given: Tensor) -> Tensor:
        """The tensor to use in place of a new one: in memory that the program may write to."""
        if given.is_contiguous() and given.device.type == "cpu":
            return self._scratches[-1].like(given)
        self.keep(given)
        return given

    def keep(self, given: object) -> None:
        """Keep alive what calls read or write."""
        self._kept.append(given)

    def mark(self) -> int:
        """The current place in the recording, for `program`."""
        return len(self.calls)

    def program(self, inputs: Sequence[Tensor], start: int = 0) -> Program:
        """The program of the calls recorded since `start`, which read `inputs`."""
        return Program(self._dll, self.calls[start:], (*self._scratches, *self._kept, *inputs))

    def take_over(self, program: Program) -> None:
        """Run a program and append its calls to the recording."""
        program()
        self.calls += program.calls
        self.keep(program)


class Program:
    """A recorded list of calls on fixed buffers; calling it runs them all."""

    def __init__(self, dll: ctypes.CDLL, calls: list[tuple[str, int, bytes]], kept: Sequence[object]) -> None:
        self.calls = calls
        self._kept = kept  # alive, since calls read and write its memory
        self._dll = dll
        self._replay = dll.dp_replay
        self._replay.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._replay.restype = None
        # c_char_p keeps a pointer into the bytes object itself, which `calls` keeps alive
        at = [ctypes.cast(ctypes.c_char_p(args), ctypes.c_void_p).value for _, _, args in calls]
        pairs = [x for (_, address, _), where in zip(calls, at, strict=True) for x in (address, where)]
        self._table = (ctypes.c_void_p * len(pairs))(*pairs)

    def __call__(self) -> None:
        self._replay(self._table, len(self.calls))

    def part(self, names: Sequence[str]) -> Program:
        """A program of only the calls of the named C functions, none of them left out, for measurements. They read what
        later calls have left in their memory, so none may read indices from there."""
        return Program(self._dll, [call for call in self.calls if call[0] in names], self._kept)


def load(
    progress: Progress | None = None, cache_dir: Path | None = None, *, widened: bool = False
) -> Library | None:
    """The library, compiled if necessary; None (with one warning) if it cannot be built, or if DRAFTPROOF_NATIVE=0.

    `widened`: the library that computes bf16 as fp32, whatever instructions the processor has.
    """
    if os.environ.get("DRAFTPROOF_NATIVE") == "0":
        return None
    found = load_prebuilt(widened=widened)
    if found is not None:
        return found
    compiler = compiling.find_compiler()
    if compiler is None:
        warnings.warn(
            f"no C++ compiler found ({', '.join(compiling.COMPILERS)}): running on torch operators, which are slower; "
            "install g++ for the compiled ones",
            stacklevel=2,
        )
        return None
    try:
        extra = (compiling.WIDENED,) if widened else ()
        key = compiling.build_key(compiler, extra)
        path = _folder(cache_dir or default_cache_dir()) / compiling.file_name(key)
        if path.exists():
            with contextlib.suppress(OSError):  # damaged: rebuild it
                return Library(path, key)
        compiling.build(compiler, path, progress, extra)
        return Library(path, key)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"the compiled operators could not be built, running on torch operators: {detail.strip()[-500:]}",
            stacklevel=2,
        )
        return None


def load_prebuilt(*, widened: bool = False) -> Library | None:
    """The fastest library of a wheel that this processor can run and this system can load."""
    for variant in reversed(compiling.runnable()):
        path = PREBUILT / f"{variant.name}.so"
        if path.exists() and (variant.widened or not widened):
            with contextlib.suppress(OSError):  # made for a newer C library
                return Library(path, f"{variant.name}-{_hash(path)}", "from the wheel")
    return None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _folder(path: Path) -> Path:
    """`path`, created; a temporary folder if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="draftproof-"))
