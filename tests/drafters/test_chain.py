"""A chain's member with the most accepted drafts proposes, separately for each request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from draftproof import LLM, EngineConfig, RequestOutput, SamplingParams, assets
from draftproof.attention.reference import REFERENCE
from draftproof.bench import internals
from draftproof.cache.pool import KVShape, PagedCache
from draftproof.drafters.base import (
    Drafter,
    DraftRuntime,
    DraftSpec,
    Proposal,
    RoundSize,
    Taps,
    Verified,
    no_proposal,
)
from draftproof.drafters.chain import EXPECTED, ChainDrafter, Record
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.kernels.ops import TORCH
from draftproof.models.cost import Cost
from draftproof.runtime.graphs import EAGER, Recorded

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
    """A round of requests in slots 0, 1, ...; `rows`: verified rows of each, `live`: how many were accepted."""
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


def boxed(drafter: Drafter) -> DrafterSandbox:
    return DrafterSandbox(drafter, vocab_size=100, max_faults=3, time_limit=None)


def chain(*members: Drafter, host_looks: bool = True, most: Sequence[int] | None = None) -> ChainDrafter:
    """host_looks False: as on a GPU with members that read no tokens on the host. most: drafts of each, if not 3."""
    if not host_looks:
        for member in members:
            member.spec = dataclasses.replace(member.spec, host_tokens=False)
    made = ChainDrafter([boxed(m) for m in members], most or [3] * len(members), vocab_size=100)
    cache = PagedCache([], torch.zeros(4, 1, dtype=torch.int32))
    made.bind(DraftRuntime(ops=TORCH, backend=REFERENCE, cache=cache, graphs=EAGER, host_looks=host_looks))
    return made


def proposers(made: ChainDrafter, verified: Verified) -> list[int]:
    found = made.propose(verified, 3)
    return [int(row[0]) if n else 0 for row, n in zip(found.tokens_RK, found.count_R.tolist(), strict=True)]


def test_at_first_the_first_that_has_a_proposal_wins() -> None:
    first, second = Says(1, 3, silent=(1,)), Says(2, 3)
    assert proposers(chain(first, second), a_round([1, 1], [1, 1])) == [1, 2]
    assert second.asked == [[0, 3]], "nobody is asked who cannot do better"


def play(made: ChainDrafter, right: list[int], num_rounds: int) -> list[int]:
    """Play rounds in which only member right[i]'s drafts are right for request i; returns who proposes in the end."""
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
    """The first member always proposes and is often right; the second would be always right."""
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


class Fails(Says):
    """Has a KV cache, and raises in the rounds `at`."""

    spec = DraftSpec(kv=(KVShape(heads=1, head_dim=8),), host_tokens=True)
    at: tuple[int, ...] = ()

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        found = super().propose(verified, num_drafts)
        if len(self.asked) - 1 in self.at:
            raise RuntimeError("no idea")
        return found


@pytest.mark.parametrize("host_looks", [True, False])
def test_a_member_that_raises_costs_itself_the_round(host_looks: bool) -> None:
    """If it lost its state, it drafts no more for that round's requests, but for new ones in their slots."""
    first, second = Fails(1, 3, silent=(1,)), Says(2, 3)
    first.at = (1,)
    made = chain(first, second, host_looks=host_looks)
    one, two = made._drafters
    assert proposers(made, a_round([1, 1], [1, 1])) == [1, 2]
    assert proposers(made, a_round([1, 1], [1, 1])) == [2, 2] and isinstance(one.error, RuntimeError)
    one.lose([0, 1])  # as the runner calls it, which knows the slots
    assert proposers(made, a_round([1, 1, 1], [1, 1, 1])) == [2, 2, 1]
    assert first.asked[-1] == [0, 0, 3] and not one.drafts_for(0) and one.drafts_for(2)
    made.admit(0, [], 0)
    assert proposers(made, a_round([1, 1, 1], [1, 1, 1])) == [1, 2, 1]
    assert (one.num_faults, two.num_faults) == (1, 0)


