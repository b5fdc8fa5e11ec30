"""Confidence in copied drafts: worked examples, and each version against a plain computation."""

from __future__ import annotations

import random

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.bench import internals
from draftproof.cli.prompts import read_file
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.interface import RowPrice
from draftproof.kernels.confidence import Confidence
from draftproof.kernels.confidence.compiled import ConfidenceCompiled
from draftproof.kernels.confidence.record import MEMORY, MOST_MATCHED, Branching, MatchRecord
from draftproof.kernels.confidence.reference import (
    EXPECTED,
    LOOKED_BACK,
    PRIOR_WEIGHT,
    branching,
    confidence_torch,
    num_paying,
)
from draftproof.runtime import native
from tests.priced import Priced

LIBRARY = native.load()
VERSIONS = [pytest.param(confidence_torch, id="torch")]
VERSIONS += [] if LIBRARY is None else [pytest.param(ConfidenceCompiled(LIBRARY), id="compiled")]
LENGTH, NUM_DRAFTS = 40, 6


class Slots:
    """Three slots with known texts, and one operator with its record."""

    def __init__(self, confidence: Confidence) -> None:
        self._confidence = confidence
        self.record = MatchRecord.empty(3, NUM_DRAFTS)
        self.tokens_SL = torch.zeros((3, LENGTH), dtype=torch.int32)
        self.length_S = torch.zeros(3, dtype=torch.int64)

    def know(self, slot: int, tokens: list[int]) -> None:
        """Append tokens to a slot's text."""
        start = int(self.length_S[slot])
        self.tokens_SL[slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.length_S[slot] += len(tokens)

    def propose(
        self, slots: list[int], drafts: list[list[int]], matched: list[int], price: RowPrice
    ) -> list[int]:
        width = max(map(len, drafts))
        tokens_RK = torch.tensor([d + [0] * (width - len(d)) for d in drafts], dtype=torch.int64)
        return self._confidence(
            self.tokens_SL,
            self.length_S,
            torch.tensor(slots),
            tokens_RK.view(len(drafts), width),
            torch.tensor([len(d) for d in drafts]),
            torch.tensor(matched),
            torch.tensor(price),
            self.record,
        ).tolist()

    def counts(self) -> dict[int, tuple[float, float]]:
        """Matching tokens -> (hits, trials) of all branchings, where there were any."""
        hits_M, trials_M = self.record.hits_BM.sum(0), self.record.trials_BM.sum(0)
        both = zip(hits_M.tolist(), trials_M.tolist(), strict=True)
        return {number: pair for number, pair in enumerate(both) if pair[1]}


SOME = RowPrice(0.0, 3.0)


def test_a_draft_pays_if_it_brings_more_than_the_rows_before_it_do_on_average() -> None:
    """The example of `num_paying`, and the same among seven other requests that bring ten tokens in 12 rows' time."""
    chances = [0.7] * 4
    assert num_paying(chances, 0.0, 3.0) == 2
    assert num_paying(chances[:1], 0.0, 3.0) == 1
    assert num_paying(chances, 10.0, 12.0) == 0
    assert num_paying([0.95] * 4, 10.0, 12.0) == 1
    assert num_paying([0.2], 0.0, 3.0) == 0


@pytest.mark.parametrize("confidence", VERSIONS)
def test_a_proposal_counts_up_to_its_first_wrong_draft(confidence: Confidence) -> None:
    slots = Slots(confidence)
    slots.know(1, [5, 6])
    slots.propose([1], [[7, 8, 9]], [2], SOME)
    assert slots.counts() == {}, "nothing is known of it yet"
    slots.know(1, [7, 3])
    slots.propose([1], [[4]], [3], SOME)
    assert slots.counts() == {2: (1.0, 1.0), 3: (0.0, 1.0)}
    slots.know(1, [4])
    slots.propose([1], [[]], [0], SOME)
    assert slots.counts() == {2: (MEMORY, MEMORY), 3: (1.0, MEMORY + 1.0)}
    slots.know(1, [4])
    slots.propose([1], [[]], [0], SOME)
    assert slots.counts()[3] == (1.0, MEMORY + 1.0), "there was no proposal"


@pytest.mark.parametrize("confidence", VERSIONS)
def test_what_is_not_known_yet_does_not_count(confidence: Confidence) -> None:
    slots = Slots(confidence)
    slots.propose([0], [[7, 8, 9]], [4], SOME)
    slots.know(0, [7])
    slots.propose([0], [[8, 9]], [5], SOME)
    assert slots.counts() == {4: (1.0, 1.0)}


@pytest.mark.parametrize("confidence", VERSIONS)
def test_another_request_in_the_slot_and_free_rows_tell_nothing(confidence: Confidence) -> None:
    slots = Slots(confidence)
    slots.propose([0, 1], [[7, 8], [7]], [2, 2], SOME)
    slots.record.close(0)
    for slot in (0, 1):
        slots.know(slot, [7])
    assert slots.propose([1], [[1, 2, 3]], [2], RowPrice()) == [3] and slots.counts() == {}
    slots.propose([0, 1], [[], []], [0, 0], SOME)
    assert slots.counts() == {2: (1.0, 1.0)}, "the proposal before the free one"
    slots.record.clear()
    assert slots.counts() == {} and not slots.record.open_S3.any()


@pytest.mark.parametrize("confidence", VERSIONS)
def test_drafts_after_long_matches_survive_where_others_do_not(confidence: Confidence) -> None:
    slots = Slots(confidence)
    for _ in range(20):
        slots.propose([0, 1], [[7], [7]], [2, 30], SOME)
        slots.know(0, [1])
        slots.know(1, [7])
    drafts = [[7] * 3, [7] * 3]
    assert slots.propose([0, 1], drafts, [2, 30], SOME) == [0, 3]
    assert set(slots.counts()) == {2, MOST_MATCHED}, "longer matches are alike"


def place_of(text: list[int], drafts: list[int]) -> int:
    """The branching after these drafts, by looking at all places."""
    last = (text + drafts)[-2:]
    if len(last) < 2:
        return 0
    follow = [text[i + 2] for i in range(len(text) - 2) if text[i : i + 2] == last][-2:]
    return 0 if len(follow) < 2 else 1 if follow[0] == follow[1] else 2


def expected(
    slots: Slots, slot: int, drafts: list[int], matched: int, price: RowPrice, looked_back: int
) -> int:
    hits_BM, trials_BM = slots.record.hits_BM.tolist(), slots.record.trials_BM.tolist()
    text = slots.tokens_SL[slot, : int(slots.length_S[slot])].tolist()
    survival, tokens = 1.0, 1.0
    for number in range(len(drafts)):
        place, chance = place_of(text[-looked_back:], drafts[:number]), EXPECTED
        for m in range(min(matched, MOST_MATCHED) + number + 1):
            chance = (hits_BM[place][m] + PRIOR_WEIGHT * chance) / (trials_BM[place][m] + PRIOR_WEIGHT)
        survival *= chance
        if survival < (price.others + tokens) / (price.rows + number):
            return number
        tokens += survival
    return len(drafts)


@pytest.mark.parametrize("confidence", VERSIONS)
@pytest.mark.parametrize("seed", range(40))
def test_it_agrees_with_the_plain_computation(
    confidence: Confidence, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of two ids, of which drafts are right now and then; of some only the end is looked at."""
    rng, slots = random.Random(seed), Slots(confidence)
    looked_back = rng.choice([6, LENGTH])
    for module in ("reference", "compiled"):
        monkeypatch.setattr(f"draftproof.kernels.confidence.{module}.LOOKED_BACK", looked_back)
    price = RowPrice(rng.choice([0.0, 3.0]), rng.choice([2.0, 5.0, 9.0]))
    last: dict[int, tuple[list[int], int, int]] = {}
    twin = MatchRecord.empty(3, NUM_DRAFTS)
    for _ in range(12):
        named = rng.sample(range(3), rng.randrange(1, 4))
        drafts = [[rng.randrange(2) for _ in range(rng.randrange(NUM_DRAFTS + 1))] for _ in named]
        matched = [rng.randrange(20) for _ in named]
        for slot in named:  # what the operator should have learned, before it proposes
            if slot in last:
                text = slots.tokens_SL[slot, : int(slots.length_S[slot])].tolist()
                _learn(twin, *last[slot], text, looked_back)
            last.pop(slot, None)
        found = slots.propose(named, drafts, matched, price)
        assert torch.allclose(slots.record.hits_BM, twin.hits_BM, rtol=1e-12)
        assert torch.allclose(slots.record.trials_BM, twin.trials_BM, rtol=1e-12)
        each = zip(named, drafts, matched, strict=True)
        assert found == [expected(slots, slot, its, number, price, looked_back) for slot, its, number in each]
        for slot, its, number in zip(named, drafts, matched, strict=True):
            last[slot] = (its, number, int(slots.length_S[slot]))
            slots.know(slot, [rng.randrange(2) for _ in range(rng.randrange(3))])


def _learn(
    twin: MatchRecord, drafts: list[int], matched: int, start: int, text: list[int], looked_back: int
) -> None:
    known = text[start : start + len(drafts)]
    if not known:
        return
    twin.hits_BM.mul_(MEMORY)
    twin.trials_BM.mul_(MEMORY)
    for number, (token, draft) in enumerate(zip(known, drafts, strict=False)):
        known_before = text[max(0, start - looked_back) : start]
        at = place_of(known_before, drafts[:number]), min(matched, MOST_MATCHED) + number
        twin.trials_BM[at] += 1
        if token != draft:
            return
        twin.hits_BM[at] += 1


@pytest.mark.parametrize("is_native", [False, True])
def test_an_engine_verifies_fewer_drafts_and_accepts_about_as_many(is_native: bool) -> None:
    """With the same output."""
    llm = LLM(assets.path("tiny"), dtype="float32", native=is_native, speculative_config={"method": "ngram"})
    prompts = [prompt.text for prompt in read_file(assets.path(assets.PROMPTS))[:8] if prompt.text]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    texts, drafted, accepted = [], [], []
    for price in (RowPrice(), SOME):
        llm.core.policy = Priced(16, price)
        before = llm.stats.speculation
        num_drafted, num_accepted = before.num_draft_tokens, before.num_accepted_tokens
        found = llm.generate(prompts, params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in found])
        drafted.append(llm.stats.speculation.num_draft_tokens - num_drafted)
        accepted.append(llm.stats.speculation.num_accepted_tokens - num_accepted)
    assert texts[0] == texts[1]
    assert drafted[1] < 0.7 * drafted[0] and accepted[1] > 0.7 * accepted[0]


def test_a_request_begins_with_nothing_known_of_its_slots_last_proposal() -> None:
    llm = LLM(assets.path("tiny"), dtype="float32", max_num_seqs=1, speculative_config={"method": "ngram"})
    drafter = internals.drafter_of(llm)
    assert isinstance(drafter, NgramDrafter)
    llm.core.policy = Priced(16, SOME)
    # if it were kept: three drafts after two matching tokens were wrong
    drafter.record.open_S3[:] = torch.tensor([0, 3, 2])
    llm.generate("one two", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert not drafter.record.trials_BM.any()


def test_it_knows_that_more_tokens_match_than_were_looked_for() -> None:
    """Five are looked for."""
    llm = LLM(assets.path("tiny"), dtype="float32", speculative_config={"method": "ngram"})
    drafter = internals.drafter_of(llm)
    assert isinstance(drafter, NgramDrafter)
    llm.core.policy = Priced(16, SOME)
    longer = [*range(20, 60)] * 3
    llm.generate(
        [{"prompt_token_ids": longer}],
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        use_tqdm=False,
    )
    llm.generate(
        [{"prompt_token_ids": longer[:-1]}],
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        use_tqdm=False,
    )
    assert drafter.record.open_S3[:, 2].max() > 5


def test_draft_says_what_the_drafter_has_whatever_rows_cost() -> None:
    """After a generation, too, in which rows had a price."""
    llm = LLM(assets.path("tiny"), dtype="float32", max_num_seqs=2, speculative_config={"method": "ngram"})
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13, 5, 6]
    first = llm.draft(text[:-1], 7, next_token=text[-1])
    llm.core.policy = Priced(16, RowPrice(5.0, 2.0))
    llm.generate("one two one two", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    assert llm.draft(text[:-1], 7, next_token=text[-1]) == first == [7, 8, 9, 10, 11, 12, 13]


def test_a_text_branches_where_the_same_two_tokens_were_followed_by_different_ones() -> None:
    """The last two times; places further back than `LOOKED_BACK` do not count."""
    text_L = torch.tensor([1, 2, 3, 1, 2, 4, 1, 2, 4, 5, 1, 2], dtype=torch.int32)

    def at(length: int, *drafts: int) -> Branching:
        return branching(text_L, length, drafts)

    assert at(8) == at(7, 2) == Branching.DIFFERENT
    assert at(12) == at(10, 1, 2) == Branching.ALIKE
    for found in (at(5), at(9), at(1), at(0), at(0, 1), at(1, 2)):
        assert found == Branching.UNKNOWN, "once, or never"
    for num_between, found in ((LOOKED_BACK - 8, Branching.DIFFERENT), (LOOKED_BACK - 7, Branching.UNKNOWN)):
        far_L = torch.cat((text_L[:6], torch.zeros(num_between, dtype=torch.int32), text_L[:2]))
        assert branching(far_L, len(far_L), ()) == found


@pytest.mark.parametrize("confidence", VERSIONS)
def test_drafts_where_a_text_branches_are_learned_apart(confidence: Confidence) -> None:
    """After the same two tokens: in one text these are always followed by the same token, in the other by the one that
    was not copied."""
    slots = Slots(confidence)
    slots.know(0, [1, 2, 3, 1, 2, 3, 1, 2])
    slots.know(1, [1, 2, 3, 1, 2, 4, 1, 2])
    for number in range(8):
        copied, other = (4, 3) if number % 2 == 0 else (3, 4)
        slots.propose([0, 1], [[3], [copied]], [2, 2], SOME)
        slots.know(0, [3, 1, 2])
        slots.know(1, [other, 1, 2])
    assert slots.propose([0, 1], [[3], [4]], [2, 2], SOME) == [1, 0]


@pytest.mark.parametrize("confidence", VERSIONS)
def test_the_longest_match_may_have_all_drafts(confidence: Confidence) -> None:
    slots = Slots(confidence)
    slots.propose([2], [[7] * NUM_DRAFTS], [99], SOME)
    slots.know(2, [7] * NUM_DRAFTS)
    slots.propose([2], [[]], [0], SOME)
    assert slots.counts() == dict.fromkeys(range(MOST_MATCHED, MOST_MATCHED + NUM_DRAFTS), (1.0, 1.0))
