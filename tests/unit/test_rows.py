from __future__ import annotations

import pytest
import torch

from draftproof.drafters.base import InputLayout, Verified
from draftproof.drafters.rows import DraftRows, build

MASK = 99


def verified() -> Verified:
    """Request 0: [s5 d6 d7 d8]@5..8 in slot 3, s5 and d6 kept, next r7. Request 1: prompt rows 0..2, next x3."""
    return Verified(
        tokens_T=torch.tensor([15, 16, 17, 18, 20, 21, 22]),
        positions_T=torch.tensor([5, 6, 7, 8, 0, 1, 2]),
        cu_R1=torch.tensor([0, 4, 7]),
        slots_R=torch.tensor([3, 1]),
        live_R=torch.tensor([2, 3]),
        next_R=torch.tensor([77, 23]),
        k_R=torch.tensor([3, 0]),
        taps=(),
        draw=lambda logits, rows, positions, ids=None: rows,
        num_rows_R=[4, 3],
        history=lambda r: torch.zeros(0, dtype=torch.int32),
    )


def live(rows: DraftRows) -> list[tuple[int, int, int, int]]:
    """(slot, token, position, source) of the rows that are no padding."""
    columns = (rows.slots_N, rows.tokens_N, rows.positions_N, rows.source_N)
    return [row for row in zip(*(c.tolist() for c in columns), strict=True) if row[2] >= 0]


def test_shifted_context_reads_the_row_of_the_newest_token() -> None:
    rows = build(verified(), InputLayout(context="all", shift=1), 1)
    assert live(rows) == [(3, 16, 5, 0), (3, 77, 6, 1), (1, 21, 0, 4), (1, 22, 1, 5), (1, 23, 2, 6)]
    assert rows.tokens_N[rows.read_RJ[:, 0]].tolist() == [77, 23]
    assert rows.anchor_position_R.tolist() == [7, 3]
    assert len(rows.tokens_N) == 7


def test_an_anchor_is_a_row_of_its_own_after_the_unshifted_context() -> None:
    rows = build(verified(), InputLayout(context="all", anchor=True), 1)
    own = [(3, 15, 5, 0), (3, 16, 6, 1), (3, 77, 7)]
    other = [(1, 20, 0, 4), (1, 21, 1, 5), (1, 22, 2, 6), (1, 23, 3)]
    assert [row[:3] for row in live(rows)] == [row[:3] for row in own + other]
    assert rows.tokens_N[rows.read_RJ[:, 0]].tolist() == [77, 23]
    assert len(rows.tokens_N) == 9


def test_mask_rows_follow_and_the_last_rows_are_read() -> None:
    rows = build(verified(), InputLayout(context="all", shift=1, masks=2), 3, MASK)
    assert live(rows)[:4] == [(3, 16, 5, 0), (3, 77, 6, 1), (3, MASK, 7, 7), (3, MASK, 8, 7)]
    assert rows.tokens_N[rows.read_RJ].tolist() == [[77, MASK, MASK], [23, MASK, MASK]]
    assert rows.positions_N[rows.read_RJ].tolist() == [[6, 7, 8], [2, 3, 4]]


def test_without_context_only_anchor_and_masks_are_fed() -> None:
    rows = build(verified(), InputLayout(context="none", anchor=True, masks=2), 2, MASK)
    assert [row[:3] for row in live(rows)] == [
        (3, 77, 7), (3, MASK, 8), (3, MASK, 9), (1, 23, 3), (1, MASK, 4), (1, MASK, 5),
    ]  # fmt: skip
    assert rows.tokens_N[rows.read_RJ].tolist() == [[MASK, MASK], [MASK, MASK]]


def test_last_context_feeds_the_row_of_the_newest_token_alone() -> None:
    rows = build(verified(), InputLayout(context="last", shift=1), 1)
    assert live(rows) == [(3, 77, 6, 1), (1, 23, 2, 6)]


@pytest.mark.parametrize("context", ["all", "last", "none"])
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("masks", [0, 3])
def test_padding_writes_nowhere_and_reads_are_live(context: str, anchor: bool, masks: int) -> None:
    if context == "none" and not (anchor or masks):
        return
    layout = InputLayout(context=context, anchor=anchor, masks=masks)  # type: ignore[arg-type]
    rows = build(verified(), layout, 1, MASK)
    assert (rows.positions_N[rows.read_RJ] >= 0).all()
    num_context = {"all": [2, 3], "last": [1, 1], "none": [0, 0]}[context]
    assert len(live(rows)) == sum(num_context) + 2 * (int(anchor) + masks)
