"""A backend is one file and one row: torch's own kernel, over keys in a layout of its own, stands for what may come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import LLM, SamplingParams, assets
from draftproof.attention import registry
from draftproof.attention.base import AttentionSpec, BlockRows, Rows
from draftproof.attention.exactness import AttentionShape
from draftproof.attention.reference import REFERENCE
from draftproof.attention.torch_sdpa import TorchSdpa
from draftproof.bench.compare import compare
from draftproof.cache.pool import KVShape
from draftproof.models.rope import RopeConfig, cos_sin_table
from draftproof.runtime import gpu
from tests.helpers import CPU, Paged

DIM, KV_HEADS, HEADS, LENGTH = 16, 2, 6, 40
TABLE = cos_sin_table(RopeConfig(theta=10000.0, rotary_dim=8), 64, CPU)
NORM = torch.linspace(0.5, 1.5, DIM)
SPEC = AttentionSpec(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=0.3, cos_sin_PD=TABLE, q_norm_D=NORM
)
EAGLE3: dict[str, Any] = {"model": str(assets.path("tiny-eagle3")), "num_speculative_tokens": 3}


class NoLook(TorchDispatchMode):
    """Fails where a GPU would have to wait, and could not be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        return func(*args, **(kwargs or {}))


def rows_of_two_slots() -> Rows:
    """Every position of slot 2, then padding, then three rows at the end of slot 0."""
    positions = torch.tensor([*range(LENGTH), -1, -1, 4, 5, 6])
    slots = torch.tensor([2] * LENGTH + [0] * 5)
    return Rows(positions, slots, positions + 1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("normed", [False, True])
def test_another_layout_gives_the_references_numbers_without_a_look_at_the_host(
    shared: bool, window: int, normed: bool
) -> None:
    spec = replace(SPEC, window=window, k_norm_D=NORM if normed else None)
    spec = replace(spec, v_norm_D=NORM if normed and not shared else None)
    shape = KVShape(heads=KV_HEADS, head_dim=DIM, shared=shared)
    width = (HEADS + (1 if shared else 2) * KV_HEADS) * DIM
    generator = torch.Generator().manual_seed(0)
    early = Rows(torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.arange(4) + 1)
    rows, given = rows_of_two_slots(), [torch.randn(n, width, generator=generator) for n in (4, LENGTH + 5)]
    found = []
    for backend in (REFERENCE, TorchSdpa()):
        paged = Paged([shape], num_slots=3, max_len=64, block_size=4, backend=backend)
        paged.attention(early.positions_T, early.slots_T)(0, given[0], spec)
        if isinstance(backend, TorchSdpa):
            assert paged.cache.layers[0].k.shape[1:] == (4, KV_HEADS, DIM)
            with NoLook():
                out_TX = paged.attention(rows.positions_T, rows.slots_T)(0, given[1], spec)
        else:
            out_TX = paged.attention(rows.positions_T, rows.slots_T)(0, given[1], spec)
        queried_TX = paged.attention(rows.positions_T, rows.slots_T).query(
            0, given[1][:, : HEADS * DIM], spec
        )
        found.append((out_TX, queried_TX))
    for expected_TX, ours_TX in zip(*found, strict=True):
        torch.testing.assert_close(ours_TX, expected_TX, atol=1e-5, rtol=1e-5)
    assert (found[1][0][LENGTH : LENGTH + 2] == 0).all() and found[1][0][0].abs().min() > 0


def test_the_calls_of_a_pass_share_what_depends_on_its_rows() -> None:
    """A backend is asked for a plan once a pass, and once more for each kind of rows in a pass over blocks."""

    class Counting(TorchSdpa):
        num_plans = 0

        def plan(self, rows: Any) -> Any:
            self.num_plans += 1
            return super().plan(rows)

    backend = Counting()
    paged = Paged([KVShape(heads=KV_HEADS, head_dim=DIM)] * 3, num_slots=3, block_size=4, backend=backend)
    qkv_TX = torch.randn(4, (HEADS + 2 * KV_HEADS) * DIM)
    attention = paged.attention(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    for layer in range(3):
        attention(layer, qkv_TX, SPEC)
    assert backend.num_plans == 1
    attention.rows.block = BlockRows(torch.full((4,), 4), torch.tensor([[0], [1], [2], [3]]))
    for layer in range(3):
        attention(layer, qkv_TX, replace(SPEC, causal=False))
        attention(layer, qkv_TX, SPEC)
    assert backend.num_plans == 1 + 1 + 4


@pytest.mark.parametrize("config", [None, EAGLE3], ids=["plain", "eagle3"])
def test_an_engine_runs_on_it_where_nothing_is_promised(config: dict[str, Any] | None) -> None:
    prompts = ["def add(a, b):", "import os\n", "class A"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    settings = {"dtype": "float32", "max_model_len": 128, "speculative_config": config}
    with LLM(**settings) as llm, LLM(attention_backend="torch_sdpa", exact=False, **settings) as other:
        expected = llm.generate(prompts, params, use_tqdm=False)
        found = other.generate(prompts, params, use_tqdm=False)
        assert isinstance(other.engine.runner.backend, TorchSdpa)
        keys = other.engine.runner.cache.layers[0].k
        assert keys.shape[1] == other.config.block_size != keys.shape[2]
        if config is not None:
            assert other.stats.speculation.num_accepted_tokens > 10 and not other.stats.num_drafter_faults
    assert not compare(expected, found), "rounding differs, the likeliest tokens do not"


def test_it_is_refused_where_a_promise_is_made() -> None:
    with pytest.raises(ValueError, match=r"attention_backend='torch_sdpa'.*exact=False"):
        LLM(attention_backend="torch_sdpa")


def test_a_drafters_heads_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    original = registry.check_sizes

    def check(*given: Any) -> None:
        seen.append(given[2:])
        original(*given)

    monkeypatch.setattr(registry, "check_sizes", check)
    with LLM(dtype="float32", max_model_len=64, speculative_config=EAGLE3) as llm:
        drafter = llm.engine.runner.spec
    assert (drafter.attention, "drafter HeadDrafter") in seen and drafter.attention
    monkeypatch.setattr(gpu, "available", lambda device: device.type == "cuda")
    wide = [AttentionShape(num_heads=1, num_kv_heads=1, head_dim=576)]
    with pytest.raises(ValueError, match="heads of size 576, as of drafter X"):
        original(torch.device("cuda"), None, wide, "drafter X")
    original(torch.device("cuda"), "torch_sdpa", wide, "drafter X")
