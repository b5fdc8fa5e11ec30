"""Random steps for an implementation of `StepOps`, each compared bit for bit with torch's.

Shapes as in kernels/step/spec.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.kernels.step.reference import TORCH_STEP
from draftproof.kernels.step.spec import Layout, SlotState, StepOps

VOCAB, MASK = 50, 99
LAYOUTS = (
    *(Layout(2, 1, 0, 0, 1, MASK), Layout(2, 0, 1, 0, 1, MASK), Layout(2, 1, 0, 2, 3, MASK)),
    *(Layout(0, 0, 1, 2, 3, MASK), Layout(1, 1, 0, 0, 1, MASK), Layout(2, 0, 1, 3, 4, MASK)),
    *(Layout(1, 0, 0, 2, 1, MASK), Layout(0, 0, 0, 2, 2, MASK), Layout(1, 1, 1, 0, 2, MASK)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One step of `requests` requests with up to `drafts` drafts each, some of their prompts `prompt` tokens long."""

    seed: int
    requests: int
    drafts: int
    prompt: int = 12
    padding: int = 0  # padding requests, in a slot that is always at its limit
    prefill: bool = False  # no request has sampled rows


@dataclass(frozen=True, slots=True)
class Step:
    """The input of a step."""

    state: SlotState
    work_3R: Tensor
    sampled_M: Tensor
    wanted_R: Tensor
    drafted_RK: Tensor
    count_R: Tensor
    num_rows: int
    num_sampled: int

    def on(self, device: torch.device) -> Step:
        """A copy on `device`."""
        state = SlotState(*(t.clone().to(device) for t in self.state))
        tensors = (self.work_3R, self.sampled_M, self.wanted_R, self.drafted_RK, self.count_R)
        return Step(state, *(t.clone().to(device) for t in tensors), self.num_rows, self.num_sampled)


CASES = (
    *(Case(0, 1, 5), Case(1, 1, 1), Case(2, 3, 3), Case(3, 4, 2, prefill=True), Case(4, 5, 4, padding=3)),
    *(Case(5, 70, 1, prompt=3), Case(6, 2, 64, prompt=90), Case(7, 6, 0), Case(8, 1, 3, prefill=True)),
    *(Case(seed, 4, 3) for seed in range(9, 18)),
)


def make(case: Case) -> Step:
    """A random step: slots in random order, some at their limit, some with few tokens left to it, some far from it."""
    rng = random.Random(case.seed)
    num_slots = case.requests + 3
    padding_slot, *slots = rng.sample(range(num_slots), case.requests + 1)
    slots += [padding_slot] * case.padding
    length = [case.prompt if case.prefill else rng.randrange(1, case.prompt + 1) for _ in range(num_slots)]
    behind = [n if case.prefill else rng.choice([1, rng.randrange(1, n + 1)]) for n in length]
    drafts = [rng.randrange(case.drafts + 1) if b == 1 else 0 for b in behind]
    limit = [n + rng.choice([0, 1, rng.randrange(case.drafts + 2), 100]) for n in length]
    length[padding_slot], behind[padding_slot], drafts[padding_slot], limit[padding_slot] = 0, 0, 0, 0
    columns = case.prompt + 2 * case.drafts + 3
    tokens = torch.tensor([[rng.randrange(2) for _ in range(columns)] for _ in range(num_slots)])
    num_rows, num_sampled = [], []
    for slot in slots:
        most = behind[slot] + drafts[slot]
        rows = 1 if slot == padding_slot else rng.choice([most, rng.randrange(1, most + 1)])
        if case.prefill and slot != padding_slot:
            rows = max(1, behind[slot] - 1)
        num_rows.append(rows)
        num_sampled.append(0 if case.prefill else min(rows, max(0, rows - behind[slot] + 1)))
    ids = [[rng.choice([0, 1, VOCAB - 1, VOCAB, -1]) for _ in range(case.drafts)] for _ in slots]
    state = SlotState(
        tokens.int(), *(torch.tensor(x) for x in (length, _computed(length, behind), drafts, limit))
    )
    return Step(
        state,
        torch.tensor([slots, num_rows, num_sampled]),
        torch.tensor([rng.choice([0, 1, 1, 1]) for _ in range(sum(num_sampled))], dtype=torch.int64),
        torch.tensor([rng.randrange(case.drafts + 3) for _ in slots]),
        torch.tensor(ids).view(len(slots), case.drafts),
        torch.tensor([rng.randrange(-1, case.drafts + 3) for _ in slots]),
        sum(num_rows),
        sum(num_sampled),
    )


