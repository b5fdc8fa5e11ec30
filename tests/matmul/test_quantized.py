"""fp8 weights: how they are rounded, which products have them, and what they weigh.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from draftproof.kernels import ops
from draftproof.matmul import quantized
from draftproof.matmul.linear import LinearPlanner
from draftproof.models import cost
from draftproof.models.config import read_config
from draftproof.models.decoder import Decoder
from draftproof.models.ffns.dense import MLP
from draftproof.models.ffns.experts import MoE
from draftproof.runtime import gpu
from tests.made.shared import DRAFT, deepseek

CPU = torch.device("cpu")


def planner(folder: Path) -> LinearPlanner:
    return LinearPlanner(CPU, exact=True, max_rows=64, library=None, cache_dir=folder)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of drafters are packed as a GPU has them; they cannot be called."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setattr(gpu, "available", lambda device: True)


def test_a_rounded_weight_is_within_a_sixteenth_whatever_its_row_s_size() -> None:
    weight_NK = torch.randn(6, 300) * torch.tensor([1e-20, 1e-3, 1.0, 1e3, 1e20, 0.0])[:, None]
    fp8_NK, scale_N = quantized.quantize(weight_NK)
    assert fp8_NK.dtype == torch.float8_e4m3fn and fp8_NK.is_contiguous() and scale_N.shape == (6,)
    found_NK = quantized.dequantize(fp8_NK, scale_N, torch.float32)
    largest_N1 = weight_NK.abs().amax(dim=1, keepdim=True)
    assert ((found_NK - weight_NK).abs() <= weight_NK.abs() / 16 + largest_N1 / 448 / 2**9).all()
    assert not found_NK[5].any() and found_NK.isfinite().all()
    torch.testing.assert_close(found_NK.abs().amax(dim=1), largest_N1[:, 0])  # the largest keeps its value


def test_rounded_rows_are_within_a_sixteenth_whatever_else_is_in_them() -> None:
    """An outlier costs the precision of its own step only."""
    x_TK = torch.randn(6, 300) * torch.tensor([1e-20, 1e-3, 1.0, 1e3, 1e20, 0.0])[:, None]
    x_TK[:, 130] *= 1e6
    found_TK = quantized.round_rows(x_TK, 128)
    assert found_TK.shape == x_TK.shape and found_TK.isfinite().all() and not found_TK[5].any()
    for step in (slice(0, 128), slice(128, 256), slice(256, 300)):
        largest_T1 = x_TK[:, step].abs().amax(dim=1, keepdim=True)
        fault_TK = (found_TK - x_TK)[:, step].abs()
        assert (fault_TK <= x_TK[:, step].abs() / 15.9 + largest_T1 / 128 / 2**9.9).all()
    assert (found_TK[:5] != x_TK[:5]).float().mean() > 0.9


def test_the_product_is_the_rounded_weight_s_with_rounded_rows(tmp_path: Path) -> None:
    weight_NK, bias_N, x_TK = torch.randn(40, 100), torch.randn(40), torch.randn(7, 100)
    made = planner(tmp_path).pack(quantized.Fp8.store(weight_NK), bias_N, exact=False)
    rounded_TK = quantized.round_rows(x_TK)
    expected = quantized.product_torch(rounded_TK, *quantized.quantize(weight_NK), bias_N, torch.float32)
    torch.testing.assert_close(made(x_TK), expected)
    assert (made(x_TK) - torch.nn.functional.linear(x_TK, weight_NK, bias_N)).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_rounds_rows_in_the_same_steps(dtype: torch.dtype) -> None:
    gpu_quantized = pytest.importorskip("draftproof.matmul.triton.quantized")
    tiles = [gpu_quantized.fp8_tile_of(rows, dtype) for rows in (1, 16, 17, 65, 5000)]
    assert all(tile.tile.inputs == quantized.STEP for tile in tiles)


def test_a_product_that_must_be_exact_cannot_have_them(tmp_path: Path) -> None:
    for exact in (None, True):
        with pytest.raises(AssertionError, match="fp8 weights are for drafters"):
            planner(tmp_path).pack(quantized.Fp8.store(torch.randn(40, 100)), exact=exact)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_gpu_keeps_a_byte_a_weight(tmp_path: Path) -> None:
    made = planner(tmp_path).pack(quantized.Fp8.store(torch.randn(40, 100).bfloat16()), exact=False)
    assert made.weight_itemsize == 1
    assert planner(tmp_path).pack(torch.randn(40, 100).bfloat16(), exact=False).weight_itemsize == 2


def load(folder: str, made: LinearPlanner, fp8: bool) -> Decoder:
    """A draft model."""
    model = read_config(Path(folder))
    return Decoder.load(
        Path(folder), model, ops.TORCH, made, CPU, torch.bfloat16, exact=False, kind="fp8" if fp8 else "dense"
    )


@pytest.mark.usefixtures("as_on_a_gpu")
def test_memory_is_counted_as_it_is_kept(tmp_path: Path) -> None:
    """Half of every product's weight is saved; the embedding is kept, and its copy in fp8 makes logits."""
    wide, narrow = planner(tmp_path), planner(tmp_path)
    model = load(DRAFT, wide, False).config
    assert load(DRAFT, narrow, True).config.tie_word_embeddings
    saved = cost.layers_products(model, 1, 1).bytes - model.vocab_size * model.hidden_size
    assert wide.weight_bytes - narrow.weight_bytes == saved


def test_a_cpu_counts_what_it_keeps(tmp_path: Path) -> None:
    """Rounded weights in the model's dtype: nothing is saved, and the tied embedding is there twice."""
    wide, narrow = planner(tmp_path), planner(tmp_path)
    model = load(DRAFT, wide, False).config
    load(DRAFT, narrow, True)
    assert narrow.weight_bytes - wide.weight_bytes == 2 * model.vocab_size * model.hidden_size


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_router_is_not_rounded(tmp_path: Path) -> None:
    layers = load(deepseek(), planner(tmp_path), True)._layers
    sizes = {
        (type(mlp).__name__, getattr(mlp, "_router" if isinstance(mlp, MoE) else "down").weight_itemsize)
        for mlp in (layer.ffn for layer in layers)  # type: ignore[attr-defined]
    }
    assert sizes == {(MLP.__name__, 1), (MoE.__name__, 2)}
