"""Drafts and logits of one or two MTP modules in their target's files against the reference's.

Shapes: T rows of a pass, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from draftproof.cache.recent import RecentRows
from draftproof.drafters.base import Verified
from draftproof.drafters.modules import ModulesDrafter
from tests.drafters.heads import Pair, close
from tests.helpers import Paged, run_rows

ONE = ["mtp_deepseek_v3_a", "mtp_glm4_moe_a", "mtp_mimo_a"]
TWO = "mtp_deepseek_v3_2layer_a"
PREFIXES = [1, 2, 6, 11, 17]


@dataclass
class Chooser:
    """A draw that records its logits; it returns forced tokens first, then the likeliest token."""

    forced: list[list[int]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    inputs: tuple[Tensor, ...] = ()

    def over(self, inputs: tuple[Tensor, ...]) -> Chooser:
        return self

    def __call__(
        self, logits_MV: Tensor, rows_M: Tensor | None, positions_M: Tensor, ids_V: Tensor | None = None
    ) -> Tensor:
        self.logits.append(logits_MV)
        return torch.tensor(self.forced.pop(0)) if self.forced else logits_MV.argmax(-1)


@dataclass(frozen=True)
class Part:
    """A request's part of a pass: `num_live` accepted rows from `start` on, then rejected ones; `next`: next token."""

    slot: int
    start: int
    num_live: int
    rejected: Sequence[int] = ()
    wanted: int = 2


class Rounds:
    """Feeds a drafter a text with known target states, in any division into passes."""

    def __init__(self, pair: Pair, text: list[int], num_slots: int = 3) -> None:
        self.pair, self.text = pair, text
        (self.state_TH,) = run_rows(pair.target, Paged(pair.target.kv), [(0, 0, text)], (), True).taps
        paged = pair.memory(num_slots)
        (self.recent,) = paged.cache.states or (None,)
        pair.bind(paged)

    def propose(self, parts: Sequence[Part], forced: list[list[int]] | None = None) -> tuple[Tensor, Tensor]:
        """(drafts [R, K], logits [R, K, V])."""
        tokens, positions, states, cu, draw = [], [], [], [0], Chooser(list(forced or []))
        for part in parts:
            end = part.start + part.num_live
            tokens += [*self.text[part.start : end], *part.rejected]
            num = part.num_live + len(part.rejected)
            positions += range(part.start, part.start + num)
            noise_TH = torch.randn(len(part.rejected), self.state_TH.shape[1])
            states += [self.state_TH[part.start : end], noise_TH]
            cu.append(cu[-1] + num)
        verified = Verified(
            tokens_T=torch.tensor(tokens),
            positions_T=torch.tensor(positions),
            query_start_loc_R1=torch.tensor(cu),
            slots_R=torch.tensor([p.slot for p in parts]),
            live_R=torch.tensor([p.num_live for p in parts]),
            next_R=torch.tensor([self.text[p.start + p.num_live] for p in parts]),
            k_R=torch.tensor([p.wanted for p in parts]),
            taps=(torch.cat(states),),
            draw=draw,
            history=lambda r: torch.zeros(1, dtype=torch.int32),
        )
        num_drafts = max(p.wanted for p in parts)
        v, proposal = verified, self.pair.drafter.propose(verified, num_drafts)
        if self.recent is not None:  # like the engine
            rows = v.pass_of_rows
            self.recent.commit(rows)
        assert proposal.count_R.tolist() == [p.wanted for p in parts]
        return proposal.tokens_RK, torch.stack(draw.logits, 1) if draw.logits else torch.zeros(0)


@pytest.mark.parametrize("folder", [*ONE, TWO])
def test_the_target_is_the_reference(folder: str) -> None:
    pair = Pair(folder, folder, num_drafts=2)
    out = run_rows(pair.target, Paged(pair.target.kv), [(0, 0, pair.tokens)])
    close(pair.target.logits(out.hidden_TH), pair.io["target_logits"])
    close(out.hidden_TH, pair.io["last_postnorm_raw"])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("folder", ONE)
def test_one_module_used_again(folder: str, prefix: int) -> None:
    pair = Pair(folder, folder, num_drafts=4)
    rounds, io = Rounds(pair, pair.tokens), pair.io
    part = Part(slot=1, start=0, num_live=prefix, wanted=4)
    forced = [[token] for token in pair.tokens[prefix + 1 : prefix + 4]]
    close(rounds.propose([part], forced)[1][0], io[f"p{prefix}_recur_logits_forced"])
    drafts, logits = rounds.propose([part])
    close(logits[0], io[f"p{prefix}_recur_logits_greedy"])
    assert drafts[0].tolist() == io[f"p{prefix}_recur_drafts"].tolist()
    if f"p{prefix}_hf_logits" in io:
        close(logits[0, :1], io[f"p{prefix}_hf_logits"])


