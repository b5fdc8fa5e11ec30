"""Rejection and block verification on a five-token vocabulary: the emitted tokens follow the target's distribution.

Shapes: N requests, K drafts, M rows, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.kernels.ops import TORCH
from draftproof.sampling import lossy
from draftproof.sampling.lossy import Domains, LossyVerifier
from draftproof.sampling.noise import Domain
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.sampler import Sampler
from draftproof.sampling.verifier import VerifyRows, accept_exact
from draftproof.types import SamplingParams
from tests.sampling.trials import KINDS, MODES, START, Mode, N, Trials, V, one_round, p_value, setting


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_follow_the_target(kind: str, num_drafts: int, mode: Mode) -> None:
    p, verdict = one_round(setting(kind, num_drafts), mode)
    assert p > 1e-4
    accepted = (verdict.num_emitted_R - 1).double().mean().item()
    if kind == "equal":
        assert accepted == num_drafts
    if kind == "disjoint":
        assert accepted == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.9, "min_p": 0.05}]
)
@pytest.mark.parametrize("kind", ["random", "near"])
def test_tokens_follow_the_target_under_temperature_and_filters(
    kind: str, filters: dict[str, float], temperature: float, mode: Mode
) -> None:
    p, _ = one_round(setting(kind, 2, temperature=temperature, **filters), mode)
    assert p > 1e-4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_may_vary_per_request(kind: str, mode: Mode) -> None:
    p, verdict = one_round(setting(kind, 3), mode, counts=(0, 3, 1, 2))
    assert p > 1e-4
    assert (verdict.num_emitted_R - 1 <= torch.tensor([0, 3, 1, 2])[torch.arange(N) % 4]).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["random", "near", "zero where p is not"])
def test_a_drafter_that_does_not_say_its_q_counts_as_one_hot(kind: str, mode: Mode) -> None:
    p, verdict = one_round(setting(kind, 2), mode, record=False)
    assert p > 1e-4
    assert verdict.num_emitted_R.max() > 1


@pytest.mark.parametrize("mode", MODES)
def test_a_token_other_than_the_one_drawn_counts_as_one_hot(mode: Mode) -> None:
    """A drafter that draws and then proposes something else must not be believed about q."""
    s = setting("near", 2)
    trials = Trials(s, mode)
    trials.draft(START, 2)
    trials.tokens_SL[:, START] = (trials.tokens_SL[:, START] + 1) % V
    verdict = trials.verify(START, torch.full((N,), 2), 3)
    assert p_value(trials.complete(trials.accept(verdict, START)), s.joint()) > 1e-4


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_residual_drawn_from_the_drafts_noise_is_caught(mode: Mode, num_drafts: int) -> None:
    """The known mistake: with shared noise the residual is biased. The function above must see it."""
    s = setting("uneven residual", num_drafts)
    assert one_round(s, mode)[0] > 1e-4
    assert one_round(s, mode, Domains(residual=Domain.DRAFT))[0] < 1e-8


@pytest.mark.parametrize("mode", MODES)
def test_acceptance_noise_shared_with_the_drafts_is_caught(mode: Mode) -> None:
    assert one_round(setting("random", 1), mode, Domains(accept=Domain.DRAFT))[0] < 1e-8


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_q_is_caught(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: what was drawn is forgotten in favour of a uniform q."""
    original = lossy.DraftDistribution.of

    def uniform_q(
        self: lossy.DraftDistribution, rows: VerifyRows, seeds_R: Tensor, drafts_RK: Tensor
    ) -> Tensor:
        return torch.full_like(original(self, rows, seeds_R, drafts_RK), 1 / V)

    monkeypatch.setattr(lossy.DraftDistribution, "of", uniform_q)
    assert one_round(setting("random", 1), mode)[0] < 1e-8


def several_rounds(mode: Mode) -> float:
    """Rounds of up to two drafts until four tokens stand; positions refused in one round are drafted again."""
    s = setting("random", 3)
    trials = Trials(s, mode)
    length_N = torch.full((N,), START)
    end = START + 4
    for length in range(START, end):
        here_N = length_N == length
        num = min(2, end - length - 1)
        before_SL = trials.tokens_SL.clone()
        trials.draft(length, num)
        verdict = trials.verify(length, torch.full((N,), num), num + 1)
        after_N = trials.accept(verdict, length)
        trials.tokens_SL = torch.where(here_N[:, None], trials.tokens_SL, before_SL)
        length_N = torch.where(here_N, after_N, length_N)
    assert (length_N == end).all()
    return p_value(trials.code(length_N), s.joint())


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_several_rounds_follow_the_target(mode: Mode) -> None:
    assert several_rounds(mode) > 1e-4


