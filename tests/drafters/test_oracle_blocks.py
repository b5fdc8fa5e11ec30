"""Logits of the block methods' heads against the reference implementations' own.

Shapes: R anchors, B block size, N = R * B draft rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.drafters.dflash2 import SelectorDecode
from draftproof.drafters.dspark import MarkovDecode
from draftproof.drafters.parallel import Block, Parallel
from draftproof.drafters.xpress import JacobiDecode
from draftproof.kernels import ops
from draftproof.schema import read_json
from tests.drafters.forced import block_states
from tests.drafters.heads import ORACLE, Pair, close

SPECULATORS = {
    "dflash": "target_qwen3",
    "dspark": "target_qwen3",
    "dspark_gated_a": "target_spec_qwen3_a",
    "dflash2": "target_qwen3",
    "xpress_a": "target_spec_qwen3_a",
}


@pytest.mark.parametrize(("folder", "target"), SPECULATORS.items())
def test_a_speculators_block_gives_the_reference_states_and_logits(folder: str, target: str) -> None:
    pair = Pair(folder, target, num_drafts=3)
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)
    assert pair.io["anchor_valid"].all()
    hidden_NH = block_states(pair, pair.io["anchors"].tolist())
    close(hidden_NH, pair.io["hidden"][0])
    close(pair.head.logits(hidden_NH), pair.io["backbone_logits"][0])


def test_an_original_block_gives_the_reference_logits() -> None:
    pair = Pair("zlab_dflash_a", "target_dflash_a", num_drafts=3)
    close(torch.cat(pair.taps(), -1), pair.io["aux_hidden_raw"], 1e-5)
    hidden_NH = block_states(pair, pair.io["anchors"].tolist())
    close(hidden_NH, pair.io["hidden"].flatten(0, 1))
    close(pair.head.logits(hidden_NH), pair.io["logits"].flatten(0, 1))


def reference_block(pair: Pair) -> tuple[object, Block, list[int]]:
    """(the pair's block decoding, the result of the reference's pass, its anchors)."""
    unroll, anchors, x = pair.drafter.unroll, pair.io["anchors"], torch.tensor(pair.tokens)
    assert isinstance(unroll, Parallel)
    first = unroll._first
    hidden_JRH, logits_JRV = (slots(pair, pair.io[name][0]) for name in ("hidden", "backbone_logits"))
    block = Block(
        hidden_JRH, logits_JRV[first:], first, x[anchors], x[anchors - 1], pair.head.ids_V, ops.TORCH.gather
    )
    return unroll._decode, block, anchors.tolist()


def slots(pair: Pair, x_NX: Tensor) -> Tensor:
    """Rows of the reference's blocks, ordered by position in the block: [J, R, X]."""
    return x_NX.view(len(pair.io["anchors"]), -1, *x_NX.shape[1:]).transpose(0, 1).contiguous()


@pytest.mark.parametrize("folder", ["dspark", "dspark_gated_a"])
def test_biased_logits_and_confidence_equal_the_reference(folder: str) -> None:
    """The reference was given the true tokens; here a draw returns them."""
    pair = Pair(folder, SPECULATORS[folder], num_drafts=3, options={"confidence_threshold": 0.5})
    decode, block, anchors = reference_block(pair)
    assert isinstance(decode, MarkovDecode) and block.first == 0
    truth_KR = torch.tensor([[pair.tokens[a + k + 1] for a in anchors] for k in range(len(block.hidden_JRH))])
    logits: list[Tensor] = []

    def draw(k: int, logits_RV: Tensor) -> Tensor:
        logits.append(logits_RV)
        return truth_KR[k]

    tokens, count_R = decode(block, draw)
    assert torch.equal(torch.stack(tokens), truth_KR)
    close(torch.stack(logits), slots(pair, pair.io["final_logits"][0]))
    confidence_KR = slots(pair, pair.io["confidence_logits"][0]).sigmoid()
    before_KR = torch.cat((block.anchor_R[None], truth_KR[:-1]))
    for k, hidden_RH in enumerate(block.hidden_JRH):
        before_RE = block.gather(decode._before_VE, before_KR[k])
        close(decode.confidence(hidden_RH, before_RE), confidence_KR[k])
    expected_R = (confidence_KR >= 0.5).long().cumprod(0).sum(0)
    assert count_R is not None and torch.equal(count_R, expected_R)
    assert 0 < expected_R.sum() < expected_R.numel() * len(tokens)


