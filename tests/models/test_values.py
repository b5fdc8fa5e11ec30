"""Numbers, flags and lists of a target's config.json: each wrong one is refused on one line, at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from draftproof import LLM
from draftproof.engine.loading import memory
from draftproof.models.config import parse, read_config
from draftproof.models.families import FAMILIES
from draftproof.models.loading import read_generation_config
from draftproof.models.weights import Weights

ORACLE = Path(__file__).parent.parent / "data" / "oracle"
LLAMA, QWEN2, QWEN3 = "target_llama", "qwen2", "target_qwen3"
GEMMA, DEEPSEEK, GLM = "target_gemma4_a", "mtp_deepseek_v3_a", "mtp_glm4_moe_a"
NAN, INF, LONG = float("nan"), float("inf"), 10**400
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}


def raw_of(name: str) -> dict[str, Any]:
    if name == QWEN2:
        return {**raw_of(QWEN3), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return json.loads((ORACLE / name / "config.json").read_text())


def full(**values: Any) -> dict[str, Any]:
    """Gemma's rotary settings, with changes for the full-attention layers."""
    old = raw_of(GEMMA)["rope_parameters"]
    return {"rope_parameters": {**old, "full_attention": {**old["full_attention"], **values}}}


WRONG: list[tuple[str, str, tuple[Any, ...]]] = [
    (LLAMA, "rms_norm_eps", (NAN, INF, -1e-6, 1e12, "x", True, LONG, [])),
    (LLAMA, "rope_theta", (NAN, INF, 1e308, 0, -1, "7", True, LONG)),
    (LLAMA, "num_hidden_layers", (10**7, 10**8, 10**12, LONG, 0, 2.0, True, "2")),
    (QWEN2, "sliding_window", (INF, [1], "x", -1)),
    (QWEN2, "num_hidden_layers", (10**7, 10**12)),
    (LLAMA, "max_position_embeddings", (10**8, 10**12, LONG, 0, True)),
    (LLAMA, "vocab_size", (0, 10**12, LONG, 2.5)),
    (LLAMA, "hidden_size", (0, 10**12, "64")),
    (LLAMA, "tie_word_embeddings", (0, 1, "x", [], NAN)),
    (LLAMA, "rope_parameters", ([1], "x", 7, True)),
    (LLAMA, "rope_parameters", ({"rope_type": ""}, {"rope_type": INF})),
    (LLAMA, "dtype", (0, "", [], "x")),
    (LLAMA, "architectures", ("LlamaForCausalLM", 7, [7], {"a": 1})),
    (LLAMA, "model_type", (7, ["llama"])),
    (DEEPSEEK, "routed_scaling_factor", (INF, NAN, 0, -1, 1e30, True, LONG)),
    (DEEPSEEK, "first_k_dense_replace", (10**9, 10**12, LONG, -1, True)),
    (DEEPSEEK, "rope_interleave", (0, 1, [1], "x", NAN)),
    (DEEPSEEK, "n_routed_experts", (10**9, LONG, "8", 0)),
    (DEEPSEEK, "kv_lora_rank", (10**9, LONG, True)),
    (DEEPSEEK, "norm_topk_prob", (0, "x")),
    (GLM, "partial_rotary_factor", (NAN, INF, -1, "x", True, LONG)),
    (GEMMA, "num_hidden_layers", (10**7, 10**12, LONG)),
    (GEMMA, "final_logit_softcapping", (NAN, INF, -30.0, "x", True, LONG)),
    (GEMMA, "attn_logit_softcapping", (NAN, "", [1])),
    (GEMMA, "hidden_size_per_layer_input", (NAN, 2.5, -1, True, LONG, "8")),
    (GEMMA, "num_kv_shared_layers", (True, -1, 2.5, LONG)),
    (GEMMA, "attention_k_eq_v", ("x", NAN, 0, [])),
    (GEMMA, "use_double_wide_mlp", ("x", 1)),
    (GEMMA, "enable_moe_block", ("", 0)),
    (GEMMA, "sliding_window", (1e30, 10**30, 0, True, "8")),
    (GEMMA, "head_dim", (10**9, 0, "16")),
    (GEMMA, "per_layer_config", ([1], "x", {"2": 7}, {"2": {"head_dim": "x"}}, {"5": {"heads": 1}})),
    (GEMMA, "layer_types", ("x", [1], [["full_attention"]] * 6, ["linear_attention"] * 6)),
    (GEMMA, "rope_parameters", ([1], "x", {"full_attention": 7})),
]