@pytest.mark.parametrize("prefix", PREFIXES)
def test_two_modules_after_a_whole_prefix(prefix: int) -> None:
    pair = Pair(TWO, TWO, num_drafts=2)
    drafts, logits = Rounds(pair, pair.tokens).propose([Part(slot=1, start=0, num_live=prefix)])
    close(logits[0], pair.io[f"p{prefix}_hf_logits"])
    assert drafts[0].tolist() == pair.io[f"p{prefix}_hf_drafts"].tolist()


def generation() -> tuple[Rounds, dict[int, Tensor], dict[int, list[int]]]:
    """The reference's generation: logits and drafts by number of computed tokens, one less than the known ones."""
    pair = Pair(TWO, TWO, num_drafts=2)
    io, text = pair.io, pair.io["gen_sequence"].tolist()
    computed = [known - 1 for known in io["gen_round_len"].tolist()]
    logits = dict(zip(computed, io["gen_round_logits"], strict=True))
    drafts = dict(zip(computed, io["gen_round_drafts"].tolist(), strict=True))
    return Rounds(pair, text), logits, drafts


@pytest.mark.parametrize("sizes", [[8], [3, 5], [1, 1, 6], [2, 2, 2, 2]], ids=str)
def test_every_round_of_a_generation_with_rejections(sizes: list[int]) -> None:
    """A prompt in chunks, then every draft is rejected: its row in the second module is stale until repeated."""
    rounds, logits, drafts = generation()
    start, rejected = 0, list[int]()
    for size in sizes[:-1]:
        rounds.propose([Part(2, start, size, wanted=0)])
        start += size
    assert min(logits) == 8 and len(logits) == 13
    for computed in sorted(logits):
        found, seen = rounds.propose([Part(2, start, computed - start, rejected)])
        close(seen[0], logits[computed])
        rejected = found[0].tolist()
        assert rejected == drafts[computed]
        start = computed


def test_rounds_that_accept_some_or_all_beside_others() -> None:
    """Three requests of different lengths; one stands still for a round, one skips drafting, padding rows follow."""
    rounds, logits, _ = generation()
    steps: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    lives = {0: [9, 1, 3, 2, 1, 1, 2], 1: [10, 3, 0, 3, 1, 2, 1], 2: [4, 7, 2, 1, 3, 2, 1]}
    for slot, numbers in lives.items():
        start = 0
        for number in numbers:
            steps[slot].append((start, number))
            start += number
    compared = 0
    for turn in range(7):
        parts = []
        for slot in lives:
            start, number = steps[slot][turn]
            rejected = [7] * (3 - number) if 0 < number < 3 else [5, 6, 7] if number == 0 else []
            parts.append(Part(slot, start, number, rejected, wanted=0 if number == 0 else 2 - (turn == 2)))
        _, seen = rounds.propose(parts)
        for row, part in enumerate(parts):
            computed = part.start + part.num_live
            if part.num_live and computed in logits:
                close(seen[row, : part.wanted], logits[computed][: part.wanted])
                compared += part.wanted
    assert compared >= 25


def test_a_slot_that_changes_hands_keeps_nothing() -> None:
    rounds, logits, _ = generation()
    recent = rounds.recent
    assert isinstance(recent, RecentRows) and isinstance(rounds.pair.drafter, ModulesDrafter)
    rounds.propose([Part(0, 0, 10)])
    stale_SEH = recent.vectors_SEH.clone()
    recent.admit(0)
    # the new request reuses the pages of ten tokens; the old one's kept vectors also end at ten, and must not be used
    recent.vectors_SEH.normal_()
    _, seen = rounds.propose([Part(0, 10, 3)])
    close(seen[0, 0], logits[13][0])
    assert not torch.equal(stale_SEH, recent.vectors_SEH)


def test_the_reference_tells_rows_that_are_not_repeated() -> None:
    rounds, logits, _ = generation()
    assert rounds.recent is not None
    rounds.propose([Part(0, 0, 9)])
    rounds.recent.admit(0)  # forgets what was kept, and so repeats nothing
    _, seen = rounds.propose([Part(0, 9, 1)])
    close(seen[0, 0], logits[10][0])
    assert (seen[0, 1] - logits[10][1]).abs().max() > 1e-3


@pytest.mark.parametrize("folder", ONE)
def test_the_reference_tells_a_state_before_the_norm(folder: str) -> None:
    pair = Pair(folder, folder, num_drafts=4)
    rounds = Rounds(pair, pair.tokens)
    rounds.state_TH = pair.io["last_prenorm_raw"]
    _, logits = rounds.propose([Part(0, 0, 6, wanted=1)])
    assert (logits[0, 0] - pair.io["p6_recur_logits_greedy"][0]).abs().max() > 1e-2
