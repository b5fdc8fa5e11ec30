"""The pool of threads: the same bits at any number of threads, for callers that come together, and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from draftproof.matmul import products
from draftproof.matmul.spec import LinearFn
from draftproof.runtime import native
from draftproof.runtime.threads import threads

NUM_INPUTS, NUM_OUTPUTS = 96, 4000


@pytest.fixture
def product(library: native.Library) -> LinearFn:
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator)
    return products.CompiledLinear(library, weight_NK, None, torch.float32)


def rows(num_rows: int = 3) -> Tensor:
    return torch.randn(num_rows, NUM_INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_threads", [2, 3, 7, 64])
def test_the_number_of_threads_changes_no_bit(product: LinearFn, num_threads: int) -> None:
    with threads(1):
        expected = product(rows())
    with threads(num_threads):
        for _ in range(50):
            assert torch.equal(product(rows()), expected)


def test_callers_that_come_together_are_all_served(product: LinearFn) -> None:
    with threads(1):
        expected = product(rows())
    wrong: list[int] = []

    def call(number: int) -> None:
        with threads(3):
            wrong.extend(number for _ in range(200) if not torch.equal(product(rows()), expected))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert not any(caller.is_alive() for caller in callers) and not wrong


AFTER_FORK = """
import os, signal, sys
import torch
from draftproof.matmul import products
from draftproof.runtime import native
product = products.CompiledLinear(native.load(), torch.ones(4000, 96), None, torch.float32)
torch.set_num_threads(3)
assert (product(torch.ones(3, 96)) == 96).all()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if all((product(torch.ones(3, 96)) == 96).all() for _ in range(20)) else 1)
assert (product(torch.ones(3, 96)) == 96).all()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("library")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_has_threads_of_its_own() -> None:
    """In a process of its own, whose child would otherwise have pytest's threads missing."""
    done = subprocess.run([sys.executable, "-c", AFTER_FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


FEWER_THREADS = """
import os, sys, time
import torch
from draftproof.matmul import products
from draftproof.runtime import native
product = products.CompiledLinear(native.load(), torch.ones(4000, 96), None, torch.float32)
rows = torch.ones(3, 96)

def ticks():
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        found[thread] = int(fields[11]) + int(fields[12])
    return found

def run(num_threads, seconds):
    torch.set_num_threads(num_threads)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        product(rows)

def wakes():  # how often each thread went to sleep by itself
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/status") as file:
            found[thread] = int(file.read().partition("\\nvoluntary_ctxt_switches:")[2].split()[0])
    return found

run(6, 0.2)
before = ticks()
run(2, 1.0)
busy = [thread for thread, count in ticks().items() if count - before.get(thread, 0) > 5]
if len(busy) > 2:
    sys.exit(f"{len(busy)} threads took time")
before = wakes()
for _ in range(100):
    product(rows)
    end = time.monotonic() + 0.001
    while time.monotonic() < end:  # workers fall asleep
        pass
awake = [thread for thread, count in wakes().items() if count - before.get(thread, 0) > 50]
if len(awake) > 2:
    sys.exit(f"{len(awake)} threads were woken")
"""


@pytest.mark.usefixtures("library")
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
def test_workers_that_fewer_threads_leave_out_take_no_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEWER_THREADS], timeout=120, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_workers_round_as_their_caller_does(product: LinearFn) -> None:
    """Subnormal sums: a worker that kept another thread's setting would flush them, or not."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with threads(3):
            small = product(rows() * 1e-39)
            assert all(torch.equal(product(rows() * 1e-39), small) for _ in range(20))
            torch.set_flush_denormal(False)
            kept = product(rows() * 1e-39)
            assert all(torch.equal(product(rows() * 1e-39), kept) for _ in range(20))
        assert not small.any() and kept.any()
    finally:
        torch.set_flush_denormal(False)