def check_one_line(error: pytest.ExceptionInfo[ValueError], where: str) -> str:
    said = str(error.value)
    assert said.startswith(where) and "\n" not in said and len(said) < 600, said
    assert "something of the wrong type" not in said, said
    return said


@pytest.mark.parametrize(("name", "key", "values"), WRONG, ids=[f"{n}-{k}" for n, k, _ in WRONG])
def test_a_value_that_makes_no_sense_is_refused_with_its_key(
    name: str, key: str, values: tuple[Any, ...]
) -> None:
    parse(raw_of(name))
    for value in values:
        with pytest.raises(ValueError) as error:
            raw = {**raw_of(name), key: value}
            parse(raw, where="config.json")
            _check_architectures(raw)
        said = check_one_line(error, "config.json")
        assert key in said or "rope_type" in said


def _check_architectures(raw: dict[str, Any]) -> None:
    from draftproof.models.config import language_model

    language_model(raw, "config.json")


@pytest.mark.parametrize("value", [NAN, INF, -1, 0, "7", True, LONG])
def test_gemmas_second_base_is_checked_as_the_first(value: Any) -> None:
    with pytest.raises(ValueError, match="rope_theta"):
        parse({**raw_of(GEMMA), **full(rope_theta=value)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("factor", value) for value in (NAN, INF, 0, -1, "x", LONG)),
        *(("beta_fast", value) for value in (NAN, -1, "x", [])),
        *(("mscale", value) for value in (NAN, "x", -1)),
        ("attention_factor", INF),
        ("truncate", "x"),
        ("truncate", 0),
        ("original_max_position_embeddings", 2.5),
        ("rope_theta", 1),
    ],
)
def test_a_stretched_rotary_embedding_is_checked(key: str, value: Any) -> None:
    parse({**raw_of(LLAMA), "rope_parameters": YARN})
    with pytest.raises(ValueError, match=key) as error:
        parse({**raw_of(LLAMA), "rope_parameters": {**YARN, key: value}}, where="config.json")
    check_one_line(error, "config.json")


def test_a_type_with_other_layers_is_not_told_to_be_a_misspelling() -> None:
    with pytest.raises(
        ValueError, match="model_type='qwen3_5_text': has layers of linear attention"
    ) as error:
        parse({**raw_of(QWEN3), "model_type": "qwen3_5_text"})
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100 + "1" + "}" * 100, '{"a": ' + "1" * 5000 + "}"]
)
def test_json_nested_deeply_or_with_endless_numbers(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as error:
        read_config(tmp_path)
    check_one_line(error, str(tmp_path / "config.json"))


@pytest.mark.parametrize("key", ["top_k", "temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [INF, NAN, "x", True, LONG, [1]])
def test_generation_defaults_are_checked(tmp_path: Path, key: str, value: Any) -> None:
    check_generation_default(tmp_path, key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 1e8),
        ("top_p", 5),
        ("top_p", 0),
        ("min_p", 3),
        ("repetition_penalty", 0),
        ("top_k", -2),
    ],
)
def test_generation_defaults_out_of_range_are_refused(tmp_path: Path, key: str, value: float) -> None:
    check_generation_default(tmp_path, key, value)


def check_generation_default(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=f"{key}=") as error:
        read_generation_config(tmp_path)
    check_one_line(error, str(tmp_path / "generation_config.json"))


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - {"mimo"}))  # mimo's class is not in transformers
def test_every_key_that_transformers_writes_is_known(kind: str, tmp_path: Path) -> None:
    """Known are the keys as saved, those of a loaded config, and all keys including defaults."""
    theirs = CONFIG_MAPPING[kind](**({"head_dim": 128} if kind == "glm4_moe" else {}))
    theirs.architectures = list(FAMILIES[kind].architectures[:1])
    theirs.save_pretrained(tmp_path)
    first = read_config(tmp_path)
    theirs = type(theirs).from_pretrained(tmp_path)
    theirs._attn_implementation = "eager"
    for use_diff in (True, False):
        theirs.to_json_file(tmp_path / "config.json", use_diff=use_diff)
        assert read_config(tmp_path) == first
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"_model_name_or_path": "owner/name", "_name_or_path": "owner/name", "_commit_hash": "0" * 40}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == first


