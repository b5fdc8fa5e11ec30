"""Memory that was freed is used again or given back, and what stays lies in large pages."""

from __future__ import annotations

import mmap
import platform
import subprocess
import sys

import pytest
import torch

from draftproof.runtime import room

SCRIPT = """
import ctypes
import resource
import torch
from draftproof.runtime.room import M_MMAP_THRESHOLD, keep_freed_memory

ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # larger blocks are mapped one by one, as some layouts have it

def faults_of_a_pass():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(size << 20, dtype=torch.uint8) for size in (16, 8, 8)]
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if KEEP:
    assert keep_freed_memory()
for _ in range(100):  # the heap grows in the first passes, until its pieces fit: mostly within six
    faults_of_a_pass()
print(sum(faults_of_a_pass() for _ in range(5)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
@pytest.mark.parametrize("keep", [False, True])
def test_a_pass_finds_the_pages_of_the_one_before(keep: bool) -> None:
    """One of 32 MiB touches 8,192 pages of 4 KiB; without the setting each of the five faults them in anew."""
    script = SCRIPT.replace("KEEP", str(keep))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 100) == keep, done.stdout


GIVE_BACK = """
import torch
from draftproof.runtime.room import give_back_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

blocks = [torch.ones(100_000, dtype=torch.uint8) for _ in range(600)]  # 60 MB
del blocks[:-1]
before = resident()
assert give_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
def test_freed_memory_below_what_stays_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 40_000_000


UNTOUCHED = """
import torch
from draftproof.runtime.room import keep_freed_memory, untouched_zeros

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

assert keep_freed_memory()
del [torch.ones(1_000_000, dtype=torch.uint8) for _ in range(60)][:]  # 60 MB that the C library has left
before = resident()
made = [untouched_zeros((1000, 1000), torch.uint8) for _ in range(200)]
grown = resident() - before
assert not any(int(one.max()) for one in made[::50])
made[0].fill_(1)
assert int(made[0].sum()) == 1_000_000 and not int(made[1].max())
print(grown)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
def test_zeros_cost_nothing_before_they_are_written_to() -> None:
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10_000_000


def test_zeros_of_no_size_have_the_shape() -> None:
    assert room.untouched_zeros((0, 3), torch.bfloat16).shape == (0, 3)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages here")
def test_what_an_arena_keeps_lies_apart_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ARENA_BYTES", 1000)
    arena = room.Arena()
    given = [torch.full((size,), size, dtype=torch.int32) for size in (1, 33, 100, 150, 500, 7, 0)]
    kept = [arena.keep(tensor) for tensor in given]
    assert all(torch.equal(one, other) for one, other in zip(kept, given, strict=True))
    assert all(one.data_ptr() % room.CACHE_LINE == 0 for one in kept if one.numel())
    first, second = kept[0], kept[1]
    assert second.data_ptr() - first.data_ptr() == room.CACHE_LINE
    assert first.data_ptr() % room.LARGE_PAGE == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages here")
def test_a_tensor_outlives_its_arena() -> None:
    kept = room.Arena().keep(torch.arange(1000))
    again = [room.Arena().keep(torch.zeros(1000)) for _ in range(3)]
    assert torch.equal(kept, torch.arange(1000)) and len(again) == 3


def test_without_large_pages_a_tensor_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensor = torch.arange(10)
    assert room.Arena().keep(tensor) is tensor
