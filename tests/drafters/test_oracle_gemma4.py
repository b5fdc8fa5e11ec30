"""Gemma 4's assistant against its reference implementation: logits, drafts, feedback, the target's keys and values.

The reference drafts after a fresh prefill, for prefixes of several lengths; here all of them are one batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof import LLM, SamplingParams
from draftproof.attention.base import PagedAttention, Rows
from draftproof.drafters.base import DraftRuntime, Proposal, Verified
from draftproof.runtime import native
from draftproof.runtime.graphs import EAGER
from draftproof.runtime.native import Library
from tests.drafters.heads import ORACLE, Pair, close
from tests.exact import Double, Exact, doubled, settle
from tests.helpers import Paged, run_rows
from tests.slow import slow

TARGET = "target_gemma4_a"
FOLDERS = ["gemma4_assistant_a", "gemma4_assistant_ordered_a"]
K = 4


class Greedy:
    """A greedy draw that records its logits."""

    inputs: tuple[Tensor, ...] = ()

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def over(self, inputs: tuple[Tensor, ...]) -> Greedy:
        return self

    def __call__(self, logits_MV: Tensor, rows: object, positions: object, ids: object = None) -> Tensor:
        self.seen.append(logits_MV)
        return logits_MV.argmax(-1)


def prefixes(pair: Pair) -> list[int]:
    return pair.io["prefix_lens"].tolist()


def after_prefill(pair: Pair, paged: Paged, num_stray: int = 2) -> Verified:
    """A prefill of every prefix in its own slot, followed by `num_stray` rows of rejected drafts."""
    lengths = prefixes(pair)
    rows = [[*pair.tokens[:P], *range(7, 7 + num_stray)] for P in lengths]
    counts = torch.tensor([0, *map(len, rows)])
    out = run_rows(pair.target, paged, [(slot, 0, row) for slot, row in enumerate(rows)], (), True)
    return Verified(
        tokens_T=torch.tensor([t for row in rows for t in row]),
        positions_T=torch.cat([torch.arange(len(row)) for row in rows]),
        query_start_loc_R1=counts.cumsum(0),
        slots_R=torch.arange(len(rows)),
        live_R=torch.tensor(lengths),
        next_R=torch.tensor([pair.tokens[P] for P in lengths]),
        k_R=torch.full((len(rows),), K),
        taps=out.taps,
        draw=Greedy(),
        history=lambda _: torch.zeros(0),
    )


def bound(folder: str, **settings: Any) -> tuple[Pair, Paged]:
    """`settings`: of the `Pair`."""
    pair = Pair(folder, TARGET, num_drafts=K, **settings)
    paged = pair.paged(pair.target.kv, num_slots=len(prefixes(pair)), block_size=8)
    lent = dataclasses.replace(paged.cache, layers=[]).beside(paged.cache, pair.head.spec.borrow)
    pair.drafter.bind(DraftRuntime(ops=pair.ops, backend=paged.backend, cache=lent, graphs=EAGER))
    return pair, paged


def proposed(folder: str, **settings: Any) -> tuple[Pair, Proposal, Tensor]:
    """(pair, drafts of all prefixes, their logits [R, K, V])."""
    pair, paged = bound(folder, **settings)
    verified = after_prefill(pair, paged)
    before = [layer.k.clone() for layer in paged.cache.layers]
    proposal = pair.drafter.propose(verified, K)
    assert all(torch.equal(a, b.k) for a, b in zip(before, paged.cache.layers, strict=True)), (
        "nothing is written"
    )
    assert isinstance(verified.draw, Greedy)
    return pair, proposal, torch.stack(verified.draw.seen, 1)


def target_states(pair: Pair) -> list[Tensor]:
    """[states before the final norm, after it, logits] of the whole text."""
    out = run_rows(pair.target, pair.paged(pair.target.kv), [(0, 0, pair.tokens)], (6,), True)
    return [*out.taps, pair.target.logits(out.hidden_TH)]


@pytest.fixture(scope="module")
def exact_target() -> list[Exact]:
    def run(seed: int | None) -> list[Tensor]:
        with Double():
            return target_states(Pair(FOLDERS[0], TARGET, double=lambda folder: doubled(folder, seed)))

    return settle(run)


@pytest.fixture(scope="module")
def exact_drafts() -> dict[str, Exact]:
    """Logits [R, K, V] of both assistants."""

    def run(seed: int | None) -> list[Tensor]:
        with Double():
            return [proposed(folder, double=lambda f: doubled(f, seed))[2] for folder in FOLDERS]

    return dict(zip(FOLDERS, settle(run), strict=True))


@pytest.fixture(params=["torch", "compiled"])
def operators(request: pytest.FixtureRequest) -> Library | None:
    library = native.load() if request.param == "compiled" else None
    if library is None and request.param == "compiled":
        pytest.skip("no C++ compiler here")
    return library


def test_the_target_gives_the_reference_logits(exact_target: list[Exact]) -> None:
    """In fp64; the reference's own rounding is 1.5e-4, since scores inside this model's attention are large."""
    io = Pair(FOLDERS[0], TARGET).io
    for exact, name in zip(
        exact_target, ("last_prenorm_raw", "last_postnorm_raw", "target_logits"), strict=True
    ):
        close(exact.value, io[name].double(), 2e-4)


def test_the_target_is_as_near_to_fp64_as_fp32_can_be(
    exact_target: list[Exact], operators: Library | None
) -> None:
    found = target_states(Pair(FOLDERS[0], TARGET, library=operators))
    for exact, ours in zip(exact_target, found, strict=True):
        exact.check(ours)


def test_borrowed_keys_and_values_are_the_reference_ones() -> None:
    pair, paged = bound(FOLDERS[0])
    after_prefill(pair, paged)
    slot = prefixes(pair).index(25)
    assert pair.head.spec.borrow == (3, 2) and pair.head.spec.kv == ()
    blocks = paged.cache.block_table_SB[slot].long()
    for kind, index in (("sliding", 3), ("full", 2)):
        layer = paged.cache.layers[index]
        for name, cache in (("k", layer.k), ("v", layer.v)):
            stored = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :25]
            close(stored, pair.io[f"p25_shared_{name}_{kind}_attention"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_requests_of_all_lengths_at_once_draft_what_the_reference_drafts_one_by_one(
    folder: str, exact_drafts: dict[str, Exact], operators: Library | None
) -> None:
    """In fp64, within the reference's own rounding (5e-5); and in fp32, as near to fp64 as that can be."""
    pair, proposal, logits_RKV = proposed(folder, library=operators)
    assert proposal.count_R.tolist() == [K] * len(prefixes(pair))
    exact_drafts[folder].check(logits_RKV)
    for request, P in enumerate(prefixes(pair)):
        assert proposal.tokens_RK[request].tolist() == pair.io[f"p{P}_drafts"].tolist()
        close(exact_drafts[folder].value[request], pair.io[f"p{P}_logits"].double())


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("mistake", ["position", "window", "state", "stale row"])
def test_the_reference_tells_a_mistake(folder: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, paged = bound(folder)
    verified = after_prefill(pair, paged)
    call = PagedAttention.query

    def wrong(self: PagedAttention, layer: int, q: Tensor, spec: object) -> Tensor:
        rows = self.rows
        if mistake == "position":
            rows = Rows(rows.positions_T - 1, rows.slots_T, rows.context_lens_T)
        elif mistake == "stale row":
            rows = Rows(rows.positions_T, rows.slots_T, rows.context_lens_T + 1)
        elif mistake == "window" and spec.window:  # type: ignore[attr-defined]
            spec = dataclasses.replace(spec, window=spec.window - 1)  # type: ignore[type-var, attr-defined]
        return call(PagedAttention(self.ops, self.backend, self.cache, rows), layer, q, spec)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedAttention, "query", wrong)
    if mistake == "state":
        verified = dataclasses.replace(verified, taps=(verified.taps[0].roll(1, 0),))
    pair.drafter.propose(verified, K)
    assert isinstance(verified.draw, Greedy)
    request = prefixes(pair).index(20)
    found = torch.stack([step[request] for step in verified.draw.seen])
    assert (found - pair.io["p20_logits"]).abs().max() > 0.1
    if mistake == "position":  # another engine's convention, for which the reference has numbers, too
        close(found[0], pair.io["p20_posm1_logits"][0])


