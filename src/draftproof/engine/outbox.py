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


@dataclass(slots=True)
class Flight:
    """A pass on its way to the host. Columns of `result`: W tokens, emitted, drafted, proposed, broken."""

    plan: Plan
    result_RX: Tensor  # int64
    logits_MV: Tensor
    hidden_TH: Tensor


class Outbox:
    """The one place where results are read from the device."""

    def __init__(self, target: Decoder, sampler: Sampler) -> None:
        self._target = target
        self._sampler = sampler

    def deliver(self, flight: Flight) -> tuple[list[Emission], list[Sequence]]:
        """Apply a pass to its sequences: what each emitted, and those whose drafts a bad id cut short.

        Sequences that emitted nothing are left out, and so are those that ended while the pass was in flight.
        """
        emissions: list[Emission] = []
        broken: list[Sequence] = []
        first_row = first_sampled = 0
        for work, row in zip(flight.plan.work, flight.result_RX.tolist(), strict=True):
            *tokens, emitted, drafted, proposed, is_broken = row
            s = work.sequence
            if s.finish_reason is None and s.slot >= 0:
                if s.wants_prompt_logprobs:
                    self._score_prompt(work, flight.hidden_TH[first_row : first_row + work.num_rows])
                if work.num_sampled:
                    logits_WV = flight.logits_MV[first_sampled : first_sampled + emitted]
                    emissions.append(self._emit(work, tokens[:emitted], drafted, logits_WV))
                if s.num_pending == 0:
                    s.num_drafts = proposed
                if is_broken:
                    broken.append(s)
            first_row += work.num_rows
            first_sampled += work.num_sampled
        return emissions, broken

    def _emit(self, work: Work, token_ids: list[int], num_drafted: int, logits_WV: Tensor) -> Emission:
        s = work.sequence
        s.num_pending -= work.num_sampled
        num_accepted, is_round = len(token_ids) - 1, s.num_outputs > 0
        if is_round:
            s.speculation.record(num_drafted, num_accepted)
        failed = (
            token_ids[-1] < 0
        )  # the row held no number; by law 1 only the last can: a draft never equals it
        verdict = s.checker.push(token_ids[:-1] if failed else token_ids)
        kept, text, reason = token_ids[: verdict.kept], verdict.text, verdict.finish_reason
        if failed and reason is None:
            text, reason = text + s.checker.flush(), "error"
        if s.params.logprobs is not None:
            s.logprobs += self._score(logits_WV[: len(kept)], kept, s.params.logprobs)
        s.tokens += kept
        s.num_computed = len(s.tokens) - 1
        s.finish_reason = reason
        num_accepted = min(num_accepted, verdict.kept)
        return Emission(s, kept, text, num_drafted, num_accepted, is_round, reason, verdict.stop_reason)

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
        done = len(s.prompt_logprobs)  # next to score: prompt token done + 1
        rows = range(done - work.start, min(work.num_rows, s.num_prompt - 1 - work.start))
        if len(rows) > 0 and rows.start >= 0:
            logits_MV = self._target.logits(hidden_TH[rows.start : rows.stop])
            token_ids = s.tokens[done + 1 : done + 1 + len(rows)]
            s.prompt_logprobs += self._score(logits_MV, token_ids, s.params.prompt_logprobs)
