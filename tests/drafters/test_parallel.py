"""Drafting in one pass, in the engine: blocks are cut, end early, work in chains, and write to no other rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.drafters.base import Verified
from draftproof.drafters.head import HeadDrafter
from draftproof.engine.interface import RowPrice
from draftproof.models.config import read_config
from tests.conformance.cases import CASES
from tests.drafters.heads import ORACLE, Pair
from tests.helpers import Paged, load_decoder, run_rows
from tests.made.derived import dspark_from_dflash
from tests.made.shared import DFLASH, DRAFT, EAGLE3, pard, peagle, prompts
from tests.priced import Priced
from tests.slow import slow

BLOCKS = ["dflash", "dspark", "dflash2", "xpress"]
PARALLEL = [*BLOCKS, "peagle", "pard"]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def engine(config: dict[str, Any], k: int | None = 5, **settings: Any) -> LLM:
    speculative = {"num_speculative_tokens": k, "policy": "fixed", **config}
    return LLM(dtype="float32", speculative_config=speculative, **settings)


def text(llm: LLM, num: int = 60) -> list[int]:
    return (llm.tokenizer.encode(prompts()[0]) * 2)[:num]


@pytest.mark.parametrize("num_tokens", [2, 17, 50])
def test_masks_are_filled_by_one_causal_pass_of_the_model(num_tokens: int) -> None:
    """PARD: the engine's drafts are the plain model's output for the tokens followed by K - 1 masks."""
    llm = engine({"model": pard()}, max_num_batched_tokens=16)
    tokens = text(llm, num_tokens)
    decoder = load_decoder(Path(DRAFT), read_config(Path(DRAFT)))
    out = run_rows(decoder, Paged(decoder.kv), [(0, 0, [*tokens, 3, 3, 3, 3])])
    expected = decoder.logits(out.hidden_TH[-5:]).argmax(-1).tolist()
    assert llm.draft(tokens[:-1], 5, next_token=tokens[-1]) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize(
    ("folder", "target", "k"),
    [("zlab_dflash_a", "target_dflash_a", 3), ("zlab_dflash_a", "target_dflash_a", 1)],
)
@pytest.mark.parametrize("budget", [2048, 3])
def test_the_engine_drafts_what_the_original_drafts(folder: str, target: str, k: int, budget: int) -> None:
    """The whole block is always computed, even if fewer drafts are wanted."""
    pair = Pair(folder, target, num_drafts=3)
    llm = LLM(
        str(ORACLE / target),
        speculative_config={"model": str(ORACLE / folder), "num_speculative_tokens": k},
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=budget,
    )
    for anchor, drafts in zip(pair.io["anchors"].tolist(), pair.io["drafts"].tolist(), strict=True):
        assert llm.draft(pair.tokens[:anchor], k, next_token=pair.tokens[anchor]) == drafts[:k]


@slow
@pytest.mark.parametrize("method", PARALLEL)
def test_drafts_do_not_depend_on_how_passes_are_run(method: str) -> None:
    config = CASES[method].config
    engines = [engine(config, **s) for s in ({}, {"enforce_eager": True}, {"native": False})]
    for num in (20, 33, 20):
        tokens = text(engines[0], num)
        drafts = [llm.draft(tokens[:-1], 5, next_token=tokens[-1]) for llm in engines]
        assert drafts[0] and drafts[0] == drafts[1] == drafts[2]


@slow
@pytest.mark.parametrize("method", BLOCKS)
def test_a_block_longer_than_k_finds_pages_for_all_its_rows(method: str) -> None:
    """K = 1 and pages of 2 tokens: a block extends three pages past the drafts, also at the end of the table."""
    config = CASES[method].config
    wide, narrow = engine(config, 7), engine(config, 1, block_size=2, max_model_len=80, max_num_seqs=2)
    tokens = text(wide, 72)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 60)]
    plain = LLM(dtype="float32").generate([tokens, tokens[:20]], params, use_tqdm=False)
    outputs = narrow.generate(
        [tokens, tokens[:20]], params, use_tqdm=False
    )  # the first ends at the table's last row
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    for num in (31, 32, 60):
        context, newest = tokens[: num - 1], tokens[num - 1]
        assert narrow.draft(context, 1, next_token=newest) == wide.draft(context, 7, next_token=newest)[:1]


@slow
def test_confidence_ends_a_proposal_early(tmp_path: Path) -> None:
    head = str(dspark_from_dflash(Path(DFLASH), tmp_path, "gated"))
    counts = []
    for threshold in (0.0, 0.5, 1.0):
        llm = engine({"model": head, "confidence_threshold": threshold}, 7)
        outputs = llm.generate(prompts()[:3], GREEDY, use_tqdm=False)
        counts.append(llm.stats.speculation.drafted_per_position)
        if threshold == 0:
            texts = [o.outputs[0].token_ids for o in outputs]
        assert [o.outputs[0].token_ids for o in outputs] == texts
    assert min(counts[0]) > 0.6 * max(counts[0])  # all drafts are used except at a request's end
    assert counts[0][0] > counts[1][0] > counts[1][3] > 0 and sum(counts[2]) < 0.01 * sum(counts[0])


def test_a_proposal_ends_where_a_draft_is_worth_less_than_its_row(tmp_path: Path) -> None:
    """In the recorded program, too: the price is its input, so it is not recorded again."""
    head = str(dspark_from_dflash(Path(DFLASH), tmp_path, "gated"))
    llm = LLM(dtype="float32", speculative_config={"model": head})
    texts, counts = [], []
    # free; about a third of a token a row; more than a token a row; free
    for price in (RowPrice(), RowPrice(3e4, 1e5), RowPrice(1.1e5, 1e5), RowPrice()):
        llm.engine.policy = Priced(7, price)
        before = llm.stats.speculation.num_draft_tokens
        outputs = llm.generate(prompts()[:3], GREEDY, use_tqdm=False)
        texts.append([o.outputs[0].token_ids for o in outputs])
        counts.append(llm.stats.speculation.num_draft_tokens - before)
    assert texts == [texts[0]] * 4
    assert counts[0] == counts[3] > 2 * counts[1] > 0 == counts[2]


def test_a_block_without_bias_and_estimate_is_a_plain_block(tmp_path: Path) -> None:
    """Every part of the head may be switched off; without the estimate a threshold has no effect."""
    raw = json.loads((Path(DFLASH) / "config.json").read_text())
    raw |= {"speculators_model_type": "dspark", "markov_rank": 0, "enable_confidence_head": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(Path(DFLASH) / "model.safetensors")
    bare, block = engine({"model": str(tmp_path)}), engine({"model": DFLASH})
    tokens = text(block)
    assert bare.draft(tokens[:-1], 5, next_token=tokens[-1]) == block.draft(
        tokens[:-1], 5, next_token=tokens[-1]
    )
    with pytest.raises(ValueError, match="confidence_threshold: this head makes no such estimate"):
        engine({"model": str(tmp_path), "confidence_threshold": 0.5})


@pytest.mark.parametrize("value", [-0.1, 1.5, "high", True])
def test_a_threshold_that_is_no_probability_is_refused(tmp_path: Path, value: Any) -> None:
    head = str(dspark_from_dflash(Path(DFLASH), tmp_path))
    with pytest.raises(ValueError, match=f"confidence_threshold={value!r}: must be from 0 to 1"):
        engine({"model": head, "confidence_threshold": value})


@slow
def test_heads_of_a_chain_draft_as_they_do_alone() -> None:
    """Three parallel methods and a recurrent one share cache, table and taps; the block drafts 7 of the 9 wanted."""
    alone = {
        name: engine({"model": name}, k) for name, k in ((DFLASH, 7), (peagle(), 9), (EAGLE3, 9), (pard(), 9))
    }
    for first in alone:
        names = (first, *(n for n in alone if n != first))
        members = [{"model": name, "num_speculative_tokens": 7 if name == DFLASH else 9} for name in names]
        chain = engine({"method": "chain", "drafters": members}, 9)
        tokens = text(chain)
        for num in (20, 41):
            expected = alone[first].draft(
                tokens[: num - 1], 9 if first != DFLASH else 7, next_token=tokens[num - 1]
            )
            assert chain.draft(tokens[: num - 1], 9, next_token=tokens[num - 1]) == expected
        chain.generate(prompts()[:2], GREEDY, use_tqdm=False)
        assert chain.stats.speculation.num_accepted_tokens > 0 and chain.stats.num_drafter_faults == 0


@slow
@pytest.mark.parametrize("method", PARALLEL)
def test_a_request_without_live_rows_writes_nothing(method: str) -> None:
    """A finished request, whose slot the host has not released yet, beside a running one."""
    llm = engine(CASES[method].config)
    parts = llm.engine.runner
    assert parts.drafter is not None
    drafter = parts.drafter.drafter
    assert isinstance(drafter, HeadDrafter)
    seen: list[Verified] = []
    propose = drafter.propose
    drafter.propose = lambda v, k: (seen.append(v), propose(v, k))[1]  # type: ignore[method-assign]
    frontend = llm.requests
    requests = [frontend.add(llm.tokenizer.encode(p), GREEDY) for p in prompts()[:2]]
    while not seen or len(seen[-1].slots_R) < 2 or seen[-1].k_R.min() == 0:
        frontend.step()
    verified = seen[-1]
    before = [(kv.k.clone(), kv.v.clone()) for kv in parts.draft_cache.layers]
    expected = propose(verified, 5).tokens_RK[1].clone()
    dead = dataclasses.replace(
        verified, live_R=verified.live_R * torch.tensor([0, 1]), k_R=verified.k_R * torch.tensor([0, 1])
    )
    for kv, (k, v) in zip(parts.draft_cache.layers, before, strict=True):
        kv.k.copy_(k), kv.v.copy_(v)
        blocks = parts.state.block_table_SB[verified.slots_R[0]].unique().long()
        kv.k[blocks], kv.v[blocks] = 7.0, 7.0
    proposal = propose(dead, 5)
    assert torch.equal(proposal.tokens_RK[1], expected) and proposal.count_R[0] == 0
    for kv in parts.draft_cache.layers:
        own = blocks[blocks > 0]
        assert (kv.k[own] == 7).all() and (kv.v[own] == 7).all()
    for request in requests:
        frontend.close(request.request_id)


def test_more_drafts_than_a_block_has_are_refused() -> None:
    with pytest.raises(
        ValueError, match="num_speculative_tokens=8, but the draft head's block_size=8 allows 7"
    ):
        engine({"model": DFLASH}, 8)
    assert engine({"model": DFLASH}, None).num_speculative_tokens == 7
