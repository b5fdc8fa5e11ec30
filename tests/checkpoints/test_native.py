"""Modules in their target's files: found without a path, and refused at start where something is not right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftproof import LLM, SamplingParams, assets
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.modules import ModulesDrafter
from tests.drafters.heads import ORACLE

TWO, MIMO = ORACLE / "mtp_deepseek_v3_2layer_a", ORACLE / "mtp_mimo_a"
PROMPT = {"prompt_token_ids": [34, 54, 92, 36, 56, 5, 76]}


def engine(model: Path, **settings: Any) -> LLM:
    config = {"method": "mtp", **settings.pop("speculative_config", {})}
    return LLM(str(model), dtype="float32", max_model_len=64, speculative_config=config, **settings)


def drafter_of(llm: LLM) -> Any:
    sandbox = llm.engine.runner.drafter
    assert sandbox is not None
    return sandbox.drafter


def changed(source: Path, folder: Path, drop: str = "", **config: Any) -> Path:
    """A copy with other settings, and without the tensors whose names begin with `drop`."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not (drop and name.startswith(drop))}
    save_file(kept, folder / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))
    return folder


def test_as_many_drafts_as_there_are_modules_unless_told_otherwise() -> None:
    assert engine(TWO).num_speculative_tokens == 2
    assert engine(MIMO).num_speculative_tokens == 5
    one = engine(TWO, speculative_config={"num_speculative_tokens": 1})
    assert isinstance(drafter_of(one), HeadDrafter), "the second module is not needed"
    assert isinstance(drafter_of(engine(TWO)), ModulesDrafter)


def test_the_target_s_own_path_as_model_means_the_same() -> None:
    llm = engine(MIMO, speculative_config={"model": str(MIMO)})
    assert isinstance(drafter_of(llm), HeadDrafter)


def test_modules_take_part_in_a_chain_that_asks_for_more_than_they_have() -> None:
    members = [{"method": "mtp"}, {"method": "ngram"}]
    settings = {"method": "chain", "drafters": members, "num_speculative_tokens": 4, "policy": "fixed"}
    llm = engine(TWO, speculative_config=settings)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    plain = LLM(str(TWO), dtype="float32", max_model_len=64)
    outputs, expected = (x.generate([PROMPT], params, use_tqdm=False)[0].outputs[0] for x in (llm, plain))
    assert outputs.token_ids == expected.token_ids
    assert llm.stats.num_drafter_faults == 0 and llm.stats.speculation.num_draft_tokens > 20
    assert llm.engine.runner.spec.reads_ahead == 2


def test_random_weights_stand_in_for_the_files() -> None:
    llm = engine(TWO, load_format="dummy", speculative_config={"num_speculative_tokens": 2})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    assert len(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids) == 12
    assert llm.stats.speculation.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("source", "drop", "config", "message"),
    [
        (TWO, "model.layers.4.", {}, "num_nextn_predict_layers=2, but the files hold 1"),
        (TWO, "", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1, but the files hold 2"),
        (MIMO, "model.mtp_layers.", {}, "num_nextn_predict_layers=1, but the files hold 0"),
        (TWO, "", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0, so the model has no"),
        (MIMO, "", {"num_nextn_predict_layers": None}, "num_nextn_predict_layers=None, so the model has no"),
        (MIMO, "model.mtp_layers.0.input_proj", {}, "'model.mtp_layers.0.input_proj.weight' is missing"),
    ],
)
def test_modules_that_are_not_there_are_refused_with_both_numbers(
    tmp_path: Path, source: Path, drop: str, config: dict[str, Any], message: str
) -> None:
    folder = changed(source, tmp_path / "model", drop, **config)
    with pytest.raises(ValueError, match=message):
        engine(folder)


def test_more_drafts_than_modules_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens=3.*num_nextn_predict_layers=2 allows 2"):
        engine(TWO, speculative_config={"num_speculative_tokens": 3})


def test_a_target_of_a_family_without_modules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model_type='qwen3'.*known of deepseek_v3, glm4_moe, mimo"):
        engine(assets.path("tiny"))


def test_a_tensor_of_a_module_that_has_no_place_is_refused(tmp_path: Path) -> None:
    folder = changed(MIMO, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.mtp_layers.0.self_attn.o_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"1 tensors have no place.*model.mtp_layers.0.self_attn.o_proj.bias"
    ):
        engine(folder)


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_token'"):
        engine(MIMO, speculative_config={"num_speculative_token": 2})
