"""Log-probabilities that requests ask for: launched after their pass, read when their copy completes.

Shapes: T rows of a pass, M sampled rows, R requests, X columns of the result, S slots, L positions, P scored rows,
N alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draftproof.engine.interface import LogprobRow, ScheduledRequest
from draftproof.models.decoder import Decoder
from draftproof.runtime.transfer import Arrivals, download, upload
from draftproof.sampling.sampler import Sampler


@dataclass(slots=True)
class Scores:
    """Logprobs of some requests of a pass. `shares`: index of the request -> (first row, rows, alternatives)."""

    shares: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    arrivals: Arrivals | None = None

    def rows_of(self, index: int, token_ids: list[int] | None) -> list[LogprobRow]:
        """A request's first rows, one for each of `token_ids`; None: all its rows. [] if it asked for no logprobs."""
        if index not in self.shares or self.arrivals is None:
            return []
        start, count, num = self.shares[index]
        num_rows = count if token_ids is None else len(token_ids)
        assert num_rows <= count, (num_rows, count)
        ids_P, own_P, rank_P, ids_PN, top_PN = (
            t[start : start + num_rows].tolist() for t in self.arrivals.wait()
        )
        rows = zip(ids_P, own_P, rank_P, ids_PN, top_PN, strict=True)
        return [
            LogprobRow(t, own, rank, list(zip(ids[:num], top[:num], strict=True)))
            for t, own, rank, ids, top in rows
        ]


class LogprobScorer:
    """Launches the computation of logprobs, without waiting for it."""

    def __init__(self, target: Decoder, sampler: Sampler) -> None:
        self._target = target
        self._sampler = sampler

    def outputs(
        self, scheduled: Sequence[ScheduledRequest], result_RX: Tensor, logits_MV: Tensor
    ) -> Scores | None:
        """Scores of the tokens in the first columns of `result_RX`, sampled from `logits_MV`, rejected ones included.
        None if no request asks."""
        if all(s.num_logprobs is None for s in scheduled):
            return None
        scores, rows, tokens_at, first = Scores(), list[int](), list[int](), 0
        for r, s in enumerate(scheduled):
            if s.num_logprobs is not None and s.num_sampled:
                scores.shares[r] = (len(rows), s.num_sampled, s.num_logprobs)
                rows += range(first, first + s.num_sampled)
                start = r * result_RX.shape[1]
                tokens_at += range(start, start + s.num_sampled)
            first += s.num_sampled
        if rows:
            rows_P, tokens_at_P = upload(rows + tokens_at, logits_MV.device).chunk(2)
            logits_PV = logits_MV if len(rows) == len(logits_MV) else logits_MV[rows_P]
            self._score(scores, logits_PV, result_RX.reshape(-1)[tokens_at_P].clamp(min=0))
        return scores

    def prompts(
        self, scheduled: Sequence[ScheduledRequest], hidden_TH: Tensor, tokens_SL: Tensor
    ) -> Scores | None:
        """Scores of prompt tokens: the row at position p scores the token at p + 1. None if no request asks."""
        if not any(s.scored[1] for s in scheduled):
            return None
        scores, rows, tokens_at, first = Scores(), list[int](), list[int](), 0
        for r, s in enumerate(scheduled):
            first_row, num_rows = s.scored
            if num_rows:
                scores.shares[r] = (len(rows), num_rows, s.num_prompt_logprobs)
                rows += range(first + first_row, first + first_row + num_rows)
                next_token = s.slot * tokens_SL.shape[1] + s.start + first_row + 1
                tokens_at += range(next_token, next_token + num_rows)
            first += s.num_rows
        if rows:
            rows_P, tokens_at_P = upload(rows + tokens_at, hidden_TH.device).chunk(2)
            tokens_P = tokens_SL.view(-1)[tokens_at_P].long()
            self._score(scores, self._target.logits(hidden_TH[rows_P]), tokens_P)
        return scores

    def _score(self, scores: Scores, logits_PV: Tensor, tokens_P: Tensor) -> None:
        num = max(num for _, _, num in scores.shares.values())
        scores.arrivals = download([tokens_P, *self._sampler.logprobs(logits_PV, tokens_P, num)])
