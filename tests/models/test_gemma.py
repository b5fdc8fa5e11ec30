"""Gemma 3 and 4: layers read from their configs, older and nested files, and what is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof.models.config import parse, read_config
from draftproof.models.rope import inverse_frequencies
from draftproof.models.weights import RandomWeights
from tests.helpers import Paged, load_decoder, logits_in_parts, run_rows
from tests.models.reference import MODEL_CASES, save

TEXT = [(i * 37 + 5) % 199 for i in range(40)]
SLIDES, FULL = "sliding_attention", "full_attention"
RAW4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": [SLIDES, SLIDES, FULL, SLIDES, SLIDES, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 256,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 40}
RAW3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "sliding_window": 8,
    "max_position_embeddings": 256,
}


def test_layers_past_the_last_own_ones_read_the_last_cache_of_their_kind() -> None:
    config = parse(RAW4)
    assert config.cache_of_layer == (0, 1, 2, 3, 3, 2)
    assert [len(layer.mixer.caches) for layer in config.layers] == [1] * 4 + [0] * 2
    assert [(s.head_dim, s.heads) for s in config.caches] == [(16, 2), (16, 2), (32, 2), (16, 2)]


def test_shapes_of_full_layers_may_be_listed_layer_by_layer() -> None:
    without = {key: value for key, value in RAW4.items() if key != "global_head_dim"}
    own = {"head_dim": 32, "num_key_value_heads": 1}
    listed = parse({**without, "attention_k_eq_v": True, "per_layer_config": {"2": own, "5": own}})
    stated = parse({**RAW4, "attention_k_eq_v": True, "num_global_key_value_heads": 1})
    assert listed == stated and listed.caches[2].heads == 1
    assert parse({**RAW4, "num_global_key_value_heads": 1}) == parse(RAW4), "only with attention_k_eq_v"


def test_a_part_of_a_full_layers_pairs_turns_at_the_frequencies_of_a_whole_head() -> None:
    (full,) = parse(RAW4).layers[2].mixer.ropes
    turning = 1e6 ** -(torch.arange(0, 8, 2) / 32)
    torch.testing.assert_close(inverse_frequencies(full), torch.cat((turning, torch.zeros(12))))


def test_older_files_state_two_bases_and_a_pattern() -> None:
    config = parse(
        {**RAW3, "sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 2e4,
         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    )  # fmt: skip
    assert [layer.window for layer in config.layers] == [8, 8, 0, 8, 8, 0, 8]
    slides, full = config.ropes
    assert (slides.theta, slides.type, full.theta, full.type, full.factor) == (
        2e4,
        "default",
        5e5,
        "linear",
        8.0,
    )


def test_what_released_files_leave_out() -> None:
    config = parse(RAW3)
    mixer: Any = config.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.tie_word_embeddings, config.eos_token_ids) == (262208, True, (1,))
    assert [layer.window for layer in config.layers] == [8] * 5 + [0, 8]
    assert mixer.scale == 1 / 16 and config.norm_offset == config.layers[3].norms.offset == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": "yes"}, r"enable_moe_block='yes': must be true or false"),
        ({"enable_moe_block": True}, r"num_experts is missing: add it"),
        ({**EXPERTS, "top_k_experts": 9}, r"top_k_experts=9: must be at most num_experts=8"),
        ({**EXPERTS, "moe_intermediate_size": 0}, r"moe_intermediate_size=0: must be an integer from 1"),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention='all'"),
        ({"hidden_activation": "silu"}, r"hidden_activation='silu': only 'gelu_pytorch_tanh'"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50.0"),
        (
            {"hidden_size_per_layer_input": 8},
            r"vocab_size_per_layer_input=262144|=None: must equal vocab_size=199",
        ),
        ({"num_kv_shared_layers": 4}, r"num_kv_shared_layers=4: layer 2 .*'full_attention'.* first 2 layers"),
        ({"layer_types": [SLIDES]}, r"layer_types=.*num_hidden_layers=6"),
        ({"num_kv_shared_layers": 9}, r"num_kv_shared_layers=9: must be at most num_hidden_layers=6"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4, num_key_value_heads=3"),
        ({"rope_parameters": {"rope_theta": 1.0}}, r"rope_parameters: rope_theta=1.0: must be an object"),
        ({"rope_parameters": {FULL: {"warp": 2}}}, r"rotary embedding: unknown key 'warp'"),
        ({"warp_factor": 2}, r"unknown key 'warp_factor'=2"),
        ({"quantization_config": {"bits": 4}}, r"'quantization_config' is set"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    parse(RAW4)
    with pytest.raises(ValueError, match=message):
        parse({**RAW4, **changes})


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"warp_factor": 2}, "unknown key 'warp_factor'=2"),
        ({"eos_token_ids": [1]}, "unknown key 'eos_token_ids'=.*did you mean 'eos_token_id'"),
        ({"hidden_size": 64}, "unknown key 'hidden_size'=64"),
        ({"compression_config": {"bits": 4}}, "'compression_config' is set"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' is set"),
    ],
)
def test_keys_around_a_text_model_are_known_or_refused_by_name(outer: dict[str, Any], message: str) -> None:
    nested = {"model_type": "gemma4", "text_config": RAW4, "mm_tokens_per_image": 256, "vision_config": {}}
    parse(nested)
    with pytest.raises(ValueError, match=message):
        parse({**nested, **outer})


def test_gemma_3_has_no_experts() -> None:
    with pytest.raises(ValueError, match=r"enable_moe_block=True: has no experts \(Gemma 3\)"):
        parse({**RAW3, **EXPERTS})


def test_a_model_that_borrows_every_key_is_no_target() -> None:
    config = parse({**RAW4, "num_kv_shared_layers": 6})
    with pytest.raises(ValueError, match=r"num_kv_shared_layers=6.*only drafts.*speculative_config"):
        load_decoder(RandomWeights(), config)


def test_a_text_model_among_others_is_read_as_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its config is nested, its tensors have another prefix beside a tower's, and some keys and values are unused."""
    save(MODEL_CASES["gemma4-shares-keys-wide-mlp"], tmp_path)
    plain = load_decoder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    outer = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "eos_token_id": [1, 7],
    }
    outer |= {"text_config": raw, "vision_config": {"hidden_size": 3}, "image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"model.language_model.{k.removeprefix('model.')}": v for k, v in tensors.items()}
    tensors["model.vision_tower.weight"] = torch.zeros(3)
    tensors["model.language_model.layers.3.self_attn.k_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_config(tmp_path).eos_token_ids == (1, 7)
    with caplog.at_level(logging.WARNING):
        nested = load_decoder(tmp_path)
    assert "1 tensors are not used, such as model.vision_tower" in caplog.text
    outs = [run_rows(d, Paged(d.kv), [(0, 0, TEXT)]).hidden_TH for d in (plain, nested)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "raw",
    [
        {
            **RAW4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 199,
            "final_logit_softcapping": 5.0,
        },
        {**RAW4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {**RAW3, **{key: RAW4[key] for key in ("vocab_size", "intermediate_size", "head_dim")}},
    ],
    ids=["gemma4 inputs of layers", "gemma4 keys are values", "gemma3"],
)
def test_a_row_has_the_same_bits_in_any_pass(raw: dict[str, Any], dtype: torch.dtype) -> None:
    decoder = load_decoder(RandomWeights(3), parse(raw), dtype=dtype)
    whole = run_rows(decoder, Paged(decoder.kv, dtype=dtype), [(0, 0, TEXT)])
    paged = Paged(decoder.kv, dtype=dtype)
    assert torch.equal(
        logits_in_parts(decoder, paged, TEXT, sizes=[5, 1, 1, 2, 20, 1, 8, 2]),
        decoder.logits(whole.hidden_TH),
    )
