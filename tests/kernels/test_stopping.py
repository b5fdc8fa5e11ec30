"""When a drafter that makes one draft after the other stops: worked examples, each version against the other, and in an
engine."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.bench import internals
from draftproof.cli.prompts import read_file
from draftproof.drafters.head import HeadDrafter, Recurrent
from draftproof.engine.interface import RowPrice
from draftproof.engine.policy import FixedPolicy
from draftproof.kernels.stopping import Stopping
from draftproof.kernels.stopping.compiled import StoppingCompiled
from draftproof.kernels.stopping.record import (
    ENDS,
    EXPECTED,
    MEMORY,
    MOST_KEPT,
    PRIOR_WEIGHT,
    StopRecord,
    bin_of,
)
from draftproof.kernels.stopping.reference import stopping_torch
from draftproof.runtime import native
from draftproof.runtime.graphs import Recorded
from tests.priced import Priced

LIBRARY = native.load()
VERSIONS = [pytest.param(stopping_torch, id="torch")]
VERSIONS += [] if LIBRARY is None else [pytest.param(StoppingCompiled(LIBRARY), id="compiled")]
NUM_SLOTS, LENGTH, WIDTH = 4, 60, 50


def logits(*confidences: float) -> torch.Tensor:
    """Rows in which the likeliest of 50 tokens has so much probability, and the others share the rest."""
    rows = torch.empty((len(confidences), WIDTH))
    for row, confidence in zip(rows, confidences, strict=True):
        row[:] = math.log((1.0 - confidence) / (WIDTH - 1))
        row[7] = math.log(confidence)
    return rows + 3.0


class Drafting:
    """Slots with known texts, and one operator with its record."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping
        self.record = StopRecord.empty(NUM_SLOTS)
        self.tokens_SL = torch.zeros((NUM_SLOTS, LENGTH), dtype=torch.int32)
        self.length_S = torch.zeros(NUM_SLOTS, dtype=torch.int64)

    def know(self, slot: int, tokens: list[int]) -> None:
        """Append tokens to a slot's text."""
        start = int(self.length_S[slot])
        self.tokens_SL[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.length_S[slot] += len(tokens)

    def step(
        self,
        step: int,
        slots: list[int],
        confidences: list[float],
        drawn: list[int],
        k: list[int],
        price: Any,
    ) -> None:
        self._stopping(
            step,
            logits(*confidences),
            torch.tensor(drawn),
            torch.tensor(slots),
            torch.tensor(k),
            self.tokens_SL,
            self.length_S,
            torch.tensor(price),
            self.record,
            self.count_R,
        )

    def propose(
        self, slots: list[int], confidences_KR: list[list[float]], k: list[int], price: Any
    ) -> tuple[list[int], int]:
        """(number of drafts of each, drafts that were made). Draft j is token j + 1."""
        self.count_R = torch.full((len(slots),), 99)
        for step, confidences in enumerate(confidences_KR):
            self.step(step, slots, confidences, [step + 1] * len(slots), k, price)
            if self.is_over:
                return self.count_R.tolist(), step + 1
        return self.count_R.tolist(), len(confidences_KR)

    @property
    def is_over(self) -> bool:
        return bool(self.record.is_over_1)

    def counts(self) -> dict[int, tuple[float, float]]:
        """Bin -> (hits, trials), where there were any."""
        both = zip(self.record.hits_B.tolist(), self.record.trials_B.tolist(), strict=True)
        return {number: pair for number, pair in enumerate(both) if pair[1]}


def price(of_draft: float, of_row: float) -> RowPrice:
    return RowPrice(0.0, 0.0, of_draft, of_row)


FREE = RowPrice()


@pytest.mark.parametrize("stopping", VERSIONS)
def test_a_proposal_goes_on_while_the_next_draft_is_expected_to_bring_its_price(stopping: Stopping) -> None:
    """By the prior: a draft in the bin from 0.8 to 0.9 is right with 0.85, and the next one is as likely. So after one
    0.85 ** 2 = 0.72 is expected of another, after two 0.61, after three 0.52, after four 0.44."""
    sure, unsure = [[0.85]] * 6, [[0.85], [0.35], [0.85]]
    assert Drafting(stopping).propose([1], sure, [6], price(0.4, 0.1)) == ([4], 4)
    assert Drafting(stopping).propose([1], sure, [6], price(0.45, 0.2)) == ([2], 2)
    assert Drafting(stopping).propose([1], sure, [3], price(0.4, 0.1)) == ([3], 3), "no more are wanted"
    assert Drafting(stopping).propose([1], unsure, [6], price(0.1, 0.01)) == ([2], 2), (
        "0.85 * 0.35 ** 2 = 0.10"
    )
    assert Drafting(stopping).propose([1], unsure, [6], price(0.09, 0.01)) == ([3], 3)
    assert Drafting(stopping).propose([1], [[0.05]] * 6, [6], price(9.0, 9.0)) == ([1], 1), (
        "the first is made"
    )
    assert Drafting(stopping).propose([1], [[0.05]] * 6, [4], FREE) == ([4], 6)
    assert Drafting(stopping).propose([1], [[0.05]] * 6, [0], FREE) == ([0], 6), (
        "as when a profile is measured"
    )


@pytest.mark.parametrize("stopping", VERSIONS)
def test_several_requests_go_on_together(stopping: Stopping) -> None:
    """A draft more for each is made if what is expected of all that go on, without their rows, brings it; who is not
    expected to bring a row has no more."""
    both = [[0.85, 0.35]] * 4
    # 0.72 - 0.2 goes on alone, 0.12 does not; then 0.61 - 0.2
    assert Drafting(stopping).propose([0, 2], both, [4, 4], price(0.5, 0.2)) == ([2, 1], 2)
    assert Drafting(stopping).propose([0, 2], both, [4, 4], price(0.53, 0.2)) == ([1, 1], 1)
    # 0.72 + 0.12 - 0.2 together
    assert Drafting(stopping).propose([0, 2], both, [4, 4], price(0.6, 0.1)) == ([2, 2], 2)
    assert Drafting(stopping).propose([0, 2], both, [1, 4], price(0.1, 0.1)) == ([1, 1], 1), (
        "the sure one has all"
    )
    assert Drafting(stopping).propose([0, 2], both, [0, 4], price(0.1, 0.01)) == ([0, 2], 2)
    assert Drafting(stopping).propose([0, 2], both, [3, 2], FREE) == ([3, 2], 4), "all are made"
    assert Drafting(stopping).propose([0, 2], both, [4, 4], price(0.0, 0.2)) == ([4, 1], 4), "only rows cost"
    assert Drafting(stopping).propose([0, 2], both, [4, 4], price(-1.0, 0.9)) == ([1, 1], 1), "nobody goes on"


@pytest.mark.parametrize("stopping", VERSIONS)
def test_what_became_of_drafts_is_counted_by_confidence(stopping: Stopping) -> None:
    drafting = Drafting(stopping)
    drafting.know(1, [5, 6])
    drafting.propose([1], [[0.85], [0.55], [0.75], [0.985]], [4], price(0.001, 0.0))
    assert drafting.counts() == {}, "nothing is known of it yet"
    drafting.know(1, [1, 2, 9])
    drafting.propose([1], [[0.15]], [1], price(0.001, 0.0))
    assert drafting.counts() == {8: (1.0, 1.0), 5: (1.0, 1.0), 7: (0.0, 1.0)}, "the fourth tells nothing"
    drafting.know(1, [9])
    drafting.propose([1], [[0.15]], [1], FREE)
    assert 1 not in drafting.counts(), "without a price nothing is compared"
    drafting.record.close(1)
    drafting.propose([1], [[0.15]], [1], price(0.001, 0.0))
    assert 1 not in drafting.counts(), "it was another request's"
    drafting.know(1, [1])
    drafting.propose([1], [[0.15]], [1], price(0.001, 0.0))
    assert drafting.counts()[1] == (1.0, 1.0) and drafting.counts()[8] == (MEMORY, MEMORY)


@pytest.mark.parametrize("stopping", VERSIONS)
def test_it_learns_what_the_drafter_s_confidence_is_worth(stopping: Stopping) -> None:
    """One that is always sure and mostly wrong soon makes one draft only."""
    drafting, made = Drafting(stopping), []
    for _ in range(30):
        made.append(drafting.propose([0], [[0.95]] * 5, [5], price(0.3, 0.1))[1])
        drafting.know(0, [40])
    assert made[0] == 5 and made[-1] == 1
    chance = PRIOR_WEIGHT * EXPECTED[9] / (float(drafting.record.trials_B[9]) + PRIOR_WEIGHT)
    assert drafting.record.chances()[9] == pytest.approx(chance)


def test_bins_have_their_ends_and_all_have_a_prior() -> None:
    assert len(EXPECTED) == len(ENDS) + 1 and list(ENDS) == sorted(ENDS)
    assert [bin_of(end) for end in ENDS] == list(range(len(ENDS))) and bin_of(1.0) == len(ENDS)
    assert all(low < p <= high for low, p, high in zip((0.0, *ENDS), EXPECTED, (*ENDS, 1.0), strict=True))


@pytest.mark.skipif(LIBRARY is None, reason="needs a compiler")
def test_versions_agree() -> None:
    """Over many proposals of many lengths, some right and some wrong, for changing requests; rows longer than a piece
    of the normalizer, infinite logits and more drafts than are kept."""
    generator = torch.Generator().manual_seed(0)
    both = [Drafting(stopping_torch), Drafting(StoppingCompiled(LIBRARY))]  # type: ignore[arg-type]
    for round_ in range(150):
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: 1 + round_ % NUM_SLOTS]
        k_R = torch.randint(0, MOST_KEPT + 4, (len(slots),), generator=generator)
        its_price = torch.rand(4, generator=generator) * torch.tensor([1.0, 1.0, 0.4, 0.1])
        width = (WIDTH, 5000)[round_ % 2]
        num = int(k_R.max())
        logits_KRV = 4.0 * torch.randn((num, len(slots), width), generator=generator)
        if round_ % 10 == 9:
            logits_KRV[logits_KRV > 15] = math.inf
        elif round_ % 10 == 8:
            logits_KRV[:, 0] = -math.inf
        drawn_KR = torch.randint(0, 3, (num, len(slots)), generator=generator)
        counts = [torch.full((len(slots),), 99) for _ in both]
        for step in range(num):
            for drafting, count_R in zip(both, counts, strict=True):
                known = (drafting.tokens_SL, drafting.length_S, its_price, drafting.record)
                drafting._stopping(step, logits_KRV[step], drawn_KR[step], slots, k_R, *known, count_R)
            assert counts[0].tolist() == counts[1].tolist()
        for a, b in zip(both[0].record.tensors, both[1].record.tensors, strict=True):
            torch.testing.assert_close(a, b)
        for slot in range(NUM_SLOTS):
            tokens = torch.randint(
                0, 3, (int(torch.randint(0, 3, (1,), generator=generator)),), generator=generator
            )
            for drafting in both:
                if int(drafting.length_S[slot]) + len(tokens) > LENGTH:
                    drafting.length_S[slot] = 0
                    drafting.record.close(slot)
                drafting.know(slot, tokens.tolist())
    assert float(both[0].record.trials_B.sum()) > 50