@pytest.mark.parametrize("host_looks", [True, False])
def test_an_id_that_is_none_is_cut_and_the_next_member_fills_in(host_looks: bool) -> None:
    made = chain(Says(500, 3, silent=(1,)), Says(2, 3), host_looks=host_looks)
    found = made.propose(a_round([1, 1], [1, 1]), 3)
    assert found.tokens_RK.tolist() == [[2, 2, 2], [2, 2, 2]] and found.count_R.tolist() == [3, 3]
    assert found.broken_R is not None and found.broken_R.tolist() == [1, 0]
    assert found.drafter_R is not None and found.drafter_R.tolist() == [1, 1]


def test_a_member_that_is_switched_off_leaves_the_others_drafting() -> None:
    first = Fails(1, 3)
    first.at = (0, 1, 2)
    made = chain(first, Says(2, 3), host_looks=False)
    with pytest.warns(RuntimeWarning, match="Fails switched off after 3 faults"):
        assert [proposers(made, a_round([1], [1])) for _ in range(4)] == [[2]] * 4
    assert made._drafters[0].off and len(first.asked) == 3
    made._drafters[0].lose([0])
    made.admit(0, [], 0)
    assert made._drafters[0].able(torch.tensor([0, 1])).tolist() == [0, 0]


class BadIds(Says):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(-5, 3)


class Raises(Says):
    spec = DraftSpec()

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(1, 3)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        raise RuntimeError("no idea")


HEAD = {"model": str(assets.path("tiny-eagle3"))}


@pytest.mark.filterwarnings("ignore:drafter .* switched off")
@pytest.mark.parametrize("kind", [Raises, BadIds])
def test_the_faults_of_a_users_member_are_counted_for_it_and_cost_the_others_nothing(kind: type) -> None:
    users = {"method": f"{__name__}.{kind.__name__}"}
    config = {"method": "chain", "drafters": [users, HEAD], "num_speculative_tokens": 4, "policy": "fixed"}
    alone = {**HEAD, "num_speculative_tokens": 4, "policy": "fixed"}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with (
        LLM(dtype="float32", speculative_config=alone) as head,
        LLM(dtype="float32", speculative_config=config) as llm,
    ):
        expected = head.generate(PROMPTS, params, use_tqdm=False)
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.stats
        assert [d.num_faults for d in stats.drafters] == [8, 0] and stats.num_drafter_faults == 8
        assert stats.speculation == head.stats.speculation, "not a round of the head's is missing"
        assert stats.drafters[1].speculation.num_accepted_tokens > 20
        faults = [o.metrics.drafters[0].num_faults for o in found]
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert min(faults) >= 1 and max(faults) <= 8


def test_a_fault_does_not_become_part_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that raises once, while its pass is being recorded, drafts for later requests without raising."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    config = {**HEAD, "num_speculative_tokens": 4, "policy": "fixed"}
    with LLM(dtype="float32", max_num_seqs=1, speculative_config=config) as llm:
        runner = llm.engine.runner
        assert isinstance(runner.graphs, Recorded)
        library, kind = runner.graphs._library, type(runner.sandboxes[0].drafter)
        propose, raised = kind.propose, []

        def fails_once(drafter: Drafter, verified: Verified, num_drafts: int) -> Proposal:
            if library.recorder is not None and not raised:
                raised.append(True)
                raise RuntimeError("once")
            return propose(drafter, verified, num_drafts)

        monkeypatch.setattr(kind, "propose", fails_once)
        llm.generate(PROMPTS, params, use_tqdm=False)
        assert raised and llm.stats.num_drafter_faults == 1
        before = llm.stats.speculation.num_accepted_tokens
        llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats.num_drafter_faults == 1 and llm.stats.speculation.num_accepted_tokens > before


