"""Memory that was freed is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
for _ in range(10):
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
