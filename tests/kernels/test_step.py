"""Bookkeeping of a step: worked examples, and the compiled version against the torch one on random steps."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from draftproof.kernels.step.compiled import CompiledStep
from draftproof.kernels.step.reference import TORCH_STEP
from draftproof.kernels.step.spec import DraftRows, Layout, SlotState, StepOps
from draftproof.runtime import native

MASK = 99
LIBRARY = native.load()
COMPILED = None if LIBRARY is None else CompiledStep(LIBRARY)
STEPS = [pytest.param(TORCH_STEP, id="torch")]
STEPS += [] if COMPILED is None else [pytest.param(COMPILED, id="compiled")]


def build(
    ops: StepOps, *, context: str, shift: int = 0, anchor: bool = False, masks: int = 0, read: int = 1
) -> DraftRows:
    """Request 0: [s5 d6 d7 d8]@5..8 in slot 3, s5 and d6 kept, next r7. Request 1: prompt rows 0..2, next x3."""
    return ops.draft_rows(
        Layout(("none", "last", "all").index(context), shift, int(anchor), masks, read, MASK),
        query_start_loc_R1=torch.tensor([0, 4, 7]),
        tokens_T=torch.tensor([15, 16, 17, 18, 20, 21, 22]),
        positions_T=torch.tensor([5, 6, 7, 8, 0, 1, 2]),
        slots_R=torch.tensor([3, 1]),
        live_R=torch.tensor([2, 3]),
        next_R=torch.tensor([77, 23]),
        k_R=torch.tensor([3, 0]),
        num_drafts=3,
    )


def live(rows: DraftRows) -> list[tuple[int, int, int, int]]:
    """(slot, token, position, source) of the rows that are not padding."""
    columns = (rows.slots_N, rows.tokens_N, rows.positions_N, rows.source_N)
    return [row for row in zip(*(c.tolist() for c in columns), strict=True) if row[2] >= 0]


@pytest.mark.parametrize("ops", STEPS)
def test_shifted_context_reads_the_row_of_the_newest_token(ops: StepOps) -> None:
    rows = build(ops, context="all", shift=1)
    assert live(rows) == [(3, 16, 5, 0), (3, 77, 6, 1), (1, 21, 0, 4), (1, 22, 1, 5), (1, 23, 2, 6)]
    assert rows.tokens_N[rows.read_RJ[:, 0]].tolist() == [77, 23]
    assert rows.drawn_KR.tolist() == [[8, -1], [9, -1], [10, -1]]  # the second request wants no drafts
    assert rows.positions_KR.tolist() == [[6, -1], [7, -1], [8, -1]]
    assert len(rows.tokens_N) == 7


@pytest.mark.parametrize("ops", STEPS)
def test_an_anchor_is_a_row_of_its_own_after_the_unshifted_context(ops: StepOps) -> None:
    rows = build(ops, context="all", anchor=True)
    own = [(3, 15, 5), (3, 16, 6), (3, 77, 7)]
    other = [(1, 20, 0), (1, 21, 1), (1, 22, 2), (1, 23, 3)]
    assert [row[:3] for row in live(rows)] == own + other
    assert rows.tokens_N[rows.read_RJ[:, 0]].tolist() == [77, 23]
    assert len(rows.tokens_N) == 9


@pytest.mark.parametrize("ops", STEPS)
def test_mask_rows_follow_and_the_last_rows_are_read(ops: StepOps) -> None:
    rows = build(ops, context="all", shift=1, masks=2, read=3)
    assert live(rows)[:4] == [(3, 16, 5, 0), (3, 77, 6, 1), (3, MASK, 7, 7), (3, MASK, 8, 7)]
    assert rows.tokens_N[rows.read_RJ].tolist() == [[77, MASK, MASK], [23, MASK, MASK]]
    assert rows.positions_N[rows.read_RJ].tolist() == [[6, 7, 8], [2, 3, 4]]


@pytest.mark.parametrize("ops", STEPS)
def test_without_context_only_anchor_and_masks_are_fed(ops: StepOps) -> None:
    rows = build(ops, context="none", anchor=True, masks=2, read=2)
    own = [(3, 77, 7), (3, MASK, 8), (3, MASK, 9)]
    assert [row[:3] for row in live(rows)] == [*own, (1, 23, 3), (1, MASK, 4), (1, MASK, 5)]
    assert rows.tokens_N[rows.read_RJ].tolist() == [[MASK, MASK], [MASK, MASK]]


@pytest.mark.parametrize("ops", STEPS)
def test_last_context_feeds_the_row_of_the_newest_token_alone(ops: StepOps) -> None:
    assert live(build(ops, context="last", shift=1)) == [(3, 77, 6, 1), (1, 23, 2, 6)]


@pytest.mark.parametrize("ops", STEPS)
@pytest.mark.parametrize("context", ["all", "last", "none"])
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("masks", [0, 3])
def test_padding_writes_nowhere_and_reads_are_live(
    ops: StepOps, context: str, anchor: bool, masks: int
) -> None:
    if context == "none" and not (anchor or masks):
        return
    rows = build(ops, context=context, anchor=anchor, masks=masks)
    assert (rows.positions_N[rows.read_RJ] >= 0).all()
    num_context = {"all": [2, 3], "last": [1, 1], "none": [0, 0]}[context]
    assert len(live(rows)) == sum(num_context) + 2 * (int(anchor) + masks)


def state(rng: random.Random, num_slots: int) -> SlotState:
    length = [rng.randrange(2, 20) for _ in range(num_slots)]
    tokens = torch.tensor(
        [[rng.randrange(3) for _ in range(40)] for _ in range(num_slots)], dtype=torch.int32
    )
    behind = [rng.choice([1, 1, rng.randrange(1, n + 1)]) for n in length]
    return SlotState(
        tokens,
        torch.tensor(length),
        torch.tensor([n - b for n, b in zip(length, behind, strict=True)]),
        torch.tensor([rng.randrange(5) for _ in length]),
        torch.tensor([n + rng.randrange(9) for n in length]),  # 0: at its limit
    )


@pytest.mark.skipif(COMPILED is None, reason="no C++ compiler here")
@pytest.mark.parametrize("seed", range(40))
def test_both_versions_do_the_same_steps(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(5), rng.randrange(1, 5))
    first = state(rng, 6)
    num_rows, num_sampled = [], []
    for slot in slots:
        known = int(first.length_S[slot] - first.computed_S[slot])
        rows = rng.randrange(1, known + int(first.draft_count_S[slot]) + 1)
        num_rows.append(rows)
        num_sampled.append(max(0, rows - known + 1))
    first.limit_S[5] = 0  # the scratch slot: beside the others are requests of it without rows
    num_padded = rng.randrange(3)
    slots += [5] * num_padded
    num_rows += [0] * num_padded
    num_sampled += [0] * num_padded
    before = [held_S[5].clone() for held_S in first[1:3]]
    second = SlotState(*(t.clone() for t in first))
    work_3R = torch.tensor([slots, num_rows, num_sampled])
    sampled_M = torch.tensor([rng.randrange(3) for _ in range(sum(num_sampled))], dtype=torch.int64)
    wanted_R = torch.tensor([rng.randrange(6) for _ in slots])
    results = []
    assert COMPILED is not None
    for ops, s in ((TORCH_STEP, first), (COMPILED, second)):
        rows = ops.fill(s, work_3R, sum(num_rows), sum(num_sampled))
        slots_R, _, num_R = work_3R.unbind()
        width = max(1, *num_sampled)
        args = (
            s.tokens_SL,
            slots_R,
            num_R,
            rows.first_R,
            rows.lengths_R,
            rows.draft_count_R,
            sampled_M,
            width,
        )
        tokens_RW, emitted_R = ops.accept(*args)
        done = ops.commit(s, work_3R, rows, tokens_RW, emitted_R, wanted_R)
        results.append([*rows, tokens_RW, emitted_R, *done, *s])
        num_own = len(slots) - num_padded
        for emitted in (emitted_R, done.live_R, done.k_R):
            assert not emitted[num_own:].any()
        assert [held_S[5] for held_S in s[1:3]] == before
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.skipif(COMPILED is None, reason="no C++ compiler here")
@pytest.mark.parametrize("seed", range(30))
def test_both_versions_build_the_same_draft_rows(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 5))]
    total = sum(counts)
    cu: Tensor = torch.tensor([0, *counts]).cumsum(0)
    anchor, masks = rng.randrange(2), rng.choice([0, 0, 2])
    context = rng.randrange(3) if anchor or masks else rng.randrange(1, 3)
    read = masks + 1 if masks and (context or anchor) else 1
    layout = Layout(context, rng.randrange(2), anchor, masks, read, MASK)
    given = (
        cu,
        torch.arange(total) + 10,
        torch.cat([torch.arange(n) + 5 * r for r, n in enumerate(counts)]),
        torch.randperm(8)[: len(counts)],
        torch.tensor([rng.randrange(n + 1) for n in counts]),
        torch.arange(len(counts)) + 70,
        torch.tensor([rng.randrange(4) for _ in counts]),
        3,
    )
    assert COMPILED is not None
    one, other = TORCH_STEP.draft_rows(layout, *given), COMPILED.draft_rows(layout, *given)
    for name, a, b in zip(one._fields, one, other, strict=True):
        if name in ("tokens_N", "source_N"):  # those of padding rows are not read
            a, b = a[one.positions_N >= 0], b[one.positions_N >= 0]
        assert torch.equal(a, b), name


@pytest.mark.parametrize("ops", STEPS)
def test_drafts_are_cut_at_the_first_bad_id_and_at_what_was_asked_for(ops: StepOps) -> None:
    slots = state(random.Random(0), 6)
    tokens = torch.tensor([[1, 2, 3], [1, 99, 3], [4, 5, -1], [6, 7, 8], [1, 1, 1], [-1, 2, 3]])
    slots_R, k_R = torch.tensor([4, 1, 0, 5, 2, 3]), torch.tensor([3, 3, 3, 1, 3, 3])
    count_R, cut_R = ops.store_drafts(slots, slots_R, tokens, torch.tensor([3, 3, 2, 3, -4, 3]), k_R, 10)
    assert count_R.tolist() == [3, 1, 2, 1, 0, 0]
    assert cut_R.tolist() == [0, 1, 0, 0, 0, 1]
    assert slots.draft_count_S[slots_R].tolist() == count_R.tolist()
    stored = [slots.tokens_SL[s, slots.length_S[s] :][:3].tolist() for s in slots_R.tolist()]
    assert stored == [[1, 2, 3], [1, 9, 3], [4, 5, 0], [6, 7, 8], [1, 1, 1], [0, 2, 3]]


@pytest.mark.parametrize("ops", STEPS)
def test_drafts_end_before_an_id_that_stands_for_no_token(ops: StepOps) -> None:
    slots = state(random.Random(0), 6)
    tokens = torch.tensor([[1, 7, 3], [7, 99, 3], [4, 99, 7], [6, 5, 7]])
    slots_R, k_R = torch.tensor([4, 1, 0, 5]), torch.tensor([3, 3, 3, 2])
    count_R, cut_R = ops.store_drafts(slots, slots_R, tokens, torch.tensor([3, 3, 3, 3]), k_R, 10, 7, 5)
    assert count_R.tolist() == [1, 0, 1, 1]
    assert cut_R.tolist() == [0, 0, 1, 0], "it is no fault of the drafter's"


@pytest.mark.parametrize("ops", STEPS)
def test_a_slot_at_its_limit_stands_still(ops: StepOps) -> None:
    """The host may schedule rows of a request that has ended on the device; padding rows always name such a slot."""
    slots = SlotState(
        torch.arange(40, dtype=torch.int32).view(2, 20),
        torch.tensor([7, 5]),
        torch.tensor([6, 4]),
        torch.tensor([2, 2]),
        torch.tensor([7, 9]),
    )
    work_3R = torch.tensor([[0, 1], [3, 3], [3, 3]])
    rows = ops.fill(slots, work_3R, 6, 6)
    tokens_RW = torch.tensor([[1, 2, -1], [3, 4, -1]])
    done = ops.commit(slots, work_3R, rows, tokens_RW, torch.tensor([2, 2]), torch.tensor([2, 2]))
    assert slots.length_S.tolist() == [7, 7] and slots.computed_S.tolist() == [6, 6]
    assert done.live_R.tolist() == [0, 2] and done.k_R.tolist() == [0, 1]
    layout = Layout(context=2, shift=1, anchor=0, masks=1, num_read=1, mask_token=MASK)
    fed = ops.draft_rows(
        layout,
        rows.query_start_loc_R1,
        rows.tokens_T,
        rows.positions_T,
        work_3R[0],
        done.live_R,
        done.next_R,
        done.k_R,
        2,
    )
    assert [row[0] for row in live(fed)] == [1, 1, 1]
    assert fed.drawn_KR[:, 0].tolist() == [-1, -1] and (fed.read_RJ >= 0).all()
