"""Tests of this folder need a CUDA device and triton; elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof.runtime import gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = not torch.cuda.is_available() or not gpu.available(torch.device("cuda"))
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and triton"))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return torch.device("cuda", 0)