def _computed(length: Sequence[int], behind: Sequence[int]) -> list[int]:
    return [n - b for n, b in zip(length, behind, strict=True)]


def run(ops: StepOps, step: Step, layout: Layout, width: int) -> list[Tensor]:
    """Run a whole step, which updates `step.state`; returns all results, including the slots."""
    state, slots_R, num_R = step.state, step.work_3R[0], step.work_3R[2]
    rows = ops.fill(state, step.work_3R, step.num_rows, step.num_sampled)
    sampled = (rows.first_R, rows.lengths_R, rows.draft_count_R, step.sampled_M)
    verdict = ops.accept(state.tokens_SL, slots_R, num_R, *sampled, width)
    done = ops.commit(state, step.work_3R, rows, *verdict, step.wanted_R)
    left_S = state.draft_count_S.clone()
    target = (rows.query_start_loc_R1, rows.tokens_T, rows.positions_T)
    num_drafts = step.drafted_RK.shape[1]
    fed = ops.draft_rows(layout, *target, slots_R, done.live_R, done.next_R, done.k_R, num_drafts)
    stored = ops.store_drafts(state, slots_R, step.drafted_RK, step.count_R, done.k_R, VOCAB, 1, 3)
    return [*rows, *verdict, *done, left_S, *fed, *stored, *state]


def compare(ops: StepOps, case: Case, layout: Layout, device: torch.device) -> None:
    """Assert that a step by `ops` is the step by torch."""
    step = make(case)
    width = max(1, int(step.work_3R[2].max()))
    ours, theirs = step.on(device), step.on(torch.device("cpu"))
    if case.padding:  # requests that share a slot overwrite each other's scratch memory in any order
        for each in (ours, theirs):
            each.state.tokens_SL[step.work_3R[0, -1]] = 0
            each.drafted_RK[-case.padding :] = 0
            each.sampled_M.zero_()
    found, expected = run(ops, ours, layout, width), run(TORCH_STEP, theirs, layout, width)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b), (case, layout, index)


def random_draft_rows(ops: StepOps, seed: int, device: torch.device) -> None:
    """Compare draft rows for any number of live rows, including none, with arbitrary slots."""
    rng = random.Random(seed)
    counts = [rng.randrange(1, 6) for _ in range(rng.choice([1, 2, 5]))]
    layout, num_drafts, total = rng.choice(LAYOUTS), rng.choice([1, 3, 4]), sum(counts)
    given = (
        torch.tensor([0, *counts]).cumsum(0),
        torch.arange(total) + 10,
        torch.cat([torch.arange(n) + 5 * r for r, n in enumerate(counts)]),
        torch.randperm(8, generator=torch.Generator().manual_seed(seed))[: len(counts)],
        torch.tensor([rng.randrange(n + 1) for n in counts]),
        torch.arange(len(counts)) + 70,
        torch.tensor([rng.randrange(num_drafts + 1) for _ in counts]),
    )
    found = ops.draft_rows(layout, *(t.to(device) for t in given), num_drafts)
    for name, a, b in zip(
        found._fields, found, TORCH_STEP.draft_rows(layout, *given, num_drafts), strict=True
    ):
        assert torch.equal(a.cpu(), b), (seed, layout, name)


def random_accept(ops: StepOps, seed: int, device: torch.device) -> None:
    """Counts of drafts beyond the verified ones, and full slots: nothing is read or emitted past either."""
    rng = random.Random(seed)
    num_slots, columns, requests, width = 6, 9, 4, rng.choice([1, 2, 3, 4])
    num = [rng.randrange(width + 1) for _ in range(requests)]
    given = (
        torch.ones(num_slots, columns, dtype=torch.int32),
        torch.tensor(rng.sample(range(num_slots), requests)),
        torch.tensor(num),
        torch.tensor([0, *num[:-1]]).cumsum(0),
        torch.tensor([rng.choice([3, columns - 1, columns]) for _ in num]),
        torch.tensor([rng.randrange(2 * width) for _ in num]),
        torch.ones(sum(num), dtype=torch.int64),
    )
    found = ops.accept(*(t.to(device) for t in given), width)
    for a, b in zip(found, TORCH_STEP.accept(*given, width), strict=True):
        assert torch.equal(a.cpu(), b), seed
