"""Faults of a drafter: output is unchanged, faults are counted, and the drafter is switched off after several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof import LLM, Drafter, DraftSpec, Proposal, SamplingParams, Verified
from draftproof.bench.compare import compare
from draftproof.drafters.sandbox import DrafterSandbox
from tests.conformance import faulty
from tests.conformance.cases import REPEATS, Requests, prompts, run
from tests.slow import few

SEEN = [
    "Raises",
    "RaisesInAdmit",
    "TooLarge",
    "Negative",
    "NotANumber",
    "DrawsFromNotANumber",
    "CountsTooMany",
]
SEEN += ["CountsNegative", "WrongShape", "OneRequestMore", "NotAProposal"]
SEEN += ["Exits", "ClosesGenerators", "ExitsInRelease", "RaisesWhatCannotBeShown"]
SEEN += ["GivesTensorsThatCannotBeRead", "GivesListsOfOtherThings", "GivesHugeNumbers"]
SEEN += ["DrawsOnAnotherDevice", "DrawsOfTooFewPositions"]
UNSEEN = ["Mutates", "KeepsTheTaps", "SpoilsWhatItWasLent", "GivesTouchyTensors", "GivesLists", "Meddles"]
UNSEEN += [kind.__name__ for kind in faulty.Meddles.__subclasses__()]
REQUESTS = Requests(
    [*prompts()[:3], REPEATS],
    [SamplingParams(temperature=t, seed=4, max_tokens=20, logprobs=1) for t in (0, 0.8, 0, 0)],
)


@pytest.mark.filterwarnings("ignore:drafter .* switched off")
@pytest.mark.parametrize("fault", few(SEEN + UNSEEN, "Raises", "NotANumber", "Mutates", "GivesLists"))
def test_output_does_not_move(fault: str) -> None:
    expected, _ = run(REQUESTS, dtype="float32")
    config = {"method": f"tests.conformance.faulty.{fault}", "num_speculative_tokens": 3, "policy": "fixed"}
    outputs, llm = run(REQUESTS, dtype="float32", speculative_config=config)
    assert not compare(expected, outputs)
    assert (llm.stats.num_drafter_faults > 0) == (fault in SEEN)
    if fault.startswith("Gives") and fault in UNSEEN:
        assert llm.stats.speculation.num_draft_tokens > 20


def test_every_fault_is_listed() -> None:
    names = {n for n, c in vars(faulty).items() if isinstance(c, type) and issubclass(c, faulty.Faulty)}
    assert names - {"Faulty", "RaisesInBind"} == {*SEEN, *UNSEEN}


def test_a_drafter_that_fails_at_start_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match=r"RaisesInBind.bind.runtime. raised OSError: no such thing"):
        LLM(speculative_config={"method": "tests.conformance.faulty.RaisesInBind"})


START = """
from draftproof import DraftSpec
def leave(*given): raise SystemExit(3)
class Leaves:
    spec = DraftSpec()
    def __init__(self, config): pass
    def propose(self, verified, num_drafts): leave()
"""
PLACES = {
    "module": "leave()",
    "init": "Leaves.__init__ = leave",
    "spec": "Leaves.spec = property(leave)",
    "bind": "Leaves.bind = leave",
}


@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_raised_at_start_is_the_callers_mistake(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even SystemExit becomes a ValueError, in all of the user's code that runs before the first token."""
    (tmp_path / f"leaves_in_{place}.py").write_text(START + PLACES[place])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"speculative_config: .*SystemExit: 3"):
        LLM(speculative_config={"method": f"leaves_in_{place}.Leaves"})


def test_a_member_of_a_chain_may_return_lists_too() -> None:
    expected, _ = run(REQUESTS, dtype="float32")
    members = [{"method": "tests.conformance.faulty.GivesLists"}, {"method": "ngram"}]
    config = {"method": "chain", "drafters": members, "num_speculative_tokens": 3, "policy": "fixed"}
    outputs, llm = run(REQUESTS, dtype="float32", speculative_config=config)
    assert not compare(expected, outputs) and not llm.stats.num_drafter_faults
    assert llm.stats.speculation.num_draft_tokens > 20


