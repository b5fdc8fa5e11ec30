"""One thread a process when several test processes share the machine: idle OpenMP threads spin, and starve others."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
