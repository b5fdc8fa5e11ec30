"""Latent attention: one small vector per token in the cache, rows' independence, and refused configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof.models import cost
from draftproof.models.config import parse
from draftproof.models.rope import score_factor
from draftproof.models.weights import RandomWeights
from draftproof.runtime import native
from tests.helpers import Paged, load_decoder, logits_in_parts, run_rows

TEXT = [(i * 37 + 5) % 199 for i in range(90)]
RAW: dict[str, Any] = {
    **{"model_type": "deepseek_v3", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256},
    **{
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True},
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_pass(dtype: torch.dtype, compiled: bool) -> None:
    library = native.load() if compiled else None
    if compiled and library is None:
        pytest.skip("no C++ compiler here")
    decoder = load_decoder(RandomWeights(3), parse(RAW), dtype=dtype, library=library)
    whole = run_rows(decoder, Paged(decoder.kv, dtype=dtype, library=library), [(0, 0, TEXT)])
    paged = Paged(decoder.kv, dtype=dtype, library=library)
    assert torch.equal(logits_in_parts(decoder, paged, TEXT), decoder.logits(whole.hidden_TH))


def test_a_token_takes_one_vector_of_the_cache_whatever_the_number_of_heads() -> None:
    decoder = load_decoder(RandomWeights(3), parse(RAW))
    assert [shape.bytes_per_token(torch.float32) for shape in decoder.kv] == [(24 + 8) * 4] * 3
    layer = Paged(decoder.kv).cache.layers[0]
    assert layer.v is layer.k


def test_padding_rows_change_nothing_and_store_nothing() -> None:
    decoder = load_decoder(RandomWeights(3), parse(RAW))
    plain = run_rows(decoder, Paged(decoder.kv), [(1, 0, TEXT[:9])]).hidden_TH
    paged = Paged(decoder.kv)
    positions_T, slots_T = torch.tensor([-1, *range(9), -1]), torch.tensor([1] * 11)
    out = decoder(torch.tensor([0, *TEXT[:9], 0]), paged.attention(positions_T, slots_T))
    assert torch.equal(out.hidden_TH[1:10], plain)
    assert paged.cache.layers[0].k.abs().sum(dim=(1, 3)).count_nonzero() == 9


def test_a_pass_may_have_more_rows_than_were_planned_for() -> None:
    decoder = load_decoder(RandomWeights(3), parse(RAW), max_rows=16)
    whole = run_rows(decoder, Paged(decoder.kv), [(0, 0, TEXT)]).hidden_TH
    paged = Paged(decoder.kv)
    parts = [run_rows(decoder, paged, [(0, i, TEXT[i : i + 9])]).hidden_TH for i in range(0, 90, 9)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"v_head_dim": 0}, "v_head_dim=0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7: must be even"),
        ({"qk_head_dim": 20}, "qk_head_dim=20: must be qk_nope_head_dim.*= 24"),
        ({"q_lora_rank": "many"}, "q_lora_rank='many'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(RAW | changes)


def test_scores_of_a_stretched_embedding_are_louder() -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
    }
    assert score_factor({"rope_parameters": yarn}, "x") == 1
    louder = score_factor({"rope_parameters": {**yarn, "mscale_all_dim": 1.0}}, "x")
    assert louder == pytest.approx(1.8738, abs=1e-3)  # (0.1 ln 40 + 1)^2
    mixer: Any = parse(RAW | {"rope_parameters": {**yarn, "mscale_all_dim": 1.0}}).layers[0].mixer
    assert mixer.scale == pytest.approx(24**-0.5 * louder)


def test_a_pass_reads_the_cached_vectors_once_and_every_weight_as_it_is_kept() -> None:
    config = parse(RAW)
    queries, cached, output = 64 * 32 + 32 * 4 * 24, 64 * 32, 4 * 12 * 64
    products = 4 * (32 * 24 + 12 * 32)  # each head's products into and out of the cached space
    mixer = config.layers[0].mixer
    assert mixer.num_weights(64, 64) == queries + cached + products + output
    empty, full = (cost.attention(config, 2, 1, context) for context in (0, 1000))
    assert full.bytes - empty.bytes == 2 * 3 * 1000 * 32 * 2
    whole = parse(RAW | {"q_lora_rank": None}).layers[0].mixer
    assert whole.num_weights(64, 64) - mixer.num_weights(64, 64) == 64 * 4 * 24 - queries