def test_an_interrupt_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(faulty.Raises, "spoil", interrupt)
    config = {"method": "tests.conformance.faulty.Raises", "policy": "fixed"}
    with pytest.raises(KeyboardInterrupt):
        run(REQUESTS, dtype="float32", speculative_config=config)


def test_repeated_faults_switch_the_drafter_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The first fault is logged with the place where it was raised, and without frames of the package itself."""
    config = {"method": "tests.conformance.faulty.Raises", "num_speculative_tokens": 3, "max_faults": 4}
    with pytest.warns(RuntimeWarning, match="Raises switched off after 4 faults.*no idea") as caught:
        _, llm = run(REQUESTS, dtype="float32", speculative_config=config)
    assert len([w for w in caught if "switched off" in str(w.message)]) == 1
    assert llm.stats.num_drafter_faults == 4
    logged = [r.getMessage() for r in caplog.records if "first fault" in r.getMessage()]
    assert len(logged) == 1 and "no idea" in logged[0] and "in spoil" in logged[0]
    assert f'{faulty.__file__}", line ' in logged[0].splitlines()[1]


def _verified(k_R: list[int]) -> Verified:
    n = len(k_R)
    return Verified(
        tokens_T=torch.zeros(n, dtype=torch.int64),
        positions_T=torch.zeros(n, dtype=torch.int64),
        query_start_loc_R1=torch.arange(n + 1),
        slots_R=torch.arange(n),
        live_R=torch.ones(n, dtype=torch.int64),
        next_R=torch.zeros(n, dtype=torch.int64),
        k_R=torch.tensor(k_R),
        taps=(),
        draw=None,  # type: ignore[arg-type]
        history=lambda r: torch.zeros(1, dtype=torch.int32),
    )


class _Fixed(Drafter):
    spec = DraftSpec()

    def __init__(self, tokens: list[list[int]], counts: list[int]) -> None:
        self.proposal = Proposal(torch.tensor(tokens), torch.tensor(counts))

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        return self.proposal


def test_a_slow_drafter_is_counted_against_its_time_limit() -> None:
    sandbox = DrafterSandbox(_Fixed([[1]], [1]), vocab_size=10, max_faults=9, time_limit=0.0)
    assert sandbox.propose(_verified([1]), 1).count_R.tolist() == [1]
    assert sandbox.num_faults == 1


@pytest.mark.parametrize(("eager", "number"), [(True, 3), (False, 2)], ids=["eager", "while recorded"])
def test_a_head_whose_state_broke_is_not_asked_again_for_that_request(
    monkeypatch: pytest.MonkeyPatch, eager: bool, number: int
) -> None:
    """One round fails for all its requests: they go on plainly, and a later request is drafted for again. A program
    recorded in the failed round is not replayed."""
    from tests.conformance.cases import CASES

    settings = {"dtype": "float32", "max_num_seqs": 1, "enforce_eager": eager}
    llm = LLM(**settings, speculative_config={**CASES["eagle3"].config, "policy": "fixed"})
    sandbox = llm.engine.runner.drafter
    assert sandbox is not None
    original, calls = sandbox.drafter.propose, []

    def once(verified: Verified, num_drafts: int) -> Proposal:
        calls.append(num_drafts)
        if len(calls) == number:
            raise RuntimeError("once")
        return original(verified, num_drafts)

    monkeypatch.setattr(sandbox.drafter, "propose", once)
    outputs = llm.generate(REQUESTS.prompts[:2], REQUESTS.params[:2], use_tqdm=False)
    expected = LLM(**settings).generate(REQUESTS.prompts[:2], REQUESTS.params[:2], use_tqdm=False)
    assert not compare(expected, outputs)
    first, second = (o.metrics.speculation for o in outputs)
    assert first.num_draft_tokens <= 15 and first.num_rounds > 8
    assert second.num_draft_tokens > 30
