"""Logits of EAGLE-3 heads against the reference implementations' own, for every form of checkpoint."""

from __future__ import annotations

import pytest
import torch

from draftproof import LLM
from tests.drafters.heads import ORACLE, Pair, close

SPECULATORS = [
    ("eagle3", "target_llama"),
    ("eagle3_2layer", "target_llama"),
    ("eagle3_fcnorm_a", "target_spec_qwen3_a"),
]


@pytest.mark.parametrize(("folder", "target"), SPECULATORS)
def test_taps_equal_the_reference(folder: str, target: str) -> None:
    pair = Pair(folder, target)
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)


@pytest.mark.parametrize(("folder", "target"), SPECULATORS)
def test_speculators_head_gives_the_reference_logits_at_every_step(folder: str, target: str) -> None:
    """Slot i holds rows 0..i from target states, then rows from fed-back states with the true tokens."""
    pair = Pair(folder, target)
    x, expected = pair.tokens, pair.io["logits_ttt"]
    num_rows = len(x) - 1
    features = pair.head.features(pair.taps())
    assert features is not None
    paged = pair.memory(num_rows)
    rows = [(i, j) for i in range(num_rows) for j in range(i + 1)]
    hidden, feedback = pair.run(
        paged,
        [x[j + 1] for _, j in rows],
        features[[j for _, j in rows]],
        [j for _, j in rows],
        [i for i, _ in rows],
    )
    last = [n for n, (i, j) in enumerate(rows) if i == j]
    hidden, feedback = hidden[last], feedback[last] if feedback is not None else None
    for step in range(len(expected)):
        live = list(range(num_rows - step))
        assert feedback is not None
        if step:
            tokens = [x[i + 1 + step] for i in live]
            hidden, feedback = pair.run(paged, tokens, feedback[live], [i + step for i in live], live)
        close(pair.head.logits(hidden), expected[step, live])


@pytest.mark.parametrize("prefix", [1, 5, 9, 16])
def test_original_head_gives_the_reference_logits(prefix: int) -> None:
    pair = Pair("safeailab_eagle3_a", "target_eagle_a")
    x, io = pair.tokens, pair.io
    close(torch.cat(pair.taps(), -1), io["aux_hidden_raw"], 1e-5)
    features = pair.head.features(pair.taps())
    assert features is not None
    paged, rows = pair.memory(), list(range(prefix))
    hidden, feedback = pair.run(paged, x[1 : prefix + 1], features[:prefix], rows, [0] * prefix)
    close(pair.head.logits(hidden), io[f"p{prefix}_first_logits"])
    assert feedback is not None
    close(feedback, io[f"p{prefix}_first_hidden"])
    for step in range(2):
        hidden, feedback = pair.run(paged, [x[prefix + 1 + step]], feedback[-1:], [prefix + step], [0])
        assert feedback is not None
        close(pair.head.logits(hidden)[0], io[f"p{prefix}_step_logits"][step])
        close(feedback[0], io[f"p{prefix}_step_hidden"][step])


@pytest.mark.parametrize("prefix", [1, 5, 9, 16])
@pytest.mark.parametrize("budget", [2048, 3])
def test_the_engine_drafts_what_the_original_drafts(prefix: int, budget: int) -> None:
    pair = Pair("safeailab_eagle3_a", "target_eagle_a")
    llm = LLM(
        str(ORACLE / "target_eagle_a"),
        speculative_config={"model": str(ORACLE / "safeailab_eagle3_a"), "num_speculative_tokens": 5},
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=budget,
    )
    drafts = llm.draft(pair.tokens[:prefix], 5, next_token=pair.tokens[prefix])
    assert drafts == pair.io[f"p{prefix}_chain_drafts"].tolist()


def test_a_pickle_is_read_as_plain_tensors(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The .bin file of the original gives the same tensors as its safetensors copy."""
    from draftproof.checkpoints import detect

    source = ORACLE / "safeailab_eagle3_a"
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    pickled, safe = detect.read(tmp_path).weights, detect.read(source).weights
    for name in ("fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"):
        assert torch.equal(pickled.get(name), safe.get(name))
