"""The exact rule against a loop a child could check, and mutations of it that must be caught.

Shapes: M sampled rows, R requests, W = K + 1.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftproof.kernels.ops import TORCH
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.sampler import Sampler
from draftproof.sampling.verifier import ExactVerifier, VerifyResult, VerifyRows, accept_exact, drafts_of
from draftproof.types import SamplingParams


@dataclasses.dataclass
class Case:
    sampled: list[int]
    rows: VerifyRows
    tokens_SL: Tensor


def random_case(rng: random.Random, width: int, num_requests: int = 6, vocab: int = 3) -> Case:
    """Drafts agree more often than not; slots in any order; some requests in mid-prefill."""
    tokens_SL = torch.tensor([[rng.randrange(vocab) for _ in range(40)] for _ in range(9)], dtype=torch.int32)
    slots = rng.sample(range(9), num_requests)
    first, num, count, lengths, sampled = [], [], [], [], []
    for slot in slots:
        rows = 0 if rng.random() < 0.2 else rng.randint(1, width)
        first.append(len(sampled) if rows else rng.choice([0, 999]))
        num.append(rows)
        count.append(rng.choice([rows - 1, rng.randrange(rows)]) if rows else 0)
        lengths.append(rng.randint(1, 40 - count[-1]))
        known = [*tokens_SL[slot].tolist(), *[0] * width]
        drafts = known[lengths[-1] : lengths[-1] + rows]
        sampled += [token if rng.random() < 0.7 else rng.randrange(vocab) for token in drafts]
    rows_R = VerifyRows(
        first_R=torch.tensor(first),
        num_R=torch.tensor(num),
        slots_R=torch.tensor(slots),
        lengths_R=torch.tensor(lengths),
        draft_count_R=torch.tensor(count),
        width=width,
    )
    return Case(sampled, rows_R, tokens_SL)


def by_loop(case: Case) -> list[list[int]]:
    """The emitted tokens of each request."""
    out = []
    columns = (
        case.rows.first_R,
        case.rows.num_R,
        case.rows.slots_R,
        case.rows.lengths_R,
        case.rows.draft_count_R,
    )
    for first, num, slot, length, count in zip(*(c.tolist() for c in columns), strict=True):
        emitted: list[int] = []
        for j in range(num):
            emitted.append(case.sampled[first + j])
            if j >= count or int(case.tokens_SL[slot, length + j]) != case.sampled[first + j]:
                break
        out.append(emitted)
    return out


def agrees(verdict: VerifyResult, case: Case) -> bool:
    emitted = [
        row[:n] for row, n in zip(verdict.tokens_RW.tolist(), verdict.num_emitted_R.tolist(), strict=True)
    ]
    padding = [
        set(row[n:]) <= {-1}
        for row, n in zip(verdict.tokens_RW.tolist(), verdict.num_emitted_R.tolist(), strict=True)
    ]
    return emitted == by_loop(case) and all(padding) and verdict.tokens_RW.shape[1] == case.rows.width


@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_the_rule_equals_the_loop(width: int) -> None:
    rng = random.Random(width)
    cases = [random_case(rng, width) for _ in range(200)]
    assert all(agrees(accept_exact(torch.tensor(c.sampled).long(), c.rows, c.tokens_SL), c) for c in cases)
    if width > 1:
        emitted = {len(tokens) for c in cases for tokens in by_loop(c)}
        assert {1, width} <= emitted


def accept_one_too_many(sampled_M: Tensor, rows: VerifyRows, tokens_SL: Tensor) -> VerifyResult:
    """The mutation: a draft that differs is kept, where there is one."""
    right = accept_exact(sampled_M, rows, tokens_SL)
    accepted_R = torch.minimum(right.num_emitted_R, rows.draft_count_R)
    at_W = torch.arange(rows.width)
    drafts_RW = torch.nn.functional.pad(drafts_of(rows, at_W[:-1], tokens_SL), (0, 1)).long()
    tokens_RW = torch.where(at_W < accepted_R[:, None], drafts_RW, right.tokens_RW)
    return VerifyResult(tokens_RW, (accepted_R + 1) * (rows.num_R > 0))


def test_accepting_one_draft_too_many_is_caught() -> None:
    rng = random.Random(0)
    caught = 0
    for case in (random_case(rng, 4) for _ in range(100)):
        verdict = accept_one_too_many(torch.tensor(case.sampled).long(), case.rows, case.tokens_SL)
        accepted_R = torch.tensor([max(0, len(tokens) - 1) for tokens in by_loop(case)])
        refused = bool((accepted_R < case.rows.draft_count_R).any())
        assert agrees(verdict, case) == (not refused)
        caught += refused
    assert caught > 40


def test_ignoring_the_draft_count_is_caught() -> None:
    """Tokens that stand after the drafts are no drafts, even where they happen to agree."""
    rng = random.Random(0)
    cases = [random_case(rng, 4) for _ in range(50)]
    wrong = 0
    for case in cases:
        greedy_rows = dataclasses.replace(case.rows, draft_count_R=(case.rows.num_R - 1).clamp(min=0))
        wrong += not agrees(
            accept_exact(torch.tensor(case.sampled).long(), greedy_rows, case.tokens_SL), case
        )
    assert wrong > 10


def test_a_pass_of_prompts_only_emits_nothing() -> None:
    zero_R = torch.zeros(2, dtype=torch.int64)
    for width in (1, 3):
        rows = VerifyRows(
            first_R=zero_R, num_R=zero_R, slots_R=zero_R, lengths_R=zero_R, draft_count_R=zero_R, width=width
        )
        verdict = accept_exact(torch.zeros(0, dtype=torch.int64), rows, torch.zeros(1, 4, dtype=torch.int32))
        assert verdict.tokens_RW.tolist() == [[-1] * width] * 2
        assert verdict.num_emitted_R.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verified_drafts_give_the_tokens_of_plain_decoding(temperature: float) -> None:
    """Whatever the drafts, a chain of verdicts is the text that one row at a time would give."""
    vocab, table = 5, SamplingTable(1, 5)
    table.admit(0, SamplingParams(temperature=temperature, repetition_penalty=1.3), 17, prompt_len=1)
    verifier = ExactVerifier(Sampler(table, TORCH))
    model_VV = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(1))

    def generate(draft: Callable[[int], list[int]], num: int) -> tuple[list[int], int]:
        tokens_SL, length, accepted = torch.zeros(1, 64, dtype=torch.int32), 1, 0
        while length < num:
            drafts = draft(length)
            tokens_SL[0, length : length + len(drafts)] = torch.tensor(drafts)
            rows = 1 + len(drafts)
            logits_MV = model_VV[tokens_SL[0, length - 1 : length + len(drafts)].long()]
            verify = VerifyRows(
                first_R=torch.tensor([0]),
                num_R=torch.tensor([rows]),
                slots_R=torch.tensor([0]),
                lengths_R=torch.tensor([length]),
                draft_count_R=torch.tensor([len(drafts)]),
                width=rows,
            )
            positions_M = length + torch.arange(rows)
            slots = [0] * rows
            verdict = verifier.verify(
                logits_MV, torch.tensor(slots), positions_M, tokens_SL, verify, has_processing=True
            )
            emitted = int(verdict.num_emitted_R)
            tokens_SL[0, length : length + emitted] = verdict.tokens_RW[0, :emitted]
            length, accepted = length + emitted, accepted + emitted - 1
        return tokens_SL[0, :num].tolist(), accepted

    plain, none = generate(lambda _: [], 50)
    rng = random.Random(0)

    def often_right(length: int) -> list[int]:
        return [
            t if rng.random() < 0.7 else rng.randrange(vocab)
            for t in plain[length : length + rng.randrange(6)]
        ]

    drafted, some = generate(often_right, 50)
    assert drafted == plain
    assert none == 0
    assert some > 0
