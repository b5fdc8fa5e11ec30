"""From the device's verdict to the host's records: tokens, logprobs, statistics, and who has finished.

Shapes: R requests of a pass, T its rows, M its sampled rows, W drafts + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.engine.scheduler import Plan, Work
from draftproof.engine.sequence import LogprobRow, Sequence
from draftproof.models.decoder import Decoder
from draftproof.sampling.sampler import Sampler
from draftproof.sampling.verifier import Verdict
from draftproof.types import FinishReason


@dataclass(slots=True)
class Emission:
    """What one pass added to one sequence; the first `num_accepted` tokens were drafts."""

    sequence: Sequence
    token_ids: list[int]
    text: str
    num_drafted: int
    num_accepted: int
    is_round: bool  # not the token that a prompt's last chunk gives
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Outbox:
    """The one place where results are read from the device."""

    def __init__(self, target: Decoder, sampler: Sampler) -> None:
        self._target = target
        self._sampler = sampler

    def deliver(self, plan: Plan, verdict: Verdict, logits_MV: Tensor, hidden_TH: Tensor) -> list[Emission]:
        """Apply the verdict to every sequence of the plan; sequences that emitted nothing are left out."""
        emitted = verdict.num_emitted_R.tolist()
        tokens = verdict.tokens_RW.tolist()
        emissions = []
        first_row = first_sampled = 0
        for r, work in enumerate(plan.work):
            if work.sequence.wants_prompt_logprobs:
                self._score_prompt(work, hidden_TH[first_row : first_row + work.num_rows])
            if work.num_sampled == 0:
                work.sequence.num_computed += work.num_rows
            else:
                logits = logits_MV[first_sampled : first_sampled + emitted[r]]
                emissions.append(self._emit(work, tokens[r][: emitted[r]], logits))
            first_row += work.num_rows
            first_sampled += work.num_sampled
        return emissions

    def _emit(self, work: Work, token_ids: list[int], logits_WV: Tensor) -> Emission:
        s, num_drafted = work.sequence, work.num_sampled - 1
        if token_ids[-1] < 0:  # by law 1 only the last can be: a draft never equals it
            token_ids.pop()
            return self._fail(s, token_ids, num_drafted)
        is_round = s.num_outputs > 0
        if is_round:
            s.speculation.record(num_drafted, len(token_ids) - 1)
        verdict = s.checker.push(token_ids)
        num_accepted = min(len(token_ids) - 1, verdict.kept)
        kept = token_ids[: verdict.kept]
        if s.params.logprobs is not None:
            s.logprobs += self._score(logits_WV[: len(kept)], kept, s.params.logprobs)
        s.tokens += kept
        s.num_computed = len(s.tokens) - 1
        s.finish_reason = verdict.finish_reason
        reason, stop = verdict.finish_reason, verdict.stop_reason
        return Emission(s, kept, verdict.text, num_drafted, num_accepted, is_round, reason, stop)

    def _fail(self, s: Sequence, token_ids: list[int], num_drafted: int) -> Emission:
        """The target's logits hold no number: the tokens before stand, then the sequence ends."""
        s.tokens += token_ids
        s.finish_reason = "error"
        return Emission(s, token_ids, s.checker.flush(), num_drafted, len(token_ids), False, "error", None)

    def _score(self, logits_MV: Tensor, token_ids: list[int], num: int) -> list[LogprobRow]:
        if not token_ids:
            return []
        tokens_M = torch.tensor(token_ids, device=logits_MV.device)
        own_M, rank_M, ids_MN, top_MN = self._sampler.logprobs(logits_MV, tokens_M, num)
        rows = zip(token_ids, own_M.tolist(), rank_M.tolist(), ids_MN.tolist(), top_MN.tolist(), strict=True)
        return [LogprobRow(t, own, rank, list(zip(ids, top, strict=True))) for t, own, rank, ids, top in rows]

    def _score_prompt(self, work: Work, hidden_TH: Tensor) -> None:
        """The row at position p scores prompt token p + 1. What an earlier computation scored is kept."""
        s = work.sequence
        assert s.params.prompt_logprobs is not None
        start = len(s.prompt_logprobs)  # next to score: prompt token start + 1
        rows = range(start - s.num_computed, min(work.num_rows, s.num_prompt - 1 - s.num_computed))
        if len(rows) > 0 and rows.start >= 0:
            logits_MV = self._target.logits(hidden_TH[rows.start : rows.stop])
            token_ids = s.tokens[start + 1 : start + 1 + len(rows)]
            s.prompt_logprobs += self._score(logits_MV, token_ids, s.params.prompt_logprobs)
