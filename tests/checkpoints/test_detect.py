"""Draft checkpoints: recognised by what they hold, and refused with both values where they do not fit."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof import LLM, assets
from draftproof.checkpoints import detect
from tests.drafters.heads import ORACLE
from tests.made.derived import speculators_from_original

FOLDERS = {
    "safeailab_eagle1_a": "eagle",
    "safeailab_eagle3_a": "eagle3",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "target_llama": "draft_model",
    "target_qwen3": "draft_model",
}
TARGETS = {"safeailab_eagle1_a": "target_eagle_a", "eagle3": "target_llama", "mtp": "target_qwen3"}


def copied(folder: str, to: Path, without: tuple[str, ...] = (), **keys: Any) -> Path:
    """A copy with other keys in its config."""
    to = to / "head"
    shutil.copytree(ORACLE / folder, to)
    (to / "oracle_io.safetensors").unlink(missing_ok=True)
    path = to / "config.json"
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k not in without}
    for key, value in keys.items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            value = {**raw[key], **value}
        raw[key] = value
    path.write_text(json.dumps(raw))
    return to


def load(head: Path, folder: str) -> LLM:
    config = {"model": str(head), "num_speculative_tokens": 2}
    return LLM(str(ORACLE / TARGETS[folder]), dtype="float32", max_model_len=64, speculative_config=config)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_checkpoint_is_known_by_its_content(tmp_path: Path, folder: str) -> None:
    head = copied(folder, tmp_path)
    misnamed = head.rename(tmp_path / "dflash-eagle3-mtp")
    assert detect.read(misnamed).method == FOLDERS[folder]
    assert detect.is_draft_head(misnamed) == (FOLDERS[folder] != "draft_model")


@pytest.mark.parametrize(
    ("folder", "without", "architecture"),
    [
        ("eagle3", "speculators_model_type", "Eagle3DraftModel"),
        ("eagle3", "speculators_model_type", "Eagle3Speculator"),
        ("mtp", "speculators_model_type", "MTPDraftModel"),
        ("safeailab_eagle3_a", "draft_vocab_size", "LlamaForCausalLMEagle3"),
        ("safeailab_eagle1_a", "model_type", "EagleLlamaForCausalLM"),
    ],
)
def test_a_checkpoint_is_known_by_its_architectures_name_alone(
    tmp_path: Path, folder: str, without: str, architecture: str
) -> None:
    head = copied(folder, tmp_path, (without,), architectures=[architecture])
    for file in head.glob("*.safetensors"):  # its tensors say nothing
        save_file({"d2t": torch.zeros(1)}, file)
    for file in head.glob("*.bin"):
        torch.save({"d2t": torch.zeros(1)}, file)
    assert detect.read(head).method == FOLDERS[folder]


def test_a_head_given_as_the_model_finds_its_target() -> None:
    llm = LLM(str(ORACLE / "mtp"), dtype="float32", max_model_len=64)
    assert llm.draft([1, 2, 3], 3)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ValueError, match="no draft checkpoint that is known"):
        detect.read(tmp_path)


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_a_pickle_that_holds_code_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = copied("safeailab_eagle1_a", tmp_path, architectures=["EagleLlamaForCausalLM"])
    torch.save({"fc.weight": Harmful()}, head / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as plain tensors"):
        detect.read(head)
    (head / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(), protocol=2))
    with pytest.raises(ValueError, match="cannot be read as plain tensors"):
        detect.read(head)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("folder", "keys", "message"),
    [
        ("safeailab_eagle1_a", {"vocab_size": 300}, "vocab_size=300, but the target's is 256"),
        ("safeailab_eagle1_a", {"hidden_size": 128}, "hidden_size=128, but the target's is 64"),
        ("safeailab_eagle1_a", {"bias": False}, "tensors have no place in this model, such as fc.bias"),
        ("safeailab_eagle1_a", {"qkv_bias": True}, "self_attn.q_proj.bias' is missing"),
        ("safeailab_eagle1_a", {"num_hidden_layers": 2}, "layers.1.*is missing"),
        ("safeailab_eagle1_a", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("mtp", {"transformer_layer_config": {"vocab_size": 300}}, "vocab_size=300, but the target's is 256"),
        (
            "mtp",
            {"transformer_layer_config": {"hidden_size": 128}},
            "hidden_size=128, but the target's is 64",
        ),
        (
            "mtp",
            {"transformer_layer_config": {"num_hidden_layers": 3, "layer_types": None}},
            "num_hidden_layers=3 of the model.*the target has 2",
        ),
        ("mtp", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2: only 1"),
        ("mtp", {"speculators_model_type": "mlp"}, "speculators_model_type='mlp': not supported"),
        ("eagle3", {"transformer_layer_config": {"vocab_size": 300}}, "vocab_size=300, but the target's is"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"id 3 of \[0, 1, 3\].*num_layers=2"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1]}, "reads 192 features.*are 128"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, "names no tapped layers.*2 layers"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    tmp_path: Path, folder: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(copied(folder, tmp_path, **keys), folder)


def test_a_head_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(Path(__file__).parent.parent / "data" / "tiny-mtp", head)
    tokenizer = json.loads((assets.path("tiny") / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = [token for token, i in ids.items() if i in (300, 301)]
    ids[first], ids[second] = ids[second], ids[first]
    (head / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"its tokenizer differs.*has id 301 there and 300"):
        LLM(speculative_config={"model": str(head)})


def test_tensors_of_the_verifier_in_a_file_are_passed_over(tmp_path: Path) -> None:
    """Files made by the format's converter hold some that are no numbers at all."""
    head = copied("mtp", tmp_path)
    tensors = load_file(head / "model.safetensors")
    tensors["verifier_lm_head.weight"] = torch.full((256, 64), float("nan"))
    save_file(tensors, head / "model.safetensors")
    plain, other = (load(folder, "mtp").draft([1, 2, 3], 2) for folder in (ORACLE / "mtp", head))
    assert plain == other


def test_both_forms_of_a_head_draft_alike(tmp_path: Path) -> None:
    source = ORACLE / "safeailab_eagle1_a"
    other = speculators_from_original(source, tmp_path / "head")
    drafts = [load(folder, "safeailab_eagle1_a").draft([5, 6, 7, 8], 2) for folder in (source, other)]
    assert drafts[0] == drafts[1]
