"""Checkpoints of heads that draft in one pass: recognised by what they hold, and refused with both values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof import LLM
from draftproof.checkpoints import detect
from draftproof.drafters.block import BlockSettings
from tests.checkpoints.test_detect import copied
from tests.drafters.heads import ORACLE
from tests.made.shared import DRAFT, pard

METHODS = {
    "peagle": "peagle",
    "dflash": "dflash",
    "zlab_dflash_a": "dflash",
    "dspark": "dspark",
    "dspark_gated_a": "dspark",
    "dflash2": "dflash2",
    "xpress_a": "xpress",
}
TARGETS = {
    "peagle": "target_llama",
    "xpress_a": "target_spec_qwen3_a",
    "zlab_dflash_a": "target_dflash_a",
    "dspark_gated_a": "target_spec_qwen3_a",
}


def load(head: Path, folder: str, **config: Any) -> LLM:
    target = ORACLE / TARGETS.get(folder, "target_qwen3")
    speculative = {"model": str(head), "num_speculative_tokens": 2, **config}
    return LLM(str(target), dtype="float32", max_model_len=64, speculative_config=speculative)


@pytest.mark.parametrize("folder", METHODS)
def test_a_checkpoint_is_known_by_its_content(tmp_path: Path, folder: str) -> None:
    misnamed = copied(folder, tmp_path).rename(tmp_path / "eagle3-mtp-suffix")
    assert detect.read(misnamed).method == METHODS[folder]
    assert detect.is_draft_head(misnamed)


@pytest.mark.parametrize("folder", METHODS)
@pytest.mark.parametrize("ending", ["DraftModel", "Speculator"])
def test_a_checkpoint_is_known_by_its_architectures_name_alone(
    tmp_path: Path, folder: str, ending: str
) -> None:
    """One name stands for two formats, whose configs differ in their shape."""
    if folder == "zlab_dflash_a" and ending == "Speculator":
        pytest.skip("only the other format was ever called that")
    raw = json.loads((ORACLE / folder / "config.json").read_text())
    (name,) = raw["architectures"]
    given = name.replace("DraftModel", ending)
    head = copied(folder, tmp_path, ("speculators_model_type",), architectures=[given])
    expected, found = detect.read(ORACLE / folder), detect.read(head)
    assert (found.method, found.settings) == (expected.method, expected.settings)


def test_a_language_model_is_known_to_fill_masks_by_its_mask_token() -> None:
    assert detect.read(Path(pard())).method == "pard"
    assert detect.read(Path(DRAFT)).method == "draft_model"
    assert not detect.is_draft_head(Path(pard()))


def test_a_head_without_a_number_of_drafts_fills_its_block() -> None:
    config = {"model": str(ORACLE / "zlab_dflash_a")}
    llm = LLM(str(ORACLE / "target_dflash_a"), max_model_len=64, speculative_config=config)
    assert llm.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("nested", "flat", "expected"),
    [
        ({"mask_token_id": 7}, {"mask_token_id": 8}, 7),
        ({}, {"mask_token_id": 8, "pard_token": 9}, 8),
        ({}, {"dspark_noise_token_id": 9, "pard_token": 10}, 9),
        ({}, {"pard_token": 0, "ptd_token_id": 11}, 0),
        ({}, {"ptd_token_id": 11}, 11),
    ],
)
def test_the_first_mask_token_that_is_there_counts(
    tmp_path: Path, nested: dict[str, int], flat: dict[str, int], expected: int
) -> None:
    head = copied("dflash", tmp_path, ("mask_token_id",), dflash_config=nested, **flat)
    settings = detect.read(head).settings
    assert isinstance(settings, BlockSettings) and settings.mask_token == expected


def test_ids_of_the_flat_format_count_from_outputs() -> None:
    settings = detect.read(ORACLE / "zlab_dflash_a").settings
    assert isinstance(settings, BlockSettings) and settings.taps == (1, 3, 5)


LAYERS = "transformer_layer_config"


@pytest.mark.parametrize(
    ("folder", "keys", "message"),
    [
        ("peagle", {"mask_token_id": None}, "mask_token_id is missing"),
        ("peagle", {"mask_token_id": 256}, "mask_token_id=256, but the target's vocab_size=256"),
        ("peagle", {LAYERS: {"vocab_size": 300}}, "vocab_size=300, but the target's is 256"),
        ("peagle", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"id 3 of \[0, 1, 3\].*num_layers=2"),
        ("dflash", {"mask_token_id": None}, "mask_token_id is missing"),
        ("dflash", {"mask_token_id": -1}, "mask_token_id=-1: must be an integer of at least 0"),
        ("dflash", {LAYERS: {"vocab_size": 300}}, "vocab_size=300, but the target's is 256"),
        ("dflash", {LAYERS: {"hidden_size": 128}}, "hidden_size=128, but the target's is 64"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None"),
        ("dflash", {"aux_hidden_state_layer_ids": [0, 1, 3]}, r"id 3 of \[0, 1, 3\].*num_layers=2"),
        (
            "dflash",
            {"aux_hidden_state_layer_ids": [1, 2]},
            "reads 192 features, but 2 tapped layers.*are 128",
        ),
        ("dflash", {"block_size": 1}, "block_size=1: must be an integer from 2 to 64"),
        ("dflash", {"block_size": 2}, "num_speculative_tokens=2, but the draft head's block_size=2 allows 1"),
        ("zlab_dflash_a", {"block_size": None}, "block_size is missing: add it, an integer from 2 to 64"),
        (
            "zlab_dflash_a",
            {"dflash_config": {"target_layer_ids": [0, 2, 5]}},
            "5 means the state after the final",
        ),
        ("zlab_dflash_a", {"dflash_config": {"target_layer_ids": [0, 2, 6]}}, "id 6 of .*num_layers=6"),
        (
            "zlab_dflash_a",
            {"dflash_config": {"target_layer_ids": []}},
            r"target_layer_ids=\[\]: must be a list",
        ),
        ("zlab_dflash_a", {"dflash_config": {"mask_token_id": 256}}, "mask_token_id=256, but the target's"),
        ("dspark", {"markov_head_type": "lstm"}, "markov_head_type='lstm': must be"),
        ("dspark", {"markov_rank": 16}, r"markov_w1.weight' has shape \[256, 8\].*\[256, 16\]"),
        ("dspark", {"block_size": "four"}, "block_size='four': must be an integer"),
        ("dflash2", {"draft_vocab_size": 96}, "draft_vocab_size=96, but vocab_size=256"),
        ("dflash2", {"conv_group_size": 24}, "conv_group_size=24 does not divide hidden_size=64"),
        ("dflash2", {"selector_top_k": 300}, "selector_top_k=300: must be an integer from 1 to 256"),
        ("xpress_a", {"xpress_rank": 7}, "refiner_head.token_embed.weight' has shape"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(
    tmp_path: Path, folder: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(copied(folder, tmp_path, **keys), folder)


def test_an_embedding_that_must_be_the_heads_own_is_not_replaced(tmp_path: Path) -> None:
    head = copied("peagle", tmp_path)
    tensors = load_file(head / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is missing.*an embedding of its own"):
        load(head, "peagle")


@pytest.mark.parametrize("folder", ["dflash", "dflash2", "peagle"])
def test_a_tensor_that_finds_no_place_is_refused(tmp_path: Path, folder: str) -> None:
    head = copied(folder, tmp_path)
    tensors = load_file(head / "model.safetensors") | {"layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ValueError, match="have no place in this model, such as layers"):
        load(head, folder)
