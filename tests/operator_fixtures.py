"""Fixtures of operators' tests: the compiled library, both tables of operators, the number of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from draftproof.kernels import ops
from draftproof.runtime import native
from draftproof.runtime import threads as settings


@pytest.fixture(scope="session")
def library() -> native.Library:
    found = native.load()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(params=["torch", "compiled"])
def table(request: pytest.FixtureRequest) -> ops.Ops:
    """Each table of operators in turn."""
    if request.param == "torch":
        return ops.TORCH
    return ops.select(torch.device("cpu"), request.getfixturevalue("library"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests that are not about threads use one: waiting for others is slow where other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """`with threads(3):` runs torch and the library on three threads."""
    return settings.threads
