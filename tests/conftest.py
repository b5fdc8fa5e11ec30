"""Tests run the embedded model by default, whatever is installed beside it.

One thread a process when several test processes share the machine: idle OpenMP threads spin, and starve others.
"""

from __future__ import annotations

import os

import torch

from draftproof import assets

os.environ[assets.VARIABLE] = assets.TARGET  # for processes that tests start, too
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
