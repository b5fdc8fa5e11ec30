"""Values of the wrong type in draft checkpoints: refused with file, key, value and what it must be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from draftproof.checkpoints import detect
from draftproof.drafters.tapped import TappedSettings
from tests.checkpoints.test_detect import copied
from tests.made.shared import pard

FLAGS = [
    ("eagle3", "norm_before_residual"),
    ("eagle3", "norm_before_fc"),
    ("eagle3", "fc_norm"),
    ("eagle3", "norm_output"),
    ("safeailab_eagle1_a", "bias"),
    ("safeailab_eagle1_a", "qkv_bias"),
    ("safeailab_eagle3_a", "norm_before_fc"),
    ("safeailab_eagle3_a", "norm_before_residual"),
    ("dflash", "sample_from_anchor"),
    ("dflash", "sliding_window_non_causal"),
    ("dspark", "enable_confidence_head"),
    ("dspark", "confidence_head_with_markov"),
]
NUMBERS = [
    ("eagle3", "draft_vocab_size", 1 << 20),
    ("safeailab_eagle3_a", "draft_vocab_size", 0),
    ("mtp", "num_nextn_predict_layers", 0),
    ("peagle", "mask_token_id", -1),
    ("dflash", "block_size", 65),
    ("dflash", "mask_token_id", -1),
    ("zlab_dflash_a", "block_size", 1),
    ("dspark", "markov_rank", -1),
    ("dflash2", "conv_kernel_size", 0),
    ("dflash2", "conv_group_size", 0),
    ("dflash2", "selector_rank", 0),
    ("dflash2", "selector_top_k", 0),
    ("xpress_a", "xpress_rank", 0),
    ("xpress_a", "xpress_mlp_ratio", 0),
    ("xpress_a", "num_jacobi_passes", -3),
    ("xpress_a", "num_jacobi_passes", 10_000),
]
LISTS = [
    ("eagle3", "eagle_aux_hidden_state_layer_ids"),
    ("peagle", "eagle_aux_hidden_state_layer_ids"),
    ("dflash", "aux_hidden_state_layer_ids"),
]


def refused(head: Path, key: str, value: Any, must: str) -> None:
    start = rf"{re.escape(str(head / 'config.json'))}: (.*: )?"
    with pytest.raises(ValueError, match=rf"{start}{key}={re.escape(repr(value))}: must be {must}"):
        detect.read(head)


@pytest.mark.parametrize("value", ["false", "no", 0, []])
@pytest.mark.parametrize(("folder", "key"), FLAGS)
def test_a_flag_that_is_neither_true_nor_false_is_refused(
    tmp_path: Path, folder: str, key: str, value: Any
) -> None:
    refused(copied(folder, tmp_path, **{key: value}), key, value, "true or false")


@pytest.mark.parametrize(("folder", "key", "outside"), NUMBERS)
def test_a_number_that_is_not_whole_or_out_of_range_is_refused(
    tmp_path: Path, folder: str, key: str, outside: int
) -> None:
    for number, value in enumerate(("x", True, 2.5, [1], outside)):
        refused(copied(folder, tmp_path / str(number), **{key: value}), key, value, "an integer")


@pytest.mark.parametrize("value", [["a"], "ab", [True, 2, 3], [1.5], [-1, 2, 3], [], 3])
@pytest.mark.parametrize(("folder", "key"), LISTS)
def test_layers_that_are_no_list_of_numbers_are_refused(
    tmp_path: Path, folder: str, key: str, value: Any
) -> None:
    refused(copied(folder, tmp_path, **{key: value}), key, value, "a list of layer numbers")


def test_nested_values_are_checked_as_well(tmp_path: Path) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("mask_token_id", True, "an integer of at least 0"),
        ("mask_token_id", "x", "an integer of at least 0"),
        ("target_layer_ids", [0, "1"], "a list of layer numbers of at least -1"),
    ]
    for number, (key, value, must) in enumerate(wrong):
        head = copied("zlab_dflash_a", tmp_path / str(number), dflash_config={key: value})
        refused(head, key, value, must)


@pytest.mark.parametrize("value", ["x", True, -1])
def test_a_mask_token_of_a_language_model_is_checked(tmp_path: Path, value: Any) -> None:
    head = copied(pard(), tmp_path, pard_token=value)  # an absolute path stays one
    refused(head, "pard_token", value, "an integer of at least 0")


def test_null_means_what_a_missing_key_means(tmp_path: Path) -> None:
    keys = ("norm_before_residual", "norm_before_fc", "draft_vocab_size")
    null = detect.read(copied("eagle3_2layer", tmp_path / "null", **dict.fromkeys(keys)))
    missing = detect.read(copied("eagle3_2layer", tmp_path / "missing", keys))
    assert null.settings == missing.settings


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("keys", "taps"),
    [
        ({}, None),
        ({"modal_type": "LLM", "max_window_layers": 36, "use_sliding_window": False}, None),
        ({IDS: [2, 3, 5]}, (2, 3, 5)),
        ({"eagle_config": {IDS: [1, 2, 4], "use_aux_hidden_state": True}}, (2, 3, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ()),
        ({"eagle_config": {IDS: [0, 1, 2]}, IDS: [2, 3, 5]}, (2, 3, 5)),
    ],
)
def test_a_flat_head_may_name_the_layers_it_reads(tmp_path: Path, keys: dict[str, Any], taps: Any) -> None:
    """At the top an id is the state that enters the layer, in `eagle_config` the one that leaves it."""
    settings = detect.read(copied("safeailab_eagle3_a", tmp_path, **keys)).settings
    assert isinstance(settings, TappedSettings) and settings.taps == taps


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        (
            {"use_last_layernorm": False},
            "eagle_config: use_last_layernorm=False: not supported, only True",
        ),
        ({"use_aux_hidden_state": "no"}, "eagle_config: use_aux_hidden_state='no': must be true or false"),
        ({IDS: [1, "2"]}, "eagle_config: eagle_aux_hidden_state_layer_ids=.*must be a list"),
        ({"use_last_layrnorm": True}, "eagle_config: unknown key.*did you mean 'use_last_layernorm'"),
    ],
)
def test_what_a_flat_head_says_of_itself_is_understood_or_refused(
    tmp_path: Path, nested: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detect.read(copied("safeailab_eagle3_a", tmp_path, eagle_config=nested))
