"""Draft heads whose files say something wrong, or less than they should: told on one line, or used as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof import LLM
from draftproof.checkpoints import detect
from tests.checkpoints.test_detect import copied
from tests.drafters.heads import ORACLE

TARGETS = {
    "eagle3": "target_llama",
    "dflash": "target_qwen3",
    "zlab_dflash_a": "target_dflash_a",
    "safeailab_eagle1_a": "target_eagle_a",
    "safeailab_eagle3_a": "target_eagle_a",
    "gemma4_assistant_a": "target_gemma4_a",
    "gemma4_assistant_ordered_a": "target_gemma4_a",
}
NAN, INF = float("nan"), float("inf")


def load(head: Path, folder: str, **settings: Any) -> LLM:
    config = {"model": str(head), "num_speculative_tokens": 2, **settings}
    target = str(ORACLE / TARGETS[folder])
    return LLM(target, dtype="float32", max_model_len=64, speculative_config=config)


def refused(head: Path, folder: str, message: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load(head, folder, **settings)
    said = str(error.value)
    assert "\n" not in said and "\x1b" not in said and str(head) in said, said


@pytest.mark.parametrize("value", [5, 7, 99])
def test_a_head_for_a_target_of_other_layers_is_refused(tmp_path: Path, value: int) -> None:
    head = copied("zlab_dflash_a", tmp_path, num_target_layers=value)
    refused(head, "zlab_dflash_a", f"num_target_layers={value}, but the target's num_hidden_layers is 6")


@pytest.mark.parametrize("value", [NAN, -1, [], 0, True, "6", 10**400])
def test_a_number_of_target_layers_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    head = copied("zlab_dflash_a", tmp_path, num_target_layers=value)
    refused(head, "zlab_dflash_a", "num_target_layers=.*: must be an integer from 1")


def test_an_assistant_for_a_target_of_another_window_is_refused(tmp_path: Path) -> None:
    text = json.loads((ORACLE / "gemma4_assistant_a" / "config.json").read_text())["text_config"]
    head = copied("gemma4_assistant_a", tmp_path, text_config={**text, "sliding_window": 5})
    refused(head, "gemma4_assistant_a", "sliding_attention: window=5, but the target's is 8")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("centroid_intermediate_top_k", (True, 2.5, "4", 0, 10**400)),
        ("num_centroids", ("7", True, 0, NAN)),
        ("use_ordered_embeddings", ("x", 1, 0, [])),
        ("backbone_hidden_size", (True, "64", 0)),
        ("unheard_of", (1,)),
    ],
)
def test_an_assistant_s_own_values_are_checked(tmp_path: Path, key: str, values: tuple[Any, ...]) -> None:
    for number, value in enumerate(values):
        head = copied("gemma4_assistant_ordered_a", tmp_path / str(number), **{key: value})
        refused(head, "gemma4_assistant_ordered_a", f"{key}'?=")


@pytest.mark.parametrize(
    ("folder", "key", "value", "message"),
    [
        ("eagle3", "quantization_config", 7, "quantization_config=7: must be a dict"),
        ("eagle3", "quantization_config", {"quant_method": "awq"}, "quant_method='awq': not supported"),
        ("eagle3", "compression_config", {"ignore": []}, "'compression_config' is set"),
        ("eagle3", "norm_before_residuals", True, "unknown key.*did you mean 'norm_before_residual'"),
        ("eagle3", "tie_word_embeddings", -1, "tie_word_embeddings=-1: must be true or false"),
        ("eagle3", "target_hidden_size", [1], r"target_hidden_size=\[1\]: must be an integer"),
        ("eagle3", "dtype", "x", "dtype='x': must be one of"),
        ("eagle3", "architectures", 7, "architectures=7: must be a list of names"),
        ("eagle3", "speculators_config", 7, "speculators_config=7: must be an object"),
        ("eagle3", "speculators_config", {"verifier": 7}, "verifier=7: must be an object"),
        ("eagle3", "speculators_config", {"proposal_methods": [7]}, "proposal_methods=.*: must be a list"),
        ("eagle3", "speculators_config", {"warp": 1}, "speculators_config: unknown key 'warp'=1"),
        ("eagle3", "speculators_config", {"verifier": {"warp": 1}}, "verifier: unknown key 'warp'=1"),
        (
            "eagle3",
            "speculators_config",
            {"proposal_methods": [{"speculative_tokens": 2}, {"speculative_token": 2}]},
            r"proposal_methods\[1\]: unknown key 'speculative_token'=2: did you mean 'speculative_tokens'",
        ),
        ("dflash", "dflash_config", {"mask_token": 7}, "dflash_config: unknown key 'mask_token'=7"),
        ("eagle3", "transformer_layer_config", "x", "transformer_layer_config='x': must be an object"),
        ("zlab_dflash_a", "dflash_config", 7, "dflash_config=7: must be an object"),
        ("zlab_dflash_a", "dflash_config", {"causal": True}, "dflash_config: unknown key 'causal'=True"),
        ("safeailab_eagle3_a", "eagle_config", 7, "eagle_config=7: must be an object"),
    ],
)
def test_a_head_s_keys_are_understood_or_refused_by_name(
    tmp_path: Path, folder: str, key: str, value: Any, message: str
) -> None:
    refused(copied(folder, tmp_path, **{key: value}), folder, message)


def test_overrides_of_a_head_s_keys(tmp_path: Path) -> None:
    head = copied("eagle3", tmp_path, unheard_of=1, norm_output="x")
    refused(head, "eagle3", r"leave it out with hf_overrides=\{'unheard_of': None\}")
    llm = load(head, "eagle3", hf_overrides={"unheard_of": None, "norm_output": False})
    assert llm.draft([1, 2, 3], 2) == load(ORACLE / "eagle3", "eagle3").draft([1, 2, 3], 2)


def test_overrides_may_say_that_the_model_is_a_head(tmp_path: Path) -> None:
    verifier = {"verifier": {"name_or_path": str(ORACLE / "target_qwen3")}}
    head = copied("mtp", tmp_path, speculators_model_type=None, architectures=[], speculators_config=verifier)
    path = head / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in raw.items() if k != "speculators_model_type"}))
    with pytest.raises(ValueError, match="no 'model_type'"):
        LLM(str(head))
    overrides = {"speculators_model_type": "mtp"}
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    llm = LLM(
        str(head), speculative_config={"hf_overrides": overrides, "num_speculative_tokens": 2}, **settings
    )
    assert len(llm.draft([1, 2, 3], 2)) == 2
    with pytest.raises(
        ValueError, match="no 'model_type'"
    ):  # they are for the head that is named beside them
        LLM(str(head), speculative_config={"model": str(ORACLE / "mtp"), "hf_overrides": overrides})


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ({"method": "ngram"}, "method='ngram' has no checkpoint; leave it out"),
        ({"method": "mtp"}, "method='mtp' is in the target's files, whose hf_overrides hold; leave it out"),
        ({"method": "chain", "drafters": [{"method": "ngram"}]}, "no checkpoint; .*to those of its drafters"),
    ],
)
def test_overrides_for_a_drafter_without_a_config_are_refused(method: dict[str, Any], why: str) -> None:
    config = {**method, "hf_overrides": {"hidden_size": 8}}
    with pytest.raises(ValueError, match=f"speculative_config: hf_overrides=.*{why}"):
        LLM(str(ORACLE / "mtp_mimo_a"), dtype="float32", max_model_len=64, speculative_config=config)


def with_tensor(folder: str, to: Path, name: str, tensor: Any) -> Path:
    """A copy in which a tensor is another, or not there (None)."""
    head = copied(folder, to)
    path = head / "model.safetensors"
    tensors: dict[str, Any] = load_file(path)
    assert name in tensors
    tensors |= {name: tensor}
    save_file({k: t for k, t in tensors.items() if t is not None}, path)
    (head / "pytorch_model.bin").unlink(missing_ok=True)
    return head


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_a_head_s_tensor_of_another_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = load_file(ORACLE / "eagle3" / "model.safetensors")["fc.weight"]
    head = with_tensor("eagle3", tmp_path, "fc.weight", tensor.to(dtype))
    refused(head, "eagle3", f"'fc.weight' is stored as {str(dtype)[6:]}: must be one of float32")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float32])
def test_a_vocabulary_map_of_another_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = load_file(ORACLE / "eagle3" / "model.safetensors")["d2t"]
    head = with_tensor("eagle3", tmp_path, "d2t", tensor.to(dtype))
    refused(head, "eagle3", f"'d2t' is stored as {str(dtype)[6:]}: must be one of int64, int32")


def test_a_weight_without_dimensions_is_refused(tmp_path: Path) -> None:
    head = with_tensor("eagle3", tmp_path, "fc.weight", torch.tensor(1.0))
    refused(head, "eagle3", r"'fc.weight' has shape \[\]: must have 2 dimensions")


def test_tapped_layers_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    settings = {"target_layer_ids": [0, 1, 6]}
    head = copied("zlab_dflash_a", tmp_path / "zlab", dflash_config=settings)
    refused(head, "zlab_dflash_a", r"tapped layer id 6 of \[0, 1, 6\] is out of range: .* from -1 to 5")
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 8]}
    head = copied("safeailab_eagle3_a", tmp_path / "flat", eagle_config=ids)
    refused(head, "safeailab_eagle3_a", r"tapped layer id 8 of \[0, 1, 8\] is out of range")


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_damaged_pickle_is_told_as_such(tmp_path: Path, size: int) -> None:
    """Not as a config with a key that nobody knows, nor as a format that is not read."""
    head = copied("safeailab_eagle1_a", tmp_path, bias=True)
    path = head / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:size])
    refused(head, "safeailab_eagle1_a", "pytorch_model.bin: cannot be read as plain tensors: it is damaged")


def test_damaged_safetensors_are_told_as_such(tmp_path: Path) -> None:
    head = copied("safeailab_eagle1_a", tmp_path, bias=True)
    save_file(torch.load(head / "pytorch_model.bin", weights_only=True), head / "model.safetensors")
    path = head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    refused(head, "safeailab_eagle1_a", r"model.safetensors \(5000 bytes\): cannot be read")


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_what_a_pickle_would_run_is_named_without_advice_to_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = copied("safeailab_eagle1_a", tmp_path, architectures=["EagleLlamaForCausalLM"])
    torch.save({"fc.weight": Harmful()}, head / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"it holds (\w+\.)?print, which is never run") as error:
        detect.read(head)
    said = str(error.value)
    assert "weights_only" not in said and "\n" not in said and "\x1b" not in said
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (7, "entry 'fc.weight' is no tensor with a name but of type int"),
        (None, "entry 'fc.weight' is no tensor with a name but of type NoneType"),
        (torch.zeros(64, 128).to_sparse(), "'fc.weight' is stored sparse_coo: must be a plain dense tensor"),
        (torch.zeros(64, 128, device="meta"), "'fc.weight' is stored without data"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, entry: Any, message: str) -> None:
    head = copied("safeailab_eagle1_a", tmp_path)
    path = head / "pytorch_model.bin"
    tensors = torch.load(path, weights_only=True)
    torch.save({**tensors, "fc.weight": entry}, path)
    refused(head, "safeailab_eagle1_a", message)
    torch.save([1, 2], path)
    refused(head, "safeailab_eagle1_a", "holds no dict of tensors but a list")


def test_modules_in_the_target_are_named_as_the_files_name_them(tmp_path: Path) -> None:
    folder = "mtp_deepseek_v3_a"
    num_layers = json.loads((ORACLE / folder / "config.json").read_text())["num_hidden_layers"]
    name = f"model.layers.{num_layers}.eh_proj.weight"
    for number, (tensor, message) in enumerate([(torch.zeros(3, 4), "has shape"), (None, "is missing")]):
        target = with_tensor(folder, tmp_path / str(number), name, tensor)
        with pytest.raises(ValueError, match=f"{name}' {message}"):
            LLM(str(target), dtype="float32", max_model_len=64, speculative_config={"method": "mtp"})
