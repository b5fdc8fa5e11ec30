"""Certificates on a GPU: every Triton operator and attention passes, wrong twins fail, and the table reports it."""

from __future__ import annotations

import pytest
import torch

from draftproof.attention.base import FunctionBackend
from draftproof.attention.exactness import AttentionShape, scores_check, split_by_the_batch, values_check
from draftproof.attention.registry import BACKENDS
from draftproof.config import EngineConfig
from draftproof.engine.certificates import survey
from draftproof.kernels import ops
from tests.helpers import is_exact
from tests.kernels.test_exactness import ATTENTION, MADE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = {
    "8b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128),
    "sliding": AttentionShape(num_heads=8, num_kv_heads=4, head_dim=256, window=100),
    "latent": AttentionShape(num_heads=16, num_kv_heads=1, head_dim=576, shared=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(MADE))
def test_triton_operators_are_certified(cuda: torch.device, kind: str, dtype: torch.dtype) -> None:
    operator, make = MADE[kind]
    assert is_exact(make(dtype, cuda), getattr(ops.triton_ops(), operator), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ATTENTION, "8b", "sliding"])
def test_triton_attention_is_certified(cuda: torch.device, name: str, dtype: torch.dtype) -> None:
    shape = {**ATTENTION, **LARGE}[name]
    version = BACKENDS["triton"].build(None)
    assert is_exact(scores_check(shape, 16, dtype, cuda), version, 1)
    assert is_exact(values_check(shape, 16, dtype, cuda), version, 1)


def test_attention_split_by_the_batch_is_refused(cuda: torch.device) -> None:
    for make in (scores_check, values_check):
        assert not is_exact(
            make(LARGE["8b"], 16, torch.bfloat16, cuda), FunctionBackend(split_by_the_batch), 1
        )


def test_all_that_an_engine_uses_is_certified() -> None:
    lines = survey(EngineConfig.from_kwargs(device="cuda")).lines
    used = [line for line in lines if line.used]
    assert {"rms_norm", "attention", "product", "sample"} <= {line.operator for line in used}
    assert all(line.exact == 1 for line in used if line.operator != "product")
    assert all(line.exact > 0 for line in used)
