"""Which member of a chain proposes: the one whose drafts were accepted most, request by request."""

from __future__ import annotations

import pytest
import torch

from draftproof import LLM, RequestOutput, SamplingParams, assets
from draftproof.bench import internals
from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Verified
from draftproof.drafters.chain import EXPECTED, ChainDrafter, Record

PROMPTS = ["def add(a, b):", "import os\n" * 6, "class A"]


class Says(Drafter):
    """Proposes its own number `width` times for each request that asks; none for the slots in `silent`."""

    spec = DraftSpec(host_tokens=True)

    def __init__(self, number: int, width: int, silent: tuple[int, ...] = ()) -> None:
        self.number, self.width, self.silent = number, width, silent
        self.asked: list[list[int]] = []

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.asked.append(verified.k_R.tolist())
        width = min(self.width, num_drafts)
        tokens_RK = torch.full((verified.num_requests, width), self.number)
        count_R = verified.k_R.clamp(max=width)
        for index, slot in enumerate(verified.slots_R.tolist()):
            if slot in self.silent:
                count_R[index] = 0
        return Proposal(tokens_RK, count_R)


def a_round(rows: list[int], live: list[int], k: int = 3) -> Verified:
    """Requests in the slots 0, 1, ..., so many of whose rows stood."""
    starts = torch.tensor([0, *rows]).cumsum(0)
    return Verified(
        tokens_T=torch.zeros(sum(rows), dtype=torch.int64),
        positions_T=torch.zeros(sum(rows), dtype=torch.int64),
        query_start_loc_R1=starts,
        slots_R=torch.arange(len(rows)),
        live_R=torch.tensor(live),
        next_R=torch.zeros(len(rows), dtype=torch.int64),
        k_R=torch.full((len(rows),), k),
        taps=(),
        draw=None,  # type: ignore[arg-type]
        history=lambda r: torch.zeros(1, dtype=torch.int32),
    )


def chain(*members: Says) -> ChainDrafter:
    made = ChainDrafter(members, [3] * len(members))
    made._host_looks = True
    return made


def proposers(made: ChainDrafter, verified: Verified) -> list[int]:
    found = made.propose(verified, 3)
    return [int(row[0]) if n else 0 for row, n in zip(found.tokens_RK, found.count_R.tolist(), strict=True)]


def test_at_first_the_first_that_has_a_proposal_wins() -> None:
    first, second = Says(1, 3, silent=(1,)), Says(2, 3)
    assert proposers(chain(first, second), a_round([1, 1], [1, 1])) == [1, 2]
    assert second.asked == [[0, 3]], "nobody is asked who cannot do better"


def play(made: ChainDrafter, right: list[int], num_rounds: int) -> list[int]:
    """Rounds in which only member right[i]'s drafts are right for request i; who proposes at last."""
    said = proposers(made, a_round([1] * len(right), [1] * len(right)))
    for _ in range(num_rounds):
        live = [4 if s == r else 1 for s, r in zip(said, right, strict=True)]
        said = proposers(made, a_round([4] * len(right), live))
    return said


def test_the_member_with_the_better_record_wins() -> None:
    made = chain(Says(1, 3, silent=(1,)), Says(2, 3))
    assert play(made, [2, 2], 12) == [2, 2]
    assert made.records[0].expected(0) < EXPECTED < made.records[1].expected(1)


def test_a_member_that_was_never_asked_is_tried() -> None:
    """The first always proposes and is right enough to look good; the second would be right in full."""
    made = chain(Says(1, 3), Says(2, 3))
    said = proposers(made, a_round([1], [1]))
    for _ in range(20):
        said = proposers(made, a_round([4], [3 if said == [1] else 4]))
    assert said == [2]


def test_each_request_has_a_record_of_its_own() -> None:
    made = chain(Says(1, 3), Says(2, 3))
    assert play(made, [2, 1], 30) == [2, 1]
    made.admit(0, [], 0)
    assert made.records[0].of_slot.keys() == {1}, "who takes the slot next begins anew"


def test_drafts_that_were_dropped_say_nothing() -> None:
    made = chain(Says(1, 3), Says(2, 3))
    for _ in range(5):
        proposers(made, a_round([1], [1]))
    assert made.records[0] == Record()


def check_counts(llm: LLM, outputs: list[RequestOutput]) -> None:
    """Both drafters were of use, and what they did is all that was drafted, for requests as for the engine."""
    for all_drafts, drafters in [
        (llm.stats.speculation, llm.stats.drafters),
        *((o.metrics.speculation, o.metrics.drafters) for o in outputs),
    ]:
        assert [d.name for d in drafters] == ["ngram", "eagle3"]
        each = [d.speculation for d in drafters]
        assert sum(s.num_draft_tokens for s in each) == all_drafts.num_draft_tokens > 0
        assert sum(s.num_accepted_tokens for s in each) == all_drafts.num_accepted_tokens
        assert sum(s.num_rounds for s in each) == all_drafts.drafted_per_position[0]
    assert all(d.speculation.num_accepted_tokens > 0 for d in llm.stats.drafters)
    for number, drafter in enumerate(llm.stats.drafters):
        of_requests = [o.metrics.drafters[number].speculation.num_draft_tokens for o in outputs]
        assert sum(of_requests) == drafter.speculation.num_draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_chain_keeps_records_and_changes_nothing(temperature: float) -> None:
    head = {"model": str(assets.path("tiny-eagle3"))}
    config = {"method": "chain", "drafters": [{"method": "ngram"}, head], "num_speculative_tokens": 4}
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=48, ignore_eos=True)
    with LLM(dtype="float32") as plain, LLM(dtype="float32", speculative_config=config) as llm:
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        drafter = internals.drafter_of(llm)
        assert isinstance(drafter, ChainDrafter)
        assert sum(record.rounds for record in drafter.records) > 5
        check_counts(llm, found)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
