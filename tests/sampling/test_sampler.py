"""The sampler over a table of slots: who gets which parameters, drafts under the same noise, logprobs.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from draftproof.kernels.ops import TORCH
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.sampler import Sampler, top_ids
from draftproof.types import SamplingParams

V = 40


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def sampler() -> Sampler:
    table = SamplingTable(4, V)
    table.admit(0, SamplingParams(temperature=0.0), 1, 2)
    table.admit(1, SamplingParams(temperature=1.0), 2, 2)
    table.admit(2, SamplingParams(temperature=1.0, top_k=4), 3, 2)
    table.admit(3, SamplingParams(temperature=1.0, presence_penalty=1.0), 4, 2)
    return Sampler(table, TORCH)


def noise(rows: int, width: int = V) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


def test_a_row_gets_the_parameters_of_its_slot_wherever_it_stands() -> None:
    s, logits_MV = sampler(), noise(8)
    tokens_SL = torch.randint(0, V, (4, 30), dtype=torch.int32)
    slots = [3, 0, 2, 1, 1, 0, 2, 3]
    positions_M = torch.arange(5, 13)
    tokens_M = s.sample(logits_MV, torch.tensor(slots), positions_M, tokens_SL, has_processing=True)
    alone = [
        s.sample(
            logits_MV[m : m + 1], torch.tensor([slot]), positions_M[m : m + 1], tokens_SL, has_processing=True
        )
        for m, slot in enumerate(slots)
    ]
    assert torch.equal(tokens_M, torch.cat(alone))
    assert tokens_M[1] == logits_MV[1].argmax()


def test_a_drafter_with_the_targets_logits_draws_the_targets_tokens() -> None:
    """Noise is shared: equal logits give equal tokens, filters included; another position gives others."""
    s, rows = sampler(), 300
    logits_MV = noise(rows)
    slots_M = torch.arange(rows) % 3
    positions_M = torch.arange(rows)
    target_M = s.sample(
        logits_MV, slots_M, positions_M, torch.zeros(4, 400, dtype=torch.int32), has_processing=False
    )
    assert torch.equal(s.draw(logits_MV, slots_M, positions_M), target_M)
    draw = s.drawer(torch.tensor([2, 1, 0]))
    rows_M = 2 - slots_M
    assert torch.equal(draw(logits_MV, rows_M, positions_M), target_M)
    assert torch.equal(draw(logits_MV, rows_M, positions_M), target_M)
    other_M = s.draw(logits_MV, slots_M, positions_M + 1)
    sampled_M = slots_M > 0
    assert (other_M == target_M)[sampled_M].double().mean() < 0.5
    assert torch.equal(other_M[~sampled_M], target_M[~sampled_M])


def test_the_rounds_draw_follows_when_other_rows_are_asked_for() -> None:
    s = sampler()
    logits_MV = noise(3)
    draw = s.drawer(torch.tensor([1, 0, 2]))
    draw(logits_MV, torch.tensor([0, 1, 2]), torch.tensor([5, 5, 5]))
    some_M = draw(logits_MV[:2], torch.tensor([2, 1]), torch.tensor([5, 5]))
    assert torch.equal(some_M, s.draw(logits_MV[:2], torch.tensor([2, 0]), torch.tensor([5, 5])))


def test_logprobs_are_those_of_the_raw_distribution_with_ranks() -> None:
    logits_MV = noise(6)
    tokens_M = torch.tensor([0, 3, 39, 7, 7, 1])
    logprob_M, rank_M, ids_MN, top_MN = sampler().logprobs(logits_MV, tokens_M, 5)
    expected_MV = torch.log_softmax(logits_MV.double(), -1)
    torch.testing.assert_close(
        logprob_M.double(), expected_MV.gather(1, tokens_M[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    order_MV = expected_MV.argsort(-1, descending=True)
    assert torch.equal(ids_MN, order_MV[:, :5])
    assert rank_M.tolist() == [order_MV[m].tolist().index(t) + 1 for m, t in enumerate(tokens_M.tolist())]
    torch.testing.assert_close(top_MN.double(), expected_MV.gather(1, ids_MN), rtol=1e-5, atol=1e-5)
    assert sampler().logprobs(logits_MV, tokens_M, 0)[2].shape == (6, 0)


def test_equal_logits_are_ordered_by_id_in_list_and_rank() -> None:
    logits_MV = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, 2.0]])
    assert top_ids(logits_MV, 6).tolist() == [[1, 2, 5, 0, 3, 4]]
    ranks = [sampler().logprobs(logits_MV, torch.tensor([t]), 1)[1].item() for t in range(6)]
    assert ranks == [4, 1, 2, 5, 6, 3]


def test_top_ids_handle_negative_and_infinite_logits() -> None:
    logits_MV = torch.tensor([[-3.0, -torch.inf, -1.0, 1e-40, -1e30]])
    assert top_ids(logits_MV, 5).tolist() == [[3, 2, 0, 4, 1]]
    assert top_ids(logits_MV, 9).shape == (1, 5)


@pytest.mark.parametrize("width", [5, 37, 8191])
def test_logprobs_of_a_row_have_the_same_bits_in_any_batch(width: int) -> None:
    s, rows = sampler(), 17
    logits_MV = noise(rows, width) * 3
    tokens_M = torch.arange(rows) % width
    torch.set_num_threads(1)
    alone = [s.logprobs(logits_MV[m : m + 1], tokens_M[m : m + 1], 4) for m in range(rows)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together = s.logprobs(logits_MV, tokens_M, 4)
        for i, part in enumerate(together):
            assert torch.equal(part, torch.cat([a[i] for a in alone]))