def test_noise_that_is_not_keyed_by_the_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block verification looks at later drafts, so drafting a position again needs fresh noise."""
    original = lossy.derive
    monkeypatch.setattr(
        lossy, "derive", lambda seeds_M, domain, rounds_M: original(seeds_M, domain, rounds_M * 0)
    )
    assert several_rounds("block") < 1e-7


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("kind", ["random", "near", "zero where p is not"])
def test_block_accepts_at_least_as_much_as_rejection(kind: str, num_drafts: int) -> None:
    s = setting(kind, num_drafts)
    accepted = {mode: (one_round(s, mode)[1].num_emitted_R - 1).double() for mode in MODES}
    gain = accepted["block"].mean() - accepted["rejection"].mean()
    error = (accepted["block"].var() + accepted["rejection"].var()).sqrt() / N**0.5
    assert gain > -3 * error
    if kind == "random" and num_drafts == 3:
        assert gain > 3 * error
    if num_drafts == 1:
        p_V, q_V = s.probabilities(s.target[0])[0], s.probabilities(s.draft[0])[0]
        optimum = torch.minimum(p_V, q_V).sum().item()
        for mode in MODES:
            assert abs(accepted[mode].mean().item() - optimum) < 4 * 0.5 / N**0.5


@pytest.mark.parametrize("mode", MODES)
def test_greedy_requests_get_the_exact_rule(mode: Mode) -> None:
    trials = Trials(setting("near", 3, temperature=0.0), mode)
    trials.draft(START, 3)
    flip_N = torch.arange(N) % 3 == 0
    drafts_N = trials.tokens_SL[:, START + 1]
    trials.tokens_SL[:, START + 1] = torch.where(flip_N, (drafts_N + 1) % V, drafts_N)
    verdict = trials.verify(START, torch.full((N,), 3), 4)
    rows = VerifyRows(
        first_R=trials.slots_N * 4,
        num_R=torch.full((N,), 4),
        slots_R=trials.slots_N,
        lengths_R=torch.full((N,), START),
        draft_count_R=torch.full((N,), 3),
        width=4,
    )
    exact = accept_exact(trials.target_logits(START, 4).flatten(0, 1).argmax(-1), rows, trials.tokens_SL)
    assert torch.equal(verdict.tokens_RW, exact.tokens_RW)
    assert torch.equal(verdict.num_emitted_R, exact.num_emitted_R)


@pytest.mark.parametrize("mode", MODES)
def test_requests_in_mid_prefill_emit_nothing_and_a_row_without_a_number_emits_minus_one(mode: Mode) -> None:
    table = SamplingTable(3, V)
    table.params_S.temperature_M.fill_(1.0)
    verifier = LossyVerifier(Sampler(table, TORCH), mode, 2)
    rows = VerifyRows(
        first_R=torch.tensor([0, 99, 1]),
        num_R=torch.tensor([1, 0, 2]),
        slots_R=torch.tensor([0, 1, 2]),
        lengths_R=torch.tensor([3, 3, 3]),
        draft_count_R=torch.tensor([0, 0, 1]),
        width=3,
    )
    logits_MV = torch.zeros(3, V)
    logits_MV[0] = torch.nan
    slots = [0, 2, 2]
    tokens_SL = torch.ones(3, 8, dtype=torch.int32)
    verdict = verifier.verify(
        logits_MV, torch.tensor(slots), torch.tensor([3, 3, 4]), tokens_SL, rows, has_processing=False
    )
    assert verdict.num_emitted_R[:2].tolist() == [1, 0]
    assert verdict.tokens_RW[:2].tolist() == [[-1] * 3] * 2
    assert verdict.num_emitted_R[2] >= 1
    assert (verdict.tokens_RW[2, : int(verdict.num_emitted_R[2])] >= 0).all()


def test_a_reduced_draft_vocabulary_is_scattered_to_target_ids() -> None:
    table = SamplingTable(1, V)
    table.params_S.temperature_M.fill_(1.0)
    verifier = LossyVerifier(Sampler(table, TORCH), "rejection", 1)
    ids_V = torch.tensor([1, 4])
    draw = verifier.drawer(torch.tensor([0]), torch.tensor([3]))
    token = int(draw(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), torch.tensor([3]), ids_V))
    rows = VerifyRows(
        first_R=torch.tensor([0]),
        num_R=torch.tensor([2]),
        slots_R=torch.tensor([0]),
        lengths_R=torch.tensor([3]),
        draft_count_R=torch.tensor([1]),
        width=2,
    )
    q_RKV = verifier.distribution.of(rows, table.params_S.seeds_M[:1], torch.tensor([[token]]))
    expected_V = torch.zeros(V).index_copy_(0, ids_V, torch.softmax(torch.tensor([0.0, 1.0]), 0))
    torch.testing.assert_close(q_RKV[0, 0], expected_V)
    later = VerifyRows(
        first_R=rows.first_R,
        num_R=rows.num_R,
        slots_R=rows.slots_R,
        lengths_R=rows.lengths_R + 1,
        draft_count_R=rows.draft_count_R,
        width=2,
    )
    other_RKV = verifier.distribution.of(later, table.params_S.seeds_M[:1], torch.tensor([[token]]))
    assert other_RKV[0, 0].tolist() == torch.eye(V)[token].tolist()  # another round's record does not count


def test_what_was_drawn_for_no_position_is_no_record() -> None:
    """In a chain another drafter's token may be proposed in its place: that one was not drawn, even if it is equal."""
    table = SamplingTable(1, V)
    table.admit(0, SamplingParams(temperature=1.0), 5, 1)
    verifier = LossyVerifier(Sampler(table, TORCH), "rejection", 2)
    slots_R, lengths_R = torch.tensor([0]), torch.tensor([3])
    for position, certain in ((-1, True), (3, False)):
        drawn_R = verifier.drawer(slots_R, lengths_R)(torch.zeros(1, V), None, torch.tensor([position]))
        one = torch.ones_like(slots_R)
        rows = VerifyRows(
            first_R=0 * one, num_R=2 * one, slots_R=slots_R, lengths_R=lengths_R, draft_count_R=one, width=2
        )
        q_RKV = verifier.distribution.of(rows, table.params_S.seeds_M[slots_R], drawn_R[:, None])
        assert (float(q_RKV.max()) == 1) == certain
