"""Replay: proposes recorded plain output of the same prompts, wrong at a chosen rate, at a real drafter's cost.

Output is exact whatever is proposed, so speed at any acceptance can be measured on any model, even with random weights.

Shapes: G recordings, L longest recorded output, S slots, R requests, K drafts, W drafts at most.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec, Proposal, RoundSize, Verified
from draftproof.drafters.context import DraftContext
from draftproof.drafters.recordings import Recording, RecordingIndex, load, padded, token_noise
from draftproof.models.cost import Cost
from draftproof.runtime.transfer import upload
from draftproof.schema import is_number, is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Settings of the method. `recordings`: a file that `save` wrote. `acceptance`: the probability that draft j is the
    recorded token, one number or a list by j, whose last entry holds beyond its end. `seed` decides which tokens are
    wrong."""

    recordings: str = ""
    acceptance: float | Sequence[float] = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = self.rates()
        if not numbers or not all(is_number(a, 0, 1) for a in numbers):
            raise ValueError(
                f"speculative_config: acceptance={self.acceptance!r}: must be a number from 0 to 1, or a list of them"
            )
        if not isinstance(self.recordings, (str, os.PathLike)) or not self.recordings:
            raise ValueError(
                f"speculative_config: recordings={self.recordings!r}: must be a file of "
                "draftproof.drafters.recordings.save"
            )
        if not is_whole(self.seed):
            raise ValueError(f"speculative_config: seed={self.seed!r}: must be an integer")

    def rates(self) -> list[float]:
        return list(self.acceptance) if isinstance(self.acceptance, Sequence) else [self.acceptance]


class ReplayDrafter(Drafter):
    """Runs `inner` for its cost and proposes from the recordings instead. `spec` is the inner drafter's."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        options: ReplayOptions,
        inner: Drafter | None,
        *,
        num_slots: int,
        num_drafts: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        # its own proposals do not end where the inner one's would
        self.spec = replace(inner.spec, estimates=False, stops=False) if inner is not None else DraftSpec()
        self.inner = inner
        self._index = RecordingIndex(recordings)
        self._vocab_size = vocab_size
        self._steps_W = torch.arange(num_drafts, device=device)
        rates = torch.tensor(options.rates(), dtype=torch.float32, device=device)
        self._acceptance_W = rates[self._steps_W.clamp(max=len(rates) - 1)]
        self._tokens_GL = padded([r.output for r in recordings]).to(device)
        self._noise_GL = token_noise(self._tokens_GL, options.seed).to(device)
        self._spans = [(len(r.prompt), len(r.prompt) + len(r.output)) for r in recordings]
        # recording, position of its first output token, position after its last; empty span: no recording
        self._span_S3 = torch.zeros((num_slots, 3), dtype=torch.int64, device=device)

    def set_acceptance(self, rates: Sequence[float]) -> None:
        """From now on draft j is right with probability `rates[j]`, in recorded graphs too; the last rate holds for
        later drafts."""
        steps_W = self._steps_W.clamp(max=len(rates) - 1)
        self._acceptance_W.copy_(torch.tensor(rates, dtype=torch.float32, device=steps_W.device)[steps_W])

    def bind(self, runtime: DraftRuntime) -> None:
        if self.inner is not None:
            self.inner.bind(runtime)

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        index = self._index.find(tokens)
        span = (0, 0, 0) if index is None else (index, *self._spans[index])
        self._span_S3[slot] = upload(span, self._span_S3.device)
        if self.inner is not None:
            self.inner.admit(slot, tokens, num_cached)

    def release(self, slot: int) -> None:
        self._span_S3[slot] = 0
        if self.inner is not None:
            self.inner.release(slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """The recorded tokens, wrong at the chosen rate. Computed on the device, without host reads."""
        if self.inner is not None:
            self.inner.propose(verified, num_drafts)
        live_R = verified.live_R
        last_T = verified.positions_T
        last_R = (verified.query_start_loc_R1[:-1] + (live_R - 1).clamp(min=0)).clamp(max=len(last_T) - 1)
        first_R = last_T[last_R] + 2  # the next token is known, drafts come after it
        index_R, start_R, end_R = self._span_S3[verified.slots_R].unbind(1)
        count_R = torch.minimum((end_R - first_R).clamp(min=0), verified.k_R).masked_fill(live_R < 1, 0)
        place_RK = (first_R - start_R)[:, None] + self._steps_W[:num_drafts]
        place_RK = place_RK.clamp(0, self._tokens_GL.shape[1] - 1)
        tokens_RK = self._tokens_GL[index_R[:, None], place_RK].long()
        wrong_RK = self._noise_GL[index_R[:, None], place_RK] >= self._acceptance_W[:num_drafts]
        return Proposal((tokens_RK + wrong_RK) % self._vocab_size, count_R)

    def cost(self, size: RoundSize) -> Cost | None:
        return super().cost(size) if self.inner is None else self.inner.cost(size)


def build(ctx: DraftContext) -> ReplayDrafter:
    """A replay drafter. ValueError for invalid options and an unusable file."""
    options = parse_options("speculative_config", ctx.options, ReplayOptions)
    vocab_size = ctx.target.config.vocab_size
    return ReplayDrafter(
        load(options.recordings, vocab_size),
        options,
        ctx.inner,
        num_slots=ctx.config.max_num_seqs + 1,  # one more, which padding rows name
        num_drafts=ctx.num_drafts,
        vocab_size=vocab_size,
        device=ctx.device,
    )