def test_candidates_get_the_reference_scores() -> None:
    pair = Pair("dflash2", SPECULATORS["dflash2"], num_drafts=3)
    decode, block, anchors = reference_block(pair)
    assert isinstance(decode, SelectorDecode) and block.first == 1
    ids_JRC, expected_JRC = (slots(pair, pair.io[f"candidate_{name}"][0]) for name in ("ids", "logits"))
    before_JR = torch.tensor([[pair.tokens[a + max(j - 1, 0)] for a in anchors] for j in range(len(ids_JRC))])
    for j in range(1, len(ids_JRC)):
        scores = decode.scores(block.logits_KRV[j - 1], block.hidden_JRH[j], before_JR[j], ids_JRC[j])
        close(scores, expected_JRC[j])


def test_the_selector_picks_the_best_candidate_after_the_token_drafted_before() -> None:
    pair = Pair("dflash2", SPECULATORS["dflash2"], num_drafts=3)
    decode, block, _ = reference_block(pair)
    assert isinstance(decode, SelectorDecode)
    tokens, _ = decode(block, lambda k, logits_RV: logits_RV.argmax(-1))
    before_R, changed = block.anchor_R, 0
    for k, tokens_R in enumerate(tokens):
        logits_RV, hidden_RH = block.logits_KRV[k], block.hidden_JRH[k + 1]
        ids_RC = logits_RV.topk(4).indices
        best_R1 = decode.scores(logits_RV, hidden_RH, before_R, ids_RC).argmax(-1, keepdim=True)
        assert torch.equal(tokens_R, ids_RC.gather(1, best_R1)[:, 0])
        changed += int((tokens_R != ids_RC[:, 0]).sum())
        before_R = tokens_R
    assert changed > 0


def test_every_round_gives_the_reference_logits() -> None:
    pair = Pair("xpress_a", SPECULATORS["xpress_a"], num_drafts=4)
    decode, block, anchors = reference_block(pair)
    assert isinstance(decode, JacobiDecode) and block.first == 1
    drawn: list[Tensor] = []

    def draw(k: int, logits_RV: Tensor) -> Tensor:
        drawn.append(logits_RV)
        return logits_RV.argmax(-1)

    tokens, _ = decode(block, draw)
    rounds = torch.stack(drawn).unflatten(0, (-1, len(tokens)))
    assert len(rounds) == 1 + 6
    for ours_KRV, theirs in zip(rounds[1:], pair.io["round_logits"], strict=False):
        close(ours_KRV, slots(pair, theirs)[1:])
    before_JR = torch.tensor(
        [[pair.tokens[a + j - 1] for a in anchors] for j in range(len(block.hidden_JRH))]
    )
    bias_JRV = decode.bias(decode.cache(block.hidden_JRH), before_JR, block)
    close(block.logits_KRV + bias_JRV[1:], slots(pair, pair.io["final_logits"][0])[1:])


def test_a_recurrent_bias_equals_the_reference(tmp_path: Path) -> None:
    """No trained head of this kind exists: the reference's class with its own weights, in another head's files."""
    made = load_file(ORACLE / "markov_rnn" / "oracle_io.safetensors")
    tensors = load_file(ORACLE / "dspark_gated_a" / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not n.startswith("markov_head.")}
    tensors |= {n: t for n, t in made.items() if n.startswith("markov_head.")}
    save_file(tensors, tmp_path / "model.safetensors")
    raw = read_json(ORACLE / "dspark_gated_a" / "config.json") | {"markov_head_type": "rnn"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    pair = Pair(str(tmp_path), "target_spec_qwen3_a", reference=ORACLE / "dspark_gated_a")
    unroll, hidden_JRH = pair.drafter.unroll, made["hidden"].transpose(0, 1).contiguous()
    assert isinstance(unroll, Parallel) and isinstance(unroll._decode, MarkovDecode)
    before_JR = made["prev_token_ids"].t()
    logits: list[Tensor] = []

    def draw(k: int, logits_RV: Tensor) -> Tensor:
        logits.append(logits_RV)
        return before_JR[k + 1] if k + 1 < len(before_JR) else before_JR[0]

    nothing = torch.zeros(len(hidden_JRH), len(before_JR[0]), 320)
    unroll._decode(Block(hidden_JRH, nothing, 0, before_JR[0], before_JR[0], None, ops.TORCH.gather), draw)
    close(torch.stack(logits, 1), made["bias"])