def test_a_head_that_raises_once_is_asked_again_for_later_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile n-gram drafts for the request."""
    config = {"method": "chain", "drafters": [{"method": "ngram"}, HEAD], "num_speculative_tokens": 4}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(dtype="float32", max_num_seqs=1, speculative_config={**config, "policy": "fixed"}) as llm:
        head = llm.engine.runner.sandboxes[1]
        original, wanted = head.drafter.propose, list[list[int]]()

        def once(verified: Verified, num_drafts: int) -> Proposal:
            wanted.append(verified.k_R.tolist())
            if len(wanted) == 3:
                raise RuntimeError("once")
            return original(verified, num_drafts)

        monkeypatch.setattr(head.drafter, "propose", once)
        first, second = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert [d.num_faults for d in first.metrics.drafters] == [0, 1]
    ngram, eagle3 = (d.speculation for d in first.metrics.drafters)
    assert eagle3.num_rounds <= 2 and ngram.num_draft_tokens > 10
    num_first = sum(1 for o in wanted[: wanted.index([4], 3)] if o == [0])
    assert num_first > 5, "no drafts are asked of it until another request takes the slot"
    assert second.metrics.drafters[1].num_faults == 0


class Trusting(Drafter):
    """Proposes the newest token, without reading it on the host; keeps the tensors that it was given."""

    spec = DraftSpec()

    def __init__(self, config: EngineConfig) -> None:
        self.seen: list[Verified] = []

    def bind(self, runtime: DraftRuntime) -> None:
        self.runtime = runtime

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.seen.append(verified)
        if not num_drafts:
            return no_proposal(verified)
        tokens_RK = self.runtime.ops.concat([verified.next_R[:, None]] * num_drafts)
        return Proposal(tokens_RK, verified.k_R)


@pytest.mark.parametrize("trusted", [True, False])
def test_what_a_users_class_is_lent_is_a_matter_of_trust(trusted: bool) -> None:
    """Only a trusted user's class gets live buffers; the built-in member gets them, and the graphs, in either case."""
    users = {"method": f"{__name__}.Trusting", "trusted": trusted}
    config = {"method": "chain", "drafters": [users, HEAD], "num_speculative_tokens": 3, "policy": "fixed"}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(dtype="float32", speculative_config=config) as llm, LLM(dtype="float32") as plain:
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        runner = llm.engine.runner
        own, head = (sandbox.drafter for sandbox in runner.sandboxes)
        lent, heads = own.drafter.runtime, head.runtime
        table = runner.state.block_table_SB.data_ptr()
        assert heads.graphs is runner.graphs and heads.cache.block_table_SB.data_ptr() == table
        assert (lent.graphs is runner.graphs) == trusted and (lent.known is not None) == trusted
        assert (lent.cache.block_table_SB.data_ptr() == table) == trusted
        assert runner.on_device == runner.drafter_may_rest == trusted
        assert llm.stats.num_drafter_faults == 0 and llm.stats.drafters[0].speculation.num_draft_tokens > 0
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_trusted_class_is_recorded_as_ours_are(trusted: bool) -> None:
    config = {"method": f"{__name__}.Trusting", "trusted": trusted, "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(dtype="float32", speculative_config={**config, "policy": "fixed"}) as llm:
        if not isinstance(llm.engine.runner.graphs, Recorded):
            pytest.skip("needs the compiled operators")
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
        calls = len(llm.engine.runner.drafter.drafter.drafter.seen)
        assert llm.stats.num_drafter_faults == 0 and llm.stats.speculation.num_draft_tokens > 30
        assert (calls < 20) == trusted, (calls, llm.stats.num_steps)


def test_trust_is_for_classes_of_the_users() -> None:
    with pytest.raises(ValueError, match=r"trusted=True: method='ngram' is the package's own; leave it out"):
        LLM(speculative_config={"method": "ngram", "trusted": True})
    with pytest.raises(ValueError, match=r"trusted=True: method='chain'.*give it to those of its drafters"):
        LLM(speculative_config={"method": "chain", "trusted": True, "drafters": [{"method": "ngram"}]})
    with pytest.raises(ValueError, match="trusted='yes'"):
        LLM(speculative_config={"method": f"{__name__}.Trusting", "trusted": "yes"})


def check_counts(llm: LLM, outputs: list[RequestOutput]) -> None:
    """Assert that both drafters had accepted drafts, and that their counts add up to the totals, for requests and
    engine."""
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


def test_only_members_that_a_request_names_propose_for_it() -> None:
    for host_looks in (True, False):
        made = chain(Says(1, 3), Says(2, 3), host_looks=host_looks)
        made.admit(0, [], 0)
        made.restrict(0, (1,))
        assert proposers(made, a_round([1, 1], [1, 1])) == [2, 1]
        made.admit(0, [], 0)
        assert proposers(made, a_round([1, 1], [1, 1])) == [1, 1], "who takes the slot next may have all"


class Model(Says):
    """Runs a model, and keeps keys."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__(number, width)
        self.spec = DraftSpec(host_tokens=True, kv=(KVShape(heads=1, head_dim=8),))

    def cost(self, size: RoundSize) -> Cost:
        return Cost(bytes=1)


def test_members_with_a_model_make_no_more_drafts_than_allowed() -> None:
    lookup, model = Says(1, 3, silent=(0,)), Model(2, 3)
    made = chain(lookup, model)
    made.limit_models([0, 1], 2, are_shown=True)
    assert made.propose(a_round([1, 1], [1, 1]), 3).count_R.tolist() == [2, 3]
    assert model.asked == [[2, 0]]
    made.limit_models([0, 1], None, are_shown=True)
    assert made.propose(a_round([1, 1], [1, 1]), 3).count_R.tolist() == [3, 3]


def test_members_with_a_model_that_missed_rows_are_not_asked_until_the_slot_is_taken_again() -> None:
    lookup, model = Says(1, 3, silent=(0,)), Model(2, 3)
    made = chain(lookup, model)
    only = made.limit_models([0, 1], 0, are_shown=False)
    for asked in (made, only):
        assert asked.propose(a_round([1, 1], [1, 1]), 3).count_R.tolist() == [0, 3] and not model.asked
    made.limit_models([0, 1], 3, are_shown=True)
    assert made.propose(a_round([1, 1], [1, 1]), 3).count_R.tolist() == [0, 3]
    assert not model.asked, "it has seen no row of either"
    made.admit(0, [5], 0)
    assert made.propose(a_round([1, 1], [1, 1]), 3).count_R.tolist() == [3, 3] and model.asked == [[3, 0]]


@pytest.mark.parametrize(
    ("members", "is_alone"),
    [
        ((Says(1, 3), Model(2, 3)), True),
        ((Says(1, 3), Model(2, 2), Model(3, 3)), True),
        ((Says(1, 3), Says(2, 3), Model(3, 3)), False),  # the lookups compete
        ((Model(2, 3), Says(1, 3)), False),  # its drafts would count as the model's
    ],
)
def test_a_lookup_is_asked_alone_if_no_other_may_draft(members: tuple[Says, ...], is_alone: bool) -> None:
    made = chain(*members)
    assert made.limit_models([0, 1], 3, are_shown=True) is made
    found = made.limit_models([0, 1], 0, are_shown=False)
    assert isinstance(found, DrafterSandbox) and found.drafter is members[0] if is_alone else found is made
    made.admit(1, [], 0)
    made.restrict(1, (1,))
    assert made.limit_models([0, 1], 0, are_shown=False) is made, "one request may not have its drafts"
    assert (made.limit_models([0], 0, are_shown=False) is not made) == is_alone


def test_a_lookup_that_reads_taps_or_makes_fewer_drafts_is_asked_by_the_chain() -> None:
    tapping = Says(1, 3)
    tapping.spec = DraftSpec(host_tokens=True, taps=Taps(layers=(1,)))
    made = chain(tapping, Model(2, 3))
    assert made.limit_models([0], 0, are_shown=False) is made, "the chain picks its taps"
    made = chain(Says(1, 3), Model(2, 3), most=[2, 3])
    assert made.limit_models([0], 0, are_shown=False) is made, "it may be asked for more than it makes"


def test_what_a_lookup_alone_proposes_is_no_record_of_what_it_does_beside_others() -> None:
    made = chain(Says(1, 3), Model(2, 3))
    made.admit(0, [], 0)
    made.propose(a_round([1], [1]), 3)
    alone = made.limit_models([0], 0, are_shown=False)
    alone.propose(a_round([4], [4]), 3)
    made.limit_models([0], None, are_shown=True)
    made.propose(a_round([4], [1]), 3)  # verifies the lone lookup's drafts
    assert made.records[0].num_rounds == 0