DATA = Path(__file__).parents[1] / "data"
EAGLE3, MTP, DRAFT = str(assets.path("tiny-eagle3")), str(DATA / "tiny-mtp"), str(DATA / "draft")


def proposed(
    llm: LLM, policy: FixedPolicy, params: SamplingParams, num: int
) -> tuple[list[list[int]], int, int]:
    """(outputs, drafts, accepted ones)."""
    prompts = [prompt.text for prompt in read_file(assets.path(assets.PROMPTS))[:num] if prompt.text]
    llm.core.policy = policy
    before = llm.stats.speculation
    num_drafted, num_accepted = before.num_draft_tokens, before.num_accepted_tokens
    found = llm.generate(prompts, params, use_tqdm=False)
    now = llm.stats.speculation
    tokens = [list(output.outputs[0].token_ids) for output in found]
    return tokens, now.num_draft_tokens - num_drafted, now.num_accepted_tokens - num_accepted


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("head", [EAGLE3, MTP, DRAFT], ids=["eagle3", "mtp", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_makes_fewer_drafts_and_accepts_about_as_many(
    head: str, is_native: bool, temperature: float
) -> None:
    """With the same output, for one request and for several."""
    llm = LLM(dtype="float32", native=is_native, speculative_config={"model": head}, max_num_seqs=4)
    params = SamplingParams(temperature=temperature, max_tokens=50, seed=1, ignore_eos=True)
    for num in (1, 6):
        free = proposed(llm, Priced(3, FREE), params, num)
        some = proposed(llm, Priced(3, price(0.2, 0.05)), params, num)
        dear = proposed(llm, Priced(3, price(9.0, 9.0)), params, num)
        assert free[0] == some[0] == dear[0]
        assert dear[1] < some[1] < 0.95 * free[1] and some[2] > 0.6 * free[2]


def noted_steps(drafter: HeadDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of drafts before each that is made from now on, where no recorded program makes it."""
    assert drafter.runtime is not None
    ops, steps = drafter.runtime.ops, list[int]()

    def noted(step: int, *given: Any) -> None:
        steps.append(step)
        ops.stopping(step, *given)

    noting = dataclasses.replace(drafter.runtime, ops=dataclasses.replace(ops, stopping=noted))
    monkeypatch.setattr(drafter, "runtime", noting)
    return steps


@pytest.mark.parametrize("is_native", [False, True])
def test_drafts_that_are_not_proposed_are_not_made(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the operators are called, and in a recorded program."""
    llm = LLM(dtype="float32", native=is_native, speculative_config={"model": EAGLE3}, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    drafter = internals.drafter_of(llm)
    assert isinstance(drafter, HeadDrafter) and drafter.runtime is not None
    if is_native and LIBRARY is not None:
        proposed(llm, Priced(5, price(9.0, 9.0)), params, 1)
        graphs = drafter.runtime.graphs
        assert isinstance(graphs, Recorded)
        program = graphs.program((("draft", drafter), 1, 5))
        assert program is not None
        names = [name for name, _, _ in program.calls]
        assert names.count("skip") == 4 and names.count("dp_stopping") == 5
        return
    steps = noted_steps(drafter, monkeypatch)
    proposed(llm, Priced(5, price(9.0, 9.0)), params, 1)
    assert set(steps) == {0}
    proposed(llm, Priced(5, FREE), params, 1)
    assert set(steps) == {0, 1, 2, 3, 4}


@pytest.mark.skipif(LIBRARY is None, reason="needs a compiler")
def test_passes_that_cannot_be_recorded_make_no_more_drafts_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here since rejected drafts are drawn anew, which depends on more than a program's inputs."""
    settings = {"speculative_config": {"model": EAGLE3}, "max_num_seqs": 1, "verification": "rejection"}
    llm = LLM(dtype="float32", native=True, **settings)  # type: ignore[arg-type]
    drafter = internals.drafter_of(llm)
    assert isinstance(drafter, HeadDrafter)
    steps = noted_steps(drafter, monkeypatch)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    proposed(llm, Priced(5, price(9.0, 9.0)), params, 1)
    assert len(steps) > 10 and set(steps) == {0}


def test_a_request_begins_with_nothing_known_of_its_slots_last_proposal() -> None:
    llm = LLM(dtype="float32", max_num_seqs=1, speculative_config={"model": EAGLE3})
    drafter = internals.drafter_of(llm)
    assert isinstance(drafter, HeadDrafter) and isinstance(drafter.unroll, Recurrent)
    record = drafter.unroll._record
    assert record is not None
    record.open_S2[:] = torch.tensor([0, 3])
    proposed(llm, Priced(5, price(9.0, 9.0)), SamplingParams(temperature=0.0, max_tokens=3), 1)
    assert float(record.trials_B.sum()) < 3


def test_only_engines_that_know_what_drafts_cost_end_proposals() -> None:
    """A fixed number of drafts is what is made."""
    llm = LLM(dtype="float32", speculative_config={"model": EAGLE3, "num_speculative_tokens": 3})
    drafter = internals.drafter_of(llm)
    assert isinstance(drafter, HeadDrafter) and isinstance(drafter.unroll, Recurrent)
    assert drafter.unroll._record is None and not llm.core.runner.drafter_stops
    assert len(llm.draft([1, 2, 3, 4], 3)) == 3
