"""Penalties, bans, allowed ids, min_tokens and bias, each against its definition, drafts of the same round included.

Shapes: M rows, V vocabulary, S slots, L positions.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from draftproof.kernels.ops import TORCH, versions
from draftproof.kernels.process.spec import HEADER, NO_NUMBER, NONE_LEFT
from draftproof.runtime import native
from draftproof.sampling.params import SamplingTable
from draftproof.types import SamplingParams
from tests.gpu import process_cases

V = 11
INF = float("inf")


def run(
    params: SamplingParams,
    tokens: list[int],
    prompt_len: int,
    positions: list[int],
    logits_MV: Tensor,
    stop_ids: frozenset[int] = frozenset(),
    bad_words_ids: list[list[int]] | None = None,
) -> Tensor:
    """Processed logits of rows of one request that sits in slot 1 of 3."""
    table = SamplingTable(3, V)
    table.admit(1, params, 5, prompt_len, stop_ids, bad_words_ids)
    tokens_SL = torch.full((3, 32), 9, dtype=torch.int32)  # 9: left from an earlier owner
    tokens_SL[1, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return processed(table, logits_MV, [1] * len(positions), positions, tokens_SL)


def processed(
    table: SamplingTable, logits_MV: Tensor, slots: list[int], positions: list[int], tokens_SL: Tensor
) -> Tensor:
    """By every version, with the same bits."""
    slots_M = torch.tensor(slots)
    lists = table.lists_SN, table.masks_MW
    given = (table.params_S[slots_M], slots_M, torch.tensor(positions), tokens_SL, *lists)
    found = [
        ops.process(logits_MV, *given)[0] for ops in versions(torch.device("cpu"), native.load()).values()
    ]
    assert all(torch.equal(out_MV, found[0]) for out_MV in found)
    return found[0]


def noise(rows: int) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(0))


def by_definition(p: SamplingParams, prompt: list[int], output: list[int], row: list[float]) -> list[float]:
    row = list(row)
    for token in range(V):
        if token in prompt + output:
            row[token] = (
                row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
            )
        count = output.count(token)
        row[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return row


PENALTIES = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.25},
    {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("fields", PENALTIES)
def test_penalties_count_the_context_and_drafts_of_the_same_round(fields: dict[str, float]) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    tokens = [3, 3, 7, 1, 1, 4, 1, 6]  # prompt 3 3 7, output 1 1, then drafts 4 1 6 of this round
    logits_MV = noise(4)
    out_MV = run(params, tokens, 3, [5, 6, 7, 8], logits_MV)
    for j, row in enumerate(logits_MV.tolist()):
        expected = by_definition(params, tokens[:3], tokens[3 : 5 + j], row)
        torch.testing.assert_close(out_MV[j], torch.tensor(expected), rtol=1e-6, atol=1e-6)
    assert not torch.equal(out_MV[1] - logits_MV[1], out_MV[0] - logits_MV[0])  # the draft counted


def test_tokens_at_and_after_the_sampled_position_do_not_count() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    logits_MV = noise(1)
    a = run(params, [1, 2, 3, 4, 5], 2, [3], logits_MV)
    b = run(params, [1, 2, 3, 9, 9], 2, [3], logits_MV)
    assert torch.equal(a, b)


def test_bad_words_are_found_across_the_border_of_known_tokens_and_drafts() -> None:
    tokens = [5, 6, 1, 2, 3]  # prompt 5 6, output 1, drafts 2 3
    words = [[1, 2, 8], [2, 3, 4], [7], [6, 1, 2], [1, 2, 3, 9, 0]]
    out_MV = run(SamplingParams(), tokens, 2, [3, 4, 5], noise(3), bad_words_ids=words)
    banned = [set(torch.where(row == -INF)[0].tolist()) for row in out_MV]
    # 6 1 -> 2 would begin in the prompt: not banned, as in vLLM
    assert banned == [{7}, {7, 8}, {7, 4}]


def test_bad_words_equal_the_definition_on_random_texts() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(60):
        words = [[rng.randrange(3) for _ in range(rng.randrange(1, 4))] for _ in range(4)]
        tokens = [rng.randrange(3) for _ in range(9)]
        out_MV = run(SamplingParams(), tokens, 2, [3, 6, 9], torch.zeros(3, V), bad_words_ids=words)
        for row, position in zip(out_MV, (3, 6, 9), strict=True):
            output = tokens[2:position]
            expected = {
                w[-1]
                for w in words
                if len(w) <= len(output) + 1 and output[len(output) + 1 - len(w) :] == w[:-1]
            }
            found += len(expected)
            assert set(torch.where(row == -INF)[0].tolist()) == expected
    assert found > 50


def test_min_tokens_holds_stop_ids_back_until_enough_are_generated() -> None:
    params = SamplingParams(min_tokens=3)
    out_MV = run(params, [1, 2, 3, 4, 5, 6], 2, [2, 3, 4, 5, 6], noise(5), stop_ids=frozenset({0, 10, 99}))
    held = [row.isneginf().nonzero().flatten().tolist() for row in out_MV]
    assert held == [[0, 10]] * 3 + [[]] * 2


def test_allowed_ids_and_bias() -> None:
    logits_MV = noise(2)
    params = SamplingParams(allowed_token_ids=[2, 5, 6], logit_bias={5: 3.0, 6: -1000.0, 7: 50.0})
    out_MV = run(params, [1, 2, 3], 1, [2, 3], logits_MV)
    expected_MV = torch.full_like(logits_MV, -INF)
    expected_MV[:, [2, 5, 6]] = logits_MV[:, [2, 5, 6]] + torch.tensor([0.0, 3.0, -100.0])
    assert torch.equal(out_MV, expected_MV)


def test_penalties_come_after_bias_as_in_vllm() -> None:
    logits_MV = torch.full((1, V), -1.0)
    out_MV = run(SamplingParams(logit_bias={4: 3.0}, repetition_penalty=2.0), [4], 1, [1], logits_MV)
    assert out_MV[0, 4].item() == (-1.0 + 3.0) / 2.0


def test_a_request_without_features_costs_nothing_and_keeps_its_bits() -> None:
    table = SamplingTable(4, V)
    table.admit(0, SamplingParams(temperature=0.7, top_p=0.9), 1, 3)
    table.admit(
        2, SamplingParams(repetition_penalty=1.5, logit_bias={1: 2.0}, min_tokens=4), 2, 1, frozenset({3})
    )
    tokens_SL = torch.randint(0, V, (4, 20), dtype=torch.int32)
    logits_MV = noise(4)
    before = logits_MV.clone()
    assert not table.has_processing([0, 1]) and table.has_processing([0, 2])
    slots = [0, 2, 0, 2]
    mixed_MV = processed(table, logits_MV, slots, [3, 4, 5, 6], tokens_SL)
    assert torch.equal(mixed_MV[::2], before[::2])
    assert torch.equal(logits_MV, before)  # raw logits are still needed for logprobs
    alone_MV = processed(table, logits_MV[1:2], [2], [4], tokens_SL)
    assert torch.equal(mixed_MV[1:2], alone_MV)
    assert not torch.equal(mixed_MV[1], before[1])


def test_a_released_slot_is_plain_again() -> None:
    table = SamplingTable(1, V)
    fresh = table.params_S.packed_MC.clone()
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0, frequency_penalty=1.0,
        repetition_penalty=2.0, allowed_token_ids=[1],
    )  # fmt: skip
    table.admit(0, params, 99, 4)
    assert table.has_processing([0]) and not torch.equal(table.params_S.packed_MC, fresh)
    table.release(0)
    assert not table.has_processing([0]) and torch.equal(table.params_S.packed_MC, fresh)


def test_a_row_of_parameters_is_what_was_asked_for() -> None:
    table = SamplingTable(2, V)
    given = {"top_k": 3, "temperature": 0.5, "top_p": 0.25, "min_p": 0.125}
    penalties = {"repetition_penalty": 2.0, "presence_penalty": -1.5, "frequency_penalty": 0.75}
    table.admit(1, SamplingParams(**given, **penalties, min_tokens=6), -(2**63), 9)  # type: ignore[arg-type]
    p = table.params_S
    columns = (p.seeds_M, p.top_k_M, p.temperature_M, p.top_p_M, p.min_p_M)
    columns += (p.repetition_M, p.presence_M, p.frequency_M, p.prompt_len_M, p.held_until_M)
    assert [c.tolist()[1] for c in columns] == [-(2**63), 3, 0.5, 0.25, 0.125, 2.0, -1.5, 0.75, 9, 15]
    assert [c.tolist()[0] for c in columns] == [0, 0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0]


def test_a_list_that_is_longer_than_any_before_moves_all_and_is_a_generation_of_its_own() -> None:
    table, size = SamplingTable(3, 5000), 5000
    table.admit(0, SamplingParams(logit_bias={7: 2.0}), 1, 1)
    first = table.lists_SN
    table.admit(1, SamplingParams(allowed_token_ids=[0, 31, 32, 4999]), 1, 1)
    assert table.generation == 2 and table.lists_SN.shape[1] >= HEADER + size // 32 > first.shape[1]
    tokens_SL = torch.zeros(3, 4, dtype=torch.int32)
    out_MV = processed(table, torch.zeros(2, size), [0, 1], [2, 2], tokens_SL)
    assert out_MV[0].nonzero().flatten().tolist() == [7]
    assert out_MV[1].isfinite().nonzero().flatten().tolist() == [0, 31, 32, 4999]


def test_why_a_row_has_no_token() -> None:
    logits_MV = noise(5)
    logits_MV[0, 3], logits_MV[1, 3], logits_MV[2] = torch.nan, INF, -INF
    logits_MV[3, 1:] = -INF
    table = SamplingTable(1, V)
    rows = torch.zeros(5, dtype=torch.int64)
    lists = table.lists_SN, table.masks_MW
    given = (table.params_S[rows], rows, rows, torch.zeros(1, 2, dtype=torch.int32), *lists)
    for ops in versions(torch.device("cpu"), native.load()).values():
        assert ops.process(logits_MV, *given)[1].tolist() == [NO_NUMBER] * 3 + [NONE_LEFT] * 2


def test_masks_rule_out_what_they_do_not_name_in_the_rows_of_their_request_alone() -> None:
    table, size = SamplingTable(3, 70, max_rows=5), 70
    table.admit(0, SamplingParams(logit_bias={5: 2.0, 6: 3.0}), 1, 1, is_masked=True)
    table.admit(1, SamplingParams(), 1, 1)
    assert table.generation == 2 and table.has_processing([0]) and not table.has_processing([1])

    def mask(*ids: int) -> bytes:
        return sum(1 << i for i in ids).to_bytes(12, "little")

    table.load_masks([(0, mask(0, 31, 32, 69)), (3, mask(5) + mask())])
    table.load_masks([(0, mask(2, 64))])  # the next pass has fewer rows
    table.load_masks([(0, mask(0, 31, 32, 69)), (3, mask(5) + mask())])
    tokens_SL = torch.zeros(3, 4, dtype=torch.int32)
    out_MV = processed(table, torch.zeros(5, size), [0, 1, 1, 0, 0], [2] * 5, tokens_SL)
    allowed = [row_V.isfinite().nonzero().flatten().tolist() for row_V in out_MV]
    assert allowed == [[0, 31, 32, 69], list(range(size)), list(range(size)), [5], []]
    assert out_MV[3, 5] == 2, "a bias holds beside a mask"
    table.release(0)
    assert not table.has_processing([0]), "its next owner has no masks"


@pytest.mark.parametrize("width", [37, 3000])
def test_every_version_gives_the_bits_of_its_twin(width: int) -> None:
    given = process_cases.case(width, torch.device("cpu"))
    expected_MV, expected_M = TORCH.process(*given)
    num_changed = (expected_MV != given[0]).any(1).sum()
    assert num_changed > 20
    for ops in versions(torch.device("cpu"), native.load()).values():
        found_MV, found_M = ops.process(*given)
        assert torch.equal(found_MV.view(torch.int32), expected_MV.view(torch.int32))
        assert torch.equal(found_M, expected_M)
