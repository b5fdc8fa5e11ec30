"""Heads stored in fp8 by compressed-tensors: the numbers they stand for, the drafts of these, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof import LLM
from draftproof.checkpoints import compressed, detect
from draftproof.models.weights import Weights
from draftproof.schema import read_json
from tests.drafters.heads import ORACLE, Pair
from tests.made.derived import compressed_fp8, flat_from_speculators

HEADS = {
    "eagle3": "target_llama",
    "safeailab_eagle3_a": "target_eagle_a",
    "dflash": "target_qwen3",
    "zlab_dflash_a": "target_dflash_a",
    "mtp": "target_qwen3",
    "gemma4_assistant_a": "target_gemma4_a",
}
STRATEGIES = ["tensor", "channel", "block"]
FP8 = torch.float8_e4m3fn


def dequantized(head: Path, folder: Path) -> Path:
    """A copy of the head with its weights written out, by the definition of each strategy."""
    shutil.copytree(head, folder)
    raw, stored = read_json(head / "config.json"), load_file(head / "model.safetensors")
    weights = raw.pop("quantization_config")["config_groups"]["group_0"]["weights"]
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale"):
            continue
        tensors[name] = tensor
        if tensor.dtype == FP8:
            plain, scale = tensor.float(), stored[f"{name}_scale"].float()
            high, wide = weights["block_structure"] or (
                (1, plain.shape[1]) if scale.numel() > 1 else plain.shape
            )
            for i in range(0, plain.shape[0], high):
                for j in range(0, plain.shape[1], wide):
                    plain[i : i + high, j : j + wide] *= scale.view(-(-plain.shape[0] // high), -1)[
                        i // high, j // wide
                    ]
            tensors[name] = plain
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def drafts(head: Path, folder: str) -> list[list[int]]:
    llm = LLM(
        str(ORACLE / HEADS[folder]),
        speculative_config={"model": str(head), "num_speculative_tokens": 3},
        dtype="float32",
        max_model_len=64,
    )
    return [llm.draft([5, 9, 13, token], 3) for token in range(20, 32)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compressed_head_is_the_head_of_the_numbers_it_stands_for(tmp_path: Path, strategy: str) -> None:
    head = compressed_fp8(ORACLE / "eagle3", tmp_path / "fp8", strategy)
    plain = dequantized(head, tmp_path / "plain")
    ours, theirs, before = (detect.read(folder).weights for folder in (head, plain, ORACLE / "eagle3"))
    assert isinstance(ours, Weights) and isinstance(theirs, Weights) and isinstance(before, Weights)
    changed = 0
    for name in theirs.names():
        assert torch.equal(ours.read(name), theirs.read(name))
        changed += not torch.equal(ours.read(name), before.read(name))
    assert changed >= 8, "the head is another after rounding"
    pairs = [Pair(str(folder), "target_llama", ORACLE / "eagle3") for folder in (head, plain)]
    rows = []
    for pair in pairs:
        features = pair.head.features(pair.taps())
        assert features is not None
        hidden, _ = pair.run(pair.memory(), pair.tokens[1:13], features[:12], list(range(12)), [0] * 12)
        rows.append(pair.head.logits(hidden))
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("folder", HEADS)
def test_every_format_may_be_compressed(tmp_path: Path, folder: str) -> None:
    head = compressed_fp8(ORACLE / folder, tmp_path / "fp8", "channel")
    assert detect.is_draft_head(head)
    found = drafts(head, folder)
    assert found == drafts(dequantized(head, tmp_path / "plain"), folder)
    assert len({tuple(d) for d in found}) > 3


def test_a_scheme_may_be_in_the_part_that_describes_the_layers(tmp_path: Path) -> None:
    head = compressed_fp8(ORACLE / "eagle3", tmp_path / "fp8", "channel")
    expected = drafts(head, "eagle3")
    raw = read_json(head / "config.json")
    raw["transformer_layer_config"]["quantization_config"] = raw.pop("quantization_config")
    (head / "config.json").write_text(json.dumps(raw))
    assert drafts(head, "eagle3") == expected


def test_a_block_may_be_larger_than_its_matrix(tmp_path: Path) -> None:
    """Its scales are spread over the matrix alone: over 10^12 rows, no memory would do."""
    head = compressed_fp8(ORACLE / "eagle3", tmp_path / "fp8", "block", (10**12, 40))
    assert drafts(head, "eagle3") == drafts(dequantized(head, tmp_path / "plain"), "eagle3")


def test_scales_of_static_activations_are_not_needed(tmp_path: Path) -> None:
    head = compressed_fp8(ORACLE / "eagle3", tmp_path / "fp8", "tensor")
    expected = drafts(head, "eagle3")
    change(head, {"fc.input_scale": torch.tensor(0.1)})
    assert drafts(head, "eagle3") == expected


def change(head: Path, tensors: dict[str, Tensor | None]) -> None:
    stored = {**load_file(head / "model.safetensors"), **tensors}
    save_file({name: t for name, t in stored.items() if t is not None}, head / "model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight_scale": None}, "'fc.weight_scale' is missing"),
        (
            {"fc.weight_scale": torch.ones(7)},
            r"fc.weight_scale has shape \[7\]: must have 1, \[64, 1\] for a weight",
        ),
        (
            {"fc.weight_scale": torch.full((64, 1), float("nan"))},
            "fc.weight_scale holds a number that is no scale",
        ),
        ({"fc.weight_scale": torch.full((64, 1), -1.0)}, "fc.weight_scale holds a number that is no scale"),
        ({"fc.weight_scale": torch.ones(64, 1).int()}, "'fc.weight_scale' is stored as int32"),
        ({"norm.weight_scale": torch.ones(1)}, "1 tensors have no place.*norm.weight_scale"),
        ({"fc.weight_zero_point": torch.ones(64, 1)}, "1 tensors have no place.*fc.weight_zero_point"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    head = compressed_fp8(ORACLE / "eagle3", tmp_path / "fp8", "channel")
    change(head, tensors)
    with pytest.raises(ValueError, match=message):
        Pair(str(head), "target_llama", ORACLE / "eagle3")


def test_a_part_that_is_repeated_is_refused_before_it_is_written_out(tmp_path: Path) -> None:
    """A pickle of a few bytes may stand for a matrix of any size."""
    flat = flat_from_speculators(ORACLE / "peagle", tmp_path / "flat", {"pard_token": 255})
    head = compressed_fp8(flat, tmp_path / "fp8", "channel")
    tensors = load_file(head / "model.safetensors")
    rows, columns = tensors["fc.weight"].shape
    tensors["fc.weight"] = tensors["fc.weight"][:1].clone().expand(rows, columns)
    (head / "model.safetensors").unlink()
    torch.save(tensors, head / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"tensor 'fc\.weight' is stored as a repeated part"):
        Pair(str(head), "target_llama", ORACLE / "peagle")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"quant_method": "modelopt"},
            "quant_method='modelopt': not supported; supported: compressed-tensors",
        ),
        ({"quant_method": "fp8"}, "quant_method='fp8': not supported"),
        ({"format": "pack-quantized"}, "format='pack-quantized': not supported"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme=.*not supported"),
        ({"transform_config": {"a": 1}}, "transform_config=.*not supported"),
        ({"config_groups": {}}, "config_groups={}: must be a dict of at least one"),
        ({"config_groups": [1]}, r"config_groups=\[1\]: must be a dict"),
        ({"warp": 1}, "quantization_config: unknown key 'warp'=1"),
        ({"group": {"warp": 1}}, "group_0: unknown key 'warp'=1"),
        ({"weights": {"warp": 1}}, "group_0: weights: unknown key 'warp'=1"),
        ({"weights": {"num_bits": 4}}, "group_0: weights: num_bits=4: not supported, only 8"),
        ({"weights": {"type": "int"}}, "weights: type='int': not supported, only 'float'"),
        ({"weights": {"symmetric": False}}, "weights: symmetric=False: not supported"),
        ({"weights": {"strategy": "group"}}, "strategy='group': not supported, only tensor, channel, block"),
        (
            {"weights": {"strategy": "block", "block_structure": [128]}},
            r"block_structure=\[128\]: must be two",
        ),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    head = compressed_fp8(ORACLE / "eagle3", tmp_path / "fp8", "channel")
    raw = read_json(head / "config.json")
    scheme = raw["quantization_config"]
    scheme["config_groups"]["group_0"]["weights"] |= edit.pop("weights", {})
    scheme["config_groups"]["group_0"] |= edit.pop("group", {})
    scheme |= edit
    (head / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"config.json: (?=quantization_config: ).*{message}"):
        detect.read(head)


def test_a_language_model_in_fp8_is_still_refused(tmp_path: Path) -> None:
    head = compressed_fp8(ORACLE / "target_llama", tmp_path / "fp8", "channel")
    with pytest.raises(
        ValueError, match="'quantization_config' is set: quantised checkpoints are not supported"
    ):
        detect.read(head)


def test_the_numbers_of_each_strategy() -> None:
    weight = torch.tensor([[2.0, -4.0, 0.5], [1.0, 448.0, -3.5]])
    scales = {
        (): torch.tensor(0.5),
        (1,): torch.tensor([0.5]),
        (2, 1): torch.tensor([[0.5], [2.0]]),
        (1, 2): torch.tensor([[0.5, 3.0]]),
    }
    expected = {
        (): weight * 0.5,
        (1,): weight * 0.5,
        (2, 1): torch.tensor([[1.0, -2.0, 0.25], [2.0, 896.0, -7.0]]),
        (1, 2): torch.tensor([[1.0, -2.0, 1.5], [0.5, 224.0, -10.5]]),
    }
    for shape, scale in scales.items():
        stored = Weights.of({"a.weight": weight.to(FP8), "a.weight_scale": scale}, "here")
        found = compressed.dequantized(stored, compressed.Scheme((2, 2))).get("a.weight", (2, 3))
        assert found.dtype == torch.float32 and torch.equal(found, expected[shape])
