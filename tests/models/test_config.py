"""config.json: keys that are supported, ignored, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftproof.models.config import ModelConfig, parse, read_config
from draftproof.models.ffns.dense import DenseConfig
from draftproof.models.mixers.attention import AttentionConfig
from tests.models.reference import MODEL_CASES, make

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def windows_of(config: ModelConfig) -> tuple[int, ...]:
    return tuple(layer.window for layer in config.layers)


def test_defaults_of_what_a_file_may_leave_out() -> None:
    config = parse(RAW)
    mixer: Any = config.layers[0].mixer
    assert (mixer.num_kv_heads, mixer.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert (mixer.rope.theta, mixer.rope.type, mixer.rope.rotary_dim) == (10000.0, "default", 16)
    assert (windows_of(config), config.eos_token_ids, config.dtype) == ((0, 0, 0), (), None)
    ffn: Any = config.layers[0].ffn
    assert not (config.tie_word_embeddings or mixer.qkv_bias or mixer.qk_norm or ffn.bias)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = parse({**RAW, "rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}})
    new = parse({**RAW, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}})
    assert old == new
    assert old.ropes[0].factor == 8.0
    nested = {kind: {"rope_theta": 7.0} for kind in ("full_attention", "sliding_attention")}
    assert parse({**RAW, "rope_parameters": nested}).ropes[0].theta == 7.0


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_the_dtype_of_the_file(name: str) -> None:
    assert parse({**RAW, name: "bfloat16"}).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype='int8': must be one of"):
        parse({**RAW, name: "int8"})


def test_end_of_text_ids_may_be_one_or_many() -> None:
    assert parse({**RAW, "eos_token_id": 2}).eos_token_ids == (2,)
    assert parse({**RAW, "eos_token_id": [2, 5], "bos_token_id": 1}).eos_token_ids == (2, 5)
    with pytest.raises(ValueError, match=r"eos_token_id='</s>'"):
        parse({**RAW, "eos_token_id": "</s>"})


@pytest.mark.parametrize("name", MODEL_CASES)
def test_what_transformers_writes_is_understood(name: str, tmp_path: Path) -> None:
    theirs = make(MODEL_CASES[name]).config
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = [f"{MODEL_CASES[name].family}ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    again, ours = AutoConfig.from_pretrained(tmp_path), read_config(tmp_path)
    assert ours.num_layers == again.num_hidden_layers
    heads = [layer.mixer.num_kv_heads for layer in ours.layers if isinstance(layer.mixer, AttentionConfig)]
    assert not heads or heads[0] == again.to_dict()["num_key_value_heads"]
    assert ours.model_type == again.model_type
    assert ours.tie_word_embeddings == again.tie_word_embeddings


SLIDES = ["full_attention", "sliding_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0, 0)),
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "qwen2", "sliding_window": 8}, (0, 0, 0)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (0, 0, 0)),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (0, 0, 8),
        ),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "layer_types": SLIDES},
            (0, 8, 8),
        ),
        ({"model_type": "llama", "sliding_window": 8, "layer_types": SLIDES}, (0, 8, 8)),
    ],
)
def test_windows_of_each_family(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert windows_of(parse({**RAW, **changes})) == windows


def test_biases_and_norms_of_each_family() -> None:
    def flags(**changes: Any) -> tuple[bool, bool, bool, bool]:
        c = parse({**RAW, **changes})
        mixer, ffn = c.layers[0].mixer, c.layers[0].ffn
        assert isinstance(mixer, AttentionConfig) and isinstance(ffn, DenseConfig)
        return mixer.qkv_bias, mixer.o_bias, ffn.bias, mixer.qk_norm

    assert flags(attention_bias=True) == (True, True, False, False)
    assert flags(mlp_bias=True) == (False, False, True, False)
    assert flags(model_type="qwen2") == (True, False, False, False)
    assert flags(model_type="qwen3") == (False, False, False, True)
    assert flags(model_type="qwen3", attention_bias=True) == (True, True, False, True)
    assert flags(model_type="mistral", attention_bias=False) == (False, False, False, False)
    assert parse({**RAW, "model_type": "qwen3"}).caches[0].head_dim == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"foo_scale": 2}, r"unknown key 'foo_scale'=2"),
        ({"num_key_value_head": 2}, r"'num_key_value_head'=2: did you mean 'num_key_value_heads'\?"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu': not supported.*'silu'"),
        ({"pretraining_tp": 2}, r"pretraining_tp=2"),
        ({"model_type": "mistral", "attention_bias": True}, r"attention_bias=True"),
        ({"quantization_config": {"bits": 4}}, r"'quantization_config' is set.*unquantised"),
        ({"model_type": "lama"}, r"model_type='lama'.*did you mean 'llama'\? supported: .*llama, mi"),
        ({"model_type": None}, r"no 'model_type'"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"hidden_size": "64"}, r"hidden_size='64'"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4.*num_key_value_heads=3"),
        ({"num_attention_heads": 3}, r"hidden_size=64.*num_attention_heads=3.*head_dim"),
        ({"head_dim": 7}, r"head_dim=7: must be even"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings='yes'"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps='small'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_type='dynamic'.*length.*'yarn'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_type='longrope'.*length"),
        ({"rope_scaling": {"rope_type": "magic"}}, r"rope_type='magic': must be one of default"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "warp": 3}}, r"unknown key 'warp'=3"),
        ({"rope_theta": -1}, r"rope_theta=-1"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        ({"sliding_window": 8}, r"sliding_window=8 without 'layer_types'"),
        ({"layer_types": SLIDES}, r"layer_types has sliding layers.*None.*sliding_window"),
        ({"layer_types": SLIDES[:2]}, r"layer_types=.*num_hidden_layers=3"),
        ({"model_type": "qwen2", "layer_types": SLIDES, "sliding_window": 8}, r"use_sliding_window to true"),
        ({"model_type": "mistral", "layer_types": SLIDES}, r"sliding_window=4096 holds for every layer"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    parse(RAW)
    with pytest.raises(ValueError, match=message) as error:
        parse({**RAW, **changes}, where="somewhere/config.json")
    assert "somewhere/config.json" in str(error.value)


def test_bookkeeping_and_nulls_are_let_through_and_callers_may_own_keys() -> None:
    harmless = {"use_cache": True, "id2label": {"0": "a"}, "attention_dropout": 0.1, "pretraining_tp": 1}
    assert parse({**RAW, **harmless, "quantization_config": None, "foo_scale": None}) == parse(RAW)
    assert parse({**RAW, "draft_vocab_size": 8}, extra=("draft_vocab_size",)) == parse(RAW)


def test_a_folder_whose_config_is_missing_broken_or_of_no_language_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config.json: no such file"):
        read_config(tmp_path)
    path.write_text("{ not json")
    with pytest.raises(ValueError, match=r"config.json: cannot be read as JSON"):
        read_config(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"must hold a JSON object, not list"):
        read_config(tmp_path)
    path.write_text(json.dumps({**RAW, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification.*LlamaForCausalLM"):
        read_config(tmp_path)
