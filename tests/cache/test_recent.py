"""Rows that slots keep: whatever was rejected, the last permanent ones, in every order of passes."""

from __future__ import annotations

import random

import torch

from draftproof.cache.recent import RecentRows, SlotRows
from draftproof.cache.states import PassOfRows

CPU = torch.device("cpu")
SLOTS, EACH, SIZE = 4, 2, 3


def vector(token: int) -> list[float]:
    return [float(token), token + 0.5, -float(token)]


def test_what_is_kept_are_the_last_permanent_rows() -> None:
    """Model: a list of each slot's permanent rows since its drafter was last told of all of them."""
    rng = random.Random(1)
    recent = RecentRows(SlotRows(count=EACH, size=SIZE), SLOTS, torch.float32, CPU)
    texts: list[list[int]] = [[] for _ in range(SLOTS)]
    length = [0] * SLOTS
    skipped = checked = 0
    for _ in range(400):
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        for slot in slots:
            if rng.random() < 0.05:
                recent.admit(slot)
                texts[slot], length[slot] = [], rng.randrange(4)
            elif rng.random() < 0.1:  # a pass that nobody was told of
                texts[slot], length[slot] = [], length[slot] + 1
                skipped += 1
        counts = [rng.randint(1, 4) for _ in slots]
        live = [rng.randint(0, count) for count in counts]
        is_padding = [not n and rng.random() < 0.5 for n in live]  # rows of nobody, at no position
        tokens = [rng.randrange(1, 100) for _ in range(sum(counts))]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        rows = PassOfRows(
            slots_R=torch.tensor(slots),
            query_start_loc_R1=torch.tensor(starts),
            first_R=torch.tensor([-1 if is_padding[r] else length[slot] for r, slot in enumerate(slots)]),
            live_R=torch.tensor(live),
            tokens_T=torch.tensor(tokens),
        )
        known = recent.known(rows).tolist()
        wanted = [0 if is_padding[r] else min(EACH, len(texts[slot])) for r, slot in enumerate(slots)]
        assert known == wanted
        table = recent.write(rows, torch.tensor([vector(token) for token in tokens]))
        for r, slot in enumerate(slots):
            for back in range(1, known[r] + 1):
                at = torch.tensor([[-back]])
                owner = torch.tensor([r])
                token = texts[slot][-back]
                assert int(recent.tokens(rows, owner, at)) == token
                assert table[int(recent.source(rows, owner, at))].tolist() == vector(token)
                checked += 1
        recent.commit(rows)
        for r, slot in enumerate(slots):
            texts[slot] += tokens[starts[r] : starts[r] + live[r]]
            length[slot] += live[r]
    assert skipped > 20 and checked > 300


def test_a_pass_that_wrote_nothing_changes_nothing() -> None:
    """The rows of the pass before are not kept a second time."""
    recent = RecentRows(SlotRows(count=EACH, size=SIZE), SLOTS, torch.float32, CPU)

    def rows(first: int, tokens: list[int]) -> PassOfRows:
        return PassOfRows(
            slots_R=torch.tensor([1]),
            query_start_loc_R1=torch.tensor([0, len(tokens)]),
            first_R=torch.tensor([first]),
            live_R=torch.tensor([len(tokens)]),
            tokens_T=torch.tensor(tokens),
        )

    recent.write(rows(0, [5, 6]), torch.tensor([vector(5), vector(6)]))
    recent.commit(rows(0, [5, 6]))
    recent.commit(rows(2, [7, 8]))
    assert recent.known(rows(2, [7])).tolist() == [2]
    assert recent.vectors_SEH[1].tolist() == [vector(5), vector(6)]
