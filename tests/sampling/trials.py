"""Trials of lossy verification: settings of target and drafter on five tokens, and N requests that run them.

Every request is one trial with a seed of its own; all go through drawing and verifying at once. The rest of each text
is drawn from the target, and the joint counts of K + 1 tokens meet the exact joint probabilities.
Shapes: N requests, K drafts, W = K + 1, V vocabulary, C contexts, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import scipy  # its stats are imported when they are named
import torch
from torch import Tensor

from draftproof.kernels.ops import TORCH
from draftproof.kernels.row_params import RowParams, pack_row
from draftproof.kernels.sample.reference import probabilities_torch
from draftproof.sampling.lossy import Domains, LossyVerifier
from draftproof.sampling.noise import row_seed
from draftproof.sampling.params import SamplingTable
from draftproof.sampling.sampler import Sampler
from draftproof.sampling.verifier import VerifyResult, VerifyRows

V, N, START = 5, 12000, 4
Mode = Literal["rejection", "block"]
MODES: tuple[Mode, ...] = ("rejection", "block")
NEVER = -60.0


@dataclass
class Setting:
    """Target and draft logits for every context: entry j is [V**j, V], indexed by the tokens so far as a number."""

    target: list[Tensor]
    draft: list[Tensor]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def num_drafts(self) -> int:
        return len(self.target) - 1

    def probabilities(self, logits_MV: Tensor) -> Tensor:
        row = pack_row(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
        params = RowParams(torch.tensor([row]).expand(len(logits_MV), -1).contiguous())
        return probabilities_torch(logits_MV, params).double()

    def joint(self) -> Tensor:
        """Probability of each text of W tokens under the target, [V**W]."""
        joint = torch.ones(1, dtype=torch.float64)
        for logits_CV in self.target:
            joint = (joint[:, None] * self.probabilities(logits_CV)).flatten()
        return joint


def setting(kind: str, num_drafts: int, **params: float) -> Setting:
    """Adversarial pairs of target and drafter."""
    generator = torch.Generator().manual_seed(num_drafts)

    def table(j: int) -> Tensor:
        return 1.5 * torch.randn(V**j, V, generator=generator)

    target = [table(j) for j in range(num_drafts + 1)]
    draft = [table(j) for j in range(num_drafts)]
    for p_CV, q_CV in zip(target, draft, strict=False):
        if kind == "equal":
            q_CV.copy_(p_CV)
        elif kind == "near":
            q_CV.mul_(0.3).add_(p_CV)
        elif kind == "disjoint":
            p_CV[:, 3:] = NEVER
            q_CV[:, :3] = NEVER
        elif kind == "one-hot draft":
            q_CV[:, :2] = NEVER
            q_CV[:, 3:] = NEVER
        elif kind == "one-hot target":
            p_CV[:, 1:] = NEVER
        elif kind == "zero where p is not":
            q_CV[:, 0] = NEVER
            p_CV[:, 0] = 1.0
        elif kind == "uneven residual":
            p_CV[:] = torch.tensor([0.45, 0.35, 0.20, 1e-9, 1e-9]).log()
            q_CV[:] = torch.tensor([0.05, 0.25, 0.70, 1e-9, 1e-9]).log()
    return Setting(target, draft, **params)  # type: ignore[arg-type]


KINDS = [
    *("random", "near", "equal", "disjoint"),
    *("one-hot draft", "one-hot target", "zero where p is not", "uneven residual"),
]


class Trials:
    """N requests of one setting, each in a slot of its own."""

    def __init__(self, s: Setting, mode: Mode, domains: Domains | None = None) -> None:
        self.s = s
        self.table = SamplingTable(N, V)
        self.table.params_S.temperature_M.fill_(s.temperature)
        self.table.params_S.top_k_M.fill_(s.top_k)
        self.table.params_S.top_p_M.fill_(s.top_p)
        self.table.params_S.min_p_M.fill_(s.min_p)
        first = row_seed(1, 0, 0)
        self.table.params_S.seeds_M.copy_(first + torch.arange(N))
        self.verifier = LossyVerifier(Sampler(self.table, TORCH), mode, s.num_drafts, domains)
        self.slots_N = torch.arange(N)
        self.tokens_SL = torch.zeros(N, 16, dtype=torch.int32)
        self.generator = torch.Generator().manual_seed(0)

    def code(self, length_N: Tensor) -> Tensor:
        """The text so far as a number, and how many tokens it has is known to the caller."""
        code_N = torch.zeros(N, dtype=torch.int64)
        for j in range(self.s.num_drafts + 1):
            inside_N = START + j < length_N
            code_N = torch.where(inside_N, code_N * V + self.tokens_SL[:, START + j], code_N)
        return code_N

    def draft(self, length: int, num_drafts: int, record: bool = True) -> None:
        """Fill the drafts of one round; `record` False: as a drafter does that does not say what q was."""
        lengths_N = torch.full((N,), length)
        draw = self.verifier.drawer(self.slots_N, lengths_N)
        for position in range(length, length + num_drafts):
            logits_NV = self.s.draft[position - START][self.code(torch.full((N,), position))]
            if record:
                tokens_N = draw(logits_NV, self.slots_N, torch.full((N,), position))
            else:
                tokens_N = torch.multinomial(torch.softmax(logits_NV, 1), 1, generator=self.generator)[:, 0]
            self.tokens_SL[:, position] = tokens_N.int()

    def target_logits(self, length: int, num_rows: int) -> Tensor:
        """[N, rows, V] for positions from `length` on."""
        rows = [
            self.s.target[p - START][self.code(torch.full((N,), p))] for p in range(length, length + num_rows)
        ]
        return torch.stack(rows, 1)

    def verify(self, length: int, count_N: Tensor, width: int) -> VerifyResult:
        positions_M = (length + torch.arange(width)).repeat(N)
        slots_M = self.slots_N.repeat_interleave(width)
        rows = VerifyRows(
            first_R=self.slots_N * width,
            num_R=torch.full((N,), width),
            slots_R=self.slots_N,
            lengths_R=torch.full((N,), length),
            draft_count_R=count_N,
            width=width,
        )
        logits_MV = self.target_logits(length, width).flatten(0, 1)
        return self.verifier.verify(
            logits_MV, slots_M, positions_M, self.tokens_SL, rows, has_processing=False
        )

    def complete(self, length_N: Tensor) -> Tensor:
        """Draw what is missing of W tokens from the target; the texts as numbers, [N]."""
        for j in range(self.s.num_drafts + 1):
            probs_NV = self.s.probabilities(self.s.target[j][self.code(torch.full((N,), START + j))])
            tokens_N = torch.multinomial(probs_NV, 1, generator=self.generator)[:, 0].int()
            known_N = START + j < length_N
            self.tokens_SL[:, START + j] = torch.where(known_N, self.tokens_SL[:, START + j], tokens_N)
        return self.code(torch.full((N,), START + self.s.num_drafts + 1))

    def accept(self, verdict: VerifyResult, length: int) -> Tensor:
        """Write the emitted tokens; the new lengths."""
        for j in range(verdict.tokens_RW.shape[1]):
            emitted_N = j < verdict.num_emitted_R
            column_N = self.tokens_SL[:, length + j]
            self.tokens_SL[:, length + j] = torch.where(emitted_N, verdict.tokens_RW[:, j].int(), column_N)
        return length + verdict.num_emitted_R


def p_value(texts_N: Tensor, joint: Tensor) -> float:
    """Chi-square of the texts against their probabilities, rare ones pooled; 0 where an impossible one came up."""
    counts = texts_N.bincount(minlength=len(joint)).double()
    if counts[joint < 1e-15].any():
        return 0.0
    expected = joint * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0.5
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    return float(scipy.stats.chi2.sf(float(statistic), max(int(keep.sum()) - 1, 1)))


def one_round(
    s: Setting,
    mode: Mode,
    domains: Domains | None = None,
    counts: tuple[int, ...] | None = None,
    record: bool = True,
) -> tuple[float, VerifyResult]:
    """p-value of the joint distribution after one round, and its verdict. `counts`: drafts per request, in turn."""
    trials = Trials(s, mode, domains)
    trials.draft(START, s.num_drafts, record)
    counts = counts or (s.num_drafts,)
    count_N = torch.tensor(counts)[torch.arange(N) % len(counts)]
    verdict = trials.verify(START, count_N, s.num_drafts + 1)
    return p_value(trials.complete(trials.accept(verdict, START)), s.joint()), verdict
