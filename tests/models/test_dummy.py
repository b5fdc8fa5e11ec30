"""load_format="dummy": random weights of any config, for target and drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from draftproof.checkpoints import detect
from draftproof.drafters.recordings import save
from draftproof.models.config import read_config
from draftproof.models.weights import RandomWeights

SHAPES = Path(__file__).parents[2] / "bench" / "shapes"
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
HEAD: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 120,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    "transformer_layer_config": {**MODEL, "num_hidden_layers": 1},
    "speculators_config": {"verifier": {"name_or_path": "target"}},
}
FLAT = {k: v for k, v in MODEL.items() if k != "model_type"} | {
    "num_hidden_layers": 1,
    "draft_vocab_size": 500,
}
PROMPTS: list[Any] = [[1, 2, 3, i] for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with folders that contain only a config.json."""
    root = tmp_path_factory.mktemp("shapes")
    draft = {**MODEL, "num_hidden_layers": 1, "tie_word_embeddings": True}
    for name, config in {"target": MODEL, "head": HEAD, "flat": FLAT, "draft": draft}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


def dummy(folder: Path, model: str = "target", **settings: Any) -> LLM:
    return LLM(str(folder / model), load_format="dummy", dtype="float32", max_model_len=128, **settings)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return dummy(folder).generate(PROMPTS, PARAMS, use_tqdm=False)


def test_a_config_alone_generates_and_the_same_every_time(folder: Path, plain: Any) -> None:
    assert not compare(plain, dummy(folder, seed=5).generate(PROMPTS, PARAMS, use_tqdm=False))


def test_the_text_is_neither_one_token_nor_the_same_for_every_prompt(
    folder: Path, plain: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "tie_word_embeddings": True}))
    tied = dummy(tmp_path, ".").generate(PROMPTS, PARAMS, use_tqdm=False)
    for outputs in (plain, tied):
        texts = [tuple(o.outputs[0].token_ids) for o in outputs]
        assert len(set(texts)) == 4 and all(len(text) == 24 and len(set(text)) > 12 for text in texts)
        scores = [entry[t].logprob for o in outputs for t, entry in _scored(o.outputs[0])]
        assert len(scores) == 96 and all(-10 < score < -0.001 for score in scores)


def test_without_it_the_files_are_missed(folder: Path) -> None:
    with pytest.raises(ValueError, match="safetensors files: none"):
        LLM(str(folder / "target"))
    with pytest.raises(ValueError, match="load_format='dumy': did you mean 'dummy'"):
        LLM(str(folder / "target"), load_format="dumy")


def _scored(choice: Any) -> Any:
    return zip(choice.token_ids, choice.logprobs, strict=True)


@pytest.mark.parametrize("drafter", ["head", "flat", "draft"])
def test_a_drafter_is_a_config_too(folder: Path, plain: Any, drafter: str) -> None:
    config = {"model": str(folder / drafter), "policy": "fixed", "num_speculative_tokens": 3}
    llm = dummy(folder, speculative_config=config)
    assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert llm.stats.num_drafter_faults == 0
    assert llm.stats.speculation.num_draft_tokens > 100


def test_a_head_given_as_the_model_finds_its_target(folder: Path, plain: Any) -> None:
    llm = dummy(folder, "head")
    assert llm.num_speculative_tokens == 5
    assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_a_random_head_measures_speed_at_any_acceptance(folder: Path, plain: Any, tmp_path: Path) -> None:
    path = tmp_path / "plain.json"
    save(path, plain)
    inner = {"model": str(folder / "head"), "num_speculative_tokens": 3}
    config = {"method": "replay", "recordings": str(path), "drafters": [inner], "policy": "fixed"}
    llm = dummy(folder, speculative_config=config)
    assert llm.num_speculative_tokens == 3
    assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert llm.stats.speculation.accepted_per_position == llm.stats.speculation.drafted_per_position
    assert llm.stats.speculation.acceptance_length > 3.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_are_made_in_the_wanted_dtype(dtype: torch.dtype) -> None:
    weights = RandomWeights(0, "cpu", dtype)
    for name, scale, middle in (
        ("a.weight", 1 / 8, 0),
        ("embed_tokens.weight", 1 / 8, 0),
        ("b.bias", 0.1, 0),
    ):
        tensor = weights.get(name, (16384,) if name == "b.bias" else (256, 64))
        assert tensor.dtype == dtype
        assert float(tensor.float().std()) == pytest.approx(scale, rel=0.1)
        assert float(tensor.float().mean()) == pytest.approx(middle, abs=0.05 * scale)
    assert float(weights.get("norm.weight", (4096,)).float().mean()) == pytest.approx(1, abs=0.01)
    assert weights.get("d2t", (7,)).tolist() == [0] * 7


@pytest.mark.parametrize(
    ("name", "taps", "parameters"), [("llama-3.1-8b", (2, 16, 29), 8.03e9), ("qwen3-8b", (2, 18, 33), 8.19e9)]
)
def test_the_shapes_of_the_benchmarks_are_the_published_ones(
    name: str, taps: tuple[int, ...], parameters: float
) -> None:
    c = read_config(SHAPES / name)
    mixer: Any = c.layers[0].mixer
    ffn: Any = c.layers[0].ffn
    attention = (2 * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim * c.hidden_size
    layer = attention + 3 * c.hidden_size * ffn.width
    assert c.num_layers * layer + 2 * c.vocab_size * c.hidden_size == pytest.approx(parameters, rel=2e-3)
    head = detect.read(SHAPES / f"{name}-eagle3", RandomWeights())
    settings: Any = head.settings
    assert (settings.taps, settings.draft_vocab_size) == (taps, 32000)
    assert detect.target_of(head) == str(SHAPES / name)
    assert settings.layers.vocab_size == c.vocab_size and settings.layers.hidden_size == c.hidden_size
