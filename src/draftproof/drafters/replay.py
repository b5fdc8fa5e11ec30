"""Replay: proposes the recorded plain output of the same prompts, wrong at a chosen rate, at a real drafter's cost.

Output is exact whatever is proposed, so speed at any acceptance can be measured on any model, random weights included.

Shapes: G recordings, L longest recorded output, S slots, R requests, K drafts, W drafts at most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.config import parse_options
from draftproof.drafters.base import Drafter, DraftSpec, Proposal, Verified
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.head import DraftMemory
from draftproof.kernels import noise
from draftproof.kernels.transfer import upload
from draftproof.types import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """`recordings`: a file that `save` wrote. `acceptance`: the probability that draft j is the recorded token, for
    each j or one number for all; the last one holds for drafts past the end. `seed`: which tokens are wrong."""

    recordings: str = ""
    acceptance: float | Sequence[float] = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.recordings:
            raise ValueError(
                "speculative_config: this method needs 'recordings': a file of draftproof.drafters.replay.save"
            )
        numbers = self.rates()
        if not numbers or not all(isinstance(a, (int, float)) and 0 <= a <= 1 for a in numbers):
            raise ValueError(
                f"speculative_config: acceptance={self.acceptance!r}: must be a number from 0 to 1, or a list of them"
            )
        if not isinstance(self.recordings, (str, os.PathLike)):
            raise ValueError(f"speculative_config: recordings={self.recordings!r}: must be a file's path")
        if not isinstance(self.seed, int):
            raise ValueError(f"speculative_config: seed={self.seed!r}: must be an integer")

    def rates(self) -> list[float]:
        return list(self.acceptance) if isinstance(self.acceptance, Sequence) else [self.acceptance]


@dataclass(frozen=True, slots=True)
class Recording:
    prompt: tuple[int, ...]
    output: tuple[int, ...]


def save(path: str | Path, outputs: Iterable[RequestOutput]) -> None:
    """Write the finished `outputs` of a plain run as recordings."""
    listed = [
        {"prompt_token_ids": list(o.prompt_token_ids), "token_ids": list(choice.token_ids)}
        for o in outputs
        for choice in o.outputs
    ]
    Path(path).write_text(json.dumps(listed), encoding="utf-8")


def load(path: str | Path, vocab_size: int) -> list[Recording]:
    """What `save` wrote; ValueError names the file and what is wrong in it."""
    try:
        listed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"speculative_config: recordings={str(path)!r}: cannot be read ({error})") from error
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"{path}: must hold a list of recordings; write it with draftproof.drafters.replay.save"
        )
    return [
        Recording(*(_ids(entry, key, vocab_size, path) for key in ("prompt_token_ids", "token_ids")))
        for entry in listed
    ]


def _ids(entry: Any, key: str, vocab_size: int, path: str | Path) -> tuple[int, ...]:
    ids = entry.get(key) if isinstance(entry, Mapping) else None
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
        raise ValueError(
            f"{path}: a recording's {key} must be a list of ids below the target's vocab_size={vocab_size}; record "
            "again with this target"
        )
    return tuple(ids)


class Library:
    """Finds the recording that a request's known tokens are the beginning of."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._outputs = [r.output for r in recordings]
        self._by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, recording in enumerate(recordings):
            self._by_prompt.setdefault(recording.prompt, []).append(index)
        self._lengths = sorted({len(prompt) for prompt in self._by_prompt}, reverse=True)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Index of the recording, None without one. `tokens`: a prompt, and after a preemption some of its output.

        Of several outputs of a prompt the first that agrees.
        """
        for length in self._lengths:
            known = tuple(tokens[length:])
            for index in self._by_prompt.get(tuple(tokens[:length]), ()) if length <= len(tokens) else ():
                if self._outputs[index][: len(known)] == known:
                    return index
        return None


class ReplayDrafter:
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
        self.spec = inner.spec if inner is not None else DraftSpec()
        self._inner = inner
        self._library = Library(recordings)
        self._vocab_size = vocab_size
        rates = options.rates()
        self._acceptance_W = torch.tensor(
            (rates + rates[-1:] * num_drafts)[:num_drafts], dtype=torch.float32, device=device
        )
        self._steps_W = torch.arange(num_drafts, device=device)
        # a token's noise belongs to its place in its recording: it is the same in every run and batch
        self._tokens_GL = _padded([r.output for r in recordings]).to(device)
        num, longest = self._tokens_GL.shape
        places_G, places_L = torch.arange(num), torch.arange(longest)
        seeds_G = torch.full_like(places_G, options.seed)
        self._noise_GL = noise.uniform(noise.token_bits(seeds_G, places_G, places_L)).to(device)
        self._spans = [(len(r.prompt), len(r.prompt) + len(r.output)) for r in recordings]
        # recording, position of its first token, position after its last; an empty span: nothing is recorded
        self._span_S3 = torch.zeros((num_slots, 3), dtype=torch.int64, device=device)

    def bind(self, memory: DraftMemory) -> None:
        self._forward("bind", memory)

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        index = self._library.find(tokens)
        span = (0, 0, 0) if index is None else (index, *self._spans[index])
        self._span_S3[slot] = upload(span, self._span_S3.device)
        self._forward("admit", slot, tokens, num_cached)

    def release(self, slot: int) -> None:
        self._span_S3[slot] = 0
        self._forward("release", slot)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        """A function of the device's tensors alone: the host never looks."""
        if self._inner is not None:
            self._inner.propose(verified, num_drafts)
        live_R, last_T = verified.live_R, verified.positions_T
        last_R = (verified.cu_R1[:-1] + (live_R - 1).clamp(min=0)).clamp(max=len(last_T) - 1)
        first_R = last_T[last_R] + 2  # the next token is known, drafts come after it
        index_R, start_R, end_R = self._span_S3[verified.slots_R].unbind(1)
        count_R = torch.minimum((end_R - first_R).clamp(min=0), verified.k_R).masked_fill(live_R < 1, 0)
        place_RK = (first_R - start_R)[:, None] + self._steps_W[:num_drafts]
        place_RK = place_RK.clamp(0, self._tokens_GL.shape[1] - 1)
        tokens_RK = self._tokens_GL[index_R[:, None], place_RK].long()
        wrong_RK = self._noise_GL[index_R[:, None], place_RK] >= self._acceptance_W[:num_drafts]
        return Proposal((tokens_RK + wrong_RK) % self._vocab_size, count_R)

    def _forward(self, name: str, *args: object) -> None:
        verb = getattr(self._inner, name, None)
        if verb is not None:
            verb(*args)


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """int32 [G, L], at least one column."""
    longest = max(1, *map(len, rows)) if rows else 1
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int32)


def build(given: DraftBuild) -> ReplayDrafter:
    """ValueError for options that make no sense and a file that cannot be used."""
    options = parse_options("speculative_config", given.options, ReplayOptions)
    vocab_size = given.target.config.vocab_size
    return ReplayDrafter(
        load(options.recordings, vocab_size),
        options,
        given.inner,
        num_slots=given.config.max_num_seqs + 1,  # padding rows name one that no request gets
        num_drafts=given.num_drafts,
        vocab_size=vocab_size,
        device=given.device,
    )
