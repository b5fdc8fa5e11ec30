"""Log-probabilities that requests ask for: computed behind the pass they belong to, read when it has come home.

Shapes: R requests of a pass, T its rows, M its sampled rows, W the most of one request, P scored rows, N alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from draftproof.engine.scheduler import Plan
from draftproof.engine.sequence import LogprobRow
from draftproof.kernels.transfer import Arrivals, download, upload
from draftproof.models.decoder import Decoder
from draftproof.sampling.sampler import Sampler


@dataclass(slots=True)
class Scores:
    """Of some requests of a pass. `shares`: index in the plan -> first row, rows, alternatives."""

    shares: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    arrivals: Arrivals | None = None

    def of(self, index: int, token_ids: list[int]) -> list[LogprobRow]:
        """The first rows of a request, one for each of `token_ids`; none where it asked for none."""
        if index not in self.shares or self.arrivals is None or not token_ids:
            return []
        start, count, num = self.shares[index]
        assert len(token_ids) <= count, (token_ids, count)
        own_P, rank_P, ids_PN, top_PN = (
            t[start : start + len(token_ids)].tolist() for t in self.arrivals.wait()
        )
        rows = zip(token_ids, own_P, rank_P, ids_PN, top_PN, strict=True)
        return [
            LogprobRow(t, own, rank, list(zip(ids[:num], top[:num], strict=True)))
            for t, own, rank, ids, top in rows
        ]


class Scorer:
    """Starts the computation; waits for nothing."""

    def __init__(self, target: Decoder, sampler: Sampler) -> None:
        self._target = target
        self._sampler = sampler

    def outputs(self, plan: Plan, result_RX: Tensor, logits_MV: Tensor) -> Scores:
        """Of the tokens in the first columns of `result_RX`, sampled from `logits_MV`; rejected ones' are not read."""
        scores, rows, tokens_at, first = Scores(), list[int](), list[int](), 0
        for r, work in enumerate(plan.work):
            num = work.sequence.params.logprobs
            if num is not None and work.num_sampled:
                scores.shares[r] = (len(rows), work.num_sampled, num)
                rows += range(first, first + work.num_sampled)
                start = r * result_RX.shape[1]
                tokens_at += range(start, start + work.num_sampled)
            first += work.num_sampled
        if rows:
            rows_P, tokens_at_P = upload(rows + tokens_at, logits_MV.device).chunk(2)
            logits_PV = logits_MV if len(rows) == len(logits_MV) else logits_MV[rows_P]
            self._score(scores, logits_PV, result_RX.reshape(-1)[tokens_at_P].clamp(min=0))
        return scores

    def prompts(self, plan: Plan, hidden_TH: Tensor) -> Scores:
        """The row at position p scores prompt token p + 1. What an earlier computation scored is left out."""
        scores, rows, tokens, first = Scores(), list[int](), list[int](), 0
        for r, work in enumerate(plan.work):
            s, num = work.sequence, work.sequence.params.prompt_logprobs
            done = s.num_scored  # next to score: prompt token done + 1
            wanted = range(done - work.start, min(work.num_rows, s.num_prompt - 1 - work.start))
            if s.wants_prompt_logprobs and num is not None and len(wanted) and wanted.start >= 0:
                scores.shares[r] = (len(rows), len(wanted), num)
                rows += range(first + wanted.start, first + wanted.stop)
                tokens += s.tokens[done + 1 : done + 1 + len(wanted)]
                s.num_scored += len(wanted)
            first += work.num_rows
        if rows:
            rows_P, tokens_P = upload(rows + tokens, hidden_TH.device).chunk(2)
            self._score(scores, self._target.logits(hidden_TH[rows_P]), tokens_P)
        return scores

    def _score(self, scores: Scores, logits_PV: Tensor, tokens_P: Tensor) -> None:
        num = max(num for _, _, num in scores.shares.values())
        scores.arrivals = download(self._sampler.logprobs(logits_PV, tokens_P, num))
