"""Logits and drafts of EAGLE heads in their authors' format against those of the authors' code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftproof import LLM
from draftproof.checkpoints import detect
from tests.drafters.heads import ORACLE, Pair, close
from tests.made.derived import speculators_from_original

HEADS = {"safeailab_eagle1_a": "last_postnorm_raw", "safeailab_eagle3_a": "aux_hidden_raw"}
PREFIXES = [1, 5, 9, 16]


def first_pass(pair: Pair, prefix: int, features: Tensor, shift: int = 1) -> tuple[Tensor, Tensor]:
    """The head over the prefix: hidden and feedback of its rows."""
    tokens = pair.tokens[shift : prefix + shift]
    paged = pair.memory()
    hidden, feedback = pair.run(paged, tokens, features[:prefix], list(range(prefix)), [0] * prefix)
    assert feedback is not None
    return hidden, feedback


def features_of(pair: Pair) -> Tensor:
    features = pair.head.features(pair.taps())
    assert features is not None
    return features


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("folder", HEADS)
def test_every_step_gives_the_reference_logits_and_feedback(folder: str, prefix: int) -> None:
    pair = Pair(folder, "target_eagle_a")
    x, io = pair.tokens, pair.io
    close(torch.cat(pair.taps(), -1), io[HEADS[folder]], 1e-5)
    paged, rows = pair.memory(), list(range(prefix))
    hidden, feedback = pair.run(paged, x[1 : prefix + 1], features_of(pair)[:prefix], rows, [0] * prefix)
    close(pair.head.logits(hidden), io[f"p{prefix}_first_logits"])
    assert feedback is not None
    close(feedback, io[f"p{prefix}_first_hidden"])
    for step in range(2):
        hidden, feedback = pair.run(paged, [x[prefix + 1 + step]], feedback[-1:], [prefix + step], [0])
        assert feedback is not None
        close(pair.head.logits(hidden)[0], io[f"p{prefix}_step_logits"][step])
        close(feedback[0], io[f"p{prefix}_step_hidden"][step])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("budget", [2048, 3])
@pytest.mark.parametrize("folder", HEADS)
def test_the_engine_drafts_what_the_original_drafts(folder: str, prefix: int, budget: int) -> None:
    pair = Pair(folder, "target_eagle_a")
    llm = LLM(
        str(ORACLE / "target_eagle_a"),
        speculative_config={"model": str(ORACLE / folder), "num_speculative_tokens": 5},
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=budget,
    )
    drafts = llm.draft(pair.tokens[:prefix], 5, next_token=pair.tokens[prefix])
    assert drafts == pair.io[f"p{prefix}_chain_drafts"].tolist()


@pytest.mark.parametrize("mistake", ["token not shifted", "tap before the norm", "no bias"])
def test_the_reference_tells_a_mistake(mistake: str) -> None:
    """Each mistake changes the logits by more than the tolerance, so the tests above detect it."""
    pair = Pair("safeailab_eagle1_a", "target_eagle_a")
    features, shift = features_of(pair), 1
    if mistake == "token not shifted":
        shift = 0
    elif mistake == "tap before the norm":
        features = pair.io["last_prenorm_raw"]
    else:
        linear = pair.head.network._fc  # type: ignore[attr-defined]
        bias_H = torch.load(ORACLE / "safeailab_eagle1_a" / "pytorch_model.bin", weights_only=True)["fc.bias"]
        pair.head.network._fc = lambda x: linear(x) - bias_H  # type: ignore[attr-defined]
    hidden, _ = first_pass(pair, 9, features, shift)
    assert (pair.head.logits(hidden) - pair.io["p9_first_logits"]).abs().max() > 0.1


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_speculators_form_of_a_head_gives_the_same_logits(tmp_path: Path, prefix: int) -> None:
    source = ORACLE / "safeailab_eagle1_a"
    pair = Pair(str(speculators_from_original(source, tmp_path / "head")), "target_eagle_a", source)
    hidden, _ = first_pass(pair, prefix, features_of(pair))
    close(pair.head.logits(hidden), pair.io[f"p{prefix}_first_logits"])


def test_a_pickle_is_read_as_plain_tensors(tmp_path: Path) -> None:
    """A .bin file gives the same tensors as safetensors; EAGLE-1's above is its authors' file."""
    source = ORACLE / "safeailab_eagle3_a"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    pickled, safe = detect.read(tmp_path).weights, detect.read(source).weights
    for name in ("fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"):
        assert torch.equal(pickled.get(name), safe.get(name))