def test_requests_that_want_less_leave_the_others_alone() -> None:
    """A padding request, one in the middle of its prompt, and one that wants two drafts, among those that want four."""
    pair, paged = bound(FOLDERS[0])
    verified = after_prefill(pair, paged)
    k_R, live_R = verified.k_R.clone(), verified.live_R.clone()
    k_R[0], k_R[2], live_R[4] = 0, 2, 0
    proposal = pair.drafter.propose(dataclasses.replace(verified, k_R=k_R, live_R=live_R), K)
    assert proposal.count_R.tolist()[:4] == [0, 4, 2, 4]
    for request in (1, 2, 3, 5):
        P, count = prefixes(pair)[request], int(k_R[request])
        assert proposal.tokens_RK[request, :count].tolist() == pair.io[f"p{P}_drafts"].tolist()[:count]
    assert pair.drafter.propose(verified, 0).tokens_RK.shape == (len(k_R), 0)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("budget", [2048, 3])
def test_the_engine_drafts_what_the_reference_drafts(folder: str, budget: int) -> None:
    pair = Pair(folder, TARGET, num_drafts=K)
    llm = LLM(
        str(ORACLE / TARGET),
        speculative_config={"model": str(ORACLE / folder), "num_speculative_tokens": K},
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=budget,
    )
    for P in prefixes(pair):
        drafts = llm.draft(pair.tokens[:P], K, next_token=pair.tokens[P])
        assert drafts == pair.io[f"p{P}_drafts"].tolist()


@slow
@pytest.mark.parametrize("native", [True, False])
def test_many_requests_of_different_lengths_give_plain_decodings_output(native: bool) -> None:
    """Long chats beside short ones, prefixes shared, more requests than slots, drafts accepted and rejected."""
    pair = Pair(FOLDERS[0], TARGET)
    prompts = [pair.tokens[: 1 + 5 * i % 29] + pair.tokens[: 3 * i] * 2 for i in range(14)]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True, logprobs=1) for t in (0, 0.5)
    ] * 7
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 6, "native": native}
    config = {"model": str(ORACLE / FOLDERS[0]), "num_speculative_tokens": 3, "policy": "fixed"}
    plain = LLM(str(ORACLE / TARGET), **settings).generate(prompts, params, use_tqdm=False)
    llm = LLM(str(ORACLE / TARGET), **settings, block_size=4, speculative_config=config)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert [o.outputs[0].logprobs for o in outputs] == [o.outputs[0].logprobs for o in plain]
    assert llm.stats.speculation.num_draft_tokens > 100 and llm.stats.num_drafter_faults == 0
