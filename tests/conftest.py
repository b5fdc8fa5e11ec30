"""Tests run the embedded model by default, whatever is installed beside it, and draw the same numbers each time.

One thread a process when several test processes share the machine: idle OpenMP threads spin, and starve others.
"""

from __future__ import annotations

import os

import pytest
import torch

from draftproof import assets

os.environ[assets.VARIABLE] = assets.TARGET  # for processes that tests start, too
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that draws without a generator sees the same numbers in every run, in whatever order tests run."""
    torch.manual_seed(0)