DTYPES = (torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)


def copied(name: str, to: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a checkpoint with some tensors replaced."""
    shutil.copytree(ORACLE / name, to)
    (to / "oracle_io.safetensors").unlink(missing_ok=True)
    old = load_file(to / "model.safetensors")
    assert not set(tensors) - set(old)
    save_file({**old, **tensors}, to / "model.safetensors")
    return to


def load(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_target_s_tensor_of_another_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(ORACLE / LLAMA / "model.safetensors")[name]
    folder = copied(LLAMA, tmp_path / "target", **{name: tensor.to(dtype)})
    with pytest.raises(ValueError, match=f"{name}' is stored as {str(dtype)[6:]}: must be one of") as error:
        load(folder)
    check_one_line(error, str(folder))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_correction_of_expert_scores_that_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = load_file(ORACLE / DEEPSEEK / "model.safetensors")[name]
    bias[3] = value
    with pytest.raises(ValueError, match=f"{name}' holds NaN or infinity"):
        load(copied(DEEPSEEK, tmp_path / "target", **{name: bias}))


@pytest.mark.parametrize("weight_map", [None, 7, [], "x", {}, {"a": 7}, {"a": "../x"}, {"a": "/etc/passwd"}])
def test_an_index_of_the_wrong_type_is_refused(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="weight_map"):
        Weights.open(tmp_path)


def test_tables_that_do_not_fit_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 << 30)
    shutil.copytree(ORACLE / LLAMA, tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1 << 24}))
    with pytest.raises(
        ValueError, match=r"max_model_len=16777216: tables of all positions would take .* GiB"
    ):
        LLM(str(tmp_path / "target"), max_num_seqs=4096, num_kv_blocks=None)


def test_overrides_take_the_place_of_a_config_s_keys(tmp_path: Path) -> None:
    shutil.copytree(ORACLE / LLAMA, tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "unheard_of": 1, "rms_norm_eps": "x"}))
    with pytest.raises(ValueError, match=r"leave it out with hf_overrides=\{'unheard_of': None\}"):
        load(tmp_path / "target")
    overrides = {"unheard_of": None, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e5}}
    found = read_config(tmp_path / "target", overrides=overrides)
    assert (found.norm_eps, found.ropes[0].theta, found.num_layers) == (1e-6, 5e5, raw["num_hidden_layers"])
    llm = LLM(str(tmp_path / "target"), dtype="float32", max_model_len=64, hf_overrides=overrides)
    assert llm.model_config == found
    with pytest.raises(ValueError, match=r"config.json with hf_overrides: hidden_size=0: must be an integer"):
        LLM(str(tmp_path / "target"), hf_overrides={**overrides, "hidden_size": 0})
    with pytest.raises(ValueError, match="hf_overrides=7: must be a dict"):
        LLM(str(tmp_path / "target"), hf_overrides=7)  # type: ignore[arg-type]
