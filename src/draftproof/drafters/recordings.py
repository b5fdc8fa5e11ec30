"""Recorded outputs of plain decoding: saved, loaded, and looked up by a request's first tokens.

Shapes: G recordings, L longest recorded output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.kernels.sample import noise
from draftproof.schema import is_whole
from draftproof.types import RequestOutput


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
    """The recordings that `save` wrote; ValueError names the file and what is wrong in it."""
    try:
        listed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"speculative_config: recordings={str(path)!r}: cannot be read ({error})") from error
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"{path}: must hold a list of recordings; write it with draftproof.drafters.recordings.save"
        )
    return [
        Recording(*(_ids(entry, key, vocab_size, path) for key in ("prompt_token_ids", "token_ids")))
        for entry in listed
    ]


def _ids(entry: Any, key: str, vocab_size: int, path: str | Path) -> tuple[int, ...]:
    ids = entry.get(key) if isinstance(entry, Mapping) else None
    if not isinstance(ids, list) or not all(is_whole(i, 0, vocab_size - 1) for i in ids):
        raise ValueError(
            f"{path}: a recording's {key} must be a list of ids below the target's vocab_size={vocab_size}; record "
            "again with this target"
        )
    return tuple(ids)


class RecordingIndex:
    """Finds the recording that begins with a request's known tokens."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._outputs = [r.output for r in recordings]
        self._by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, recording in enumerate(recordings):
            self._by_prompt.setdefault(recording.prompt, []).append(index)
        self._lengths = sorted({len(prompt) for prompt in self._by_prompt}, reverse=True)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Index of the recording, or None. `tokens`: a prompt, after a preemption also some of its output.

        If a prompt has several outputs, the first that agrees counts.
        """
        for length in self._lengths:
            known = tuple(tokens[length:])
            for index in self._by_prompt.get(tuple(tokens[:length]), ()) if length <= len(tokens) else ():
                if self._outputs[index][: len(known)] == known:
                    return index
        return None


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """The rows as one int32 tensor [G, L], padded with 0; at least one column."""
    longest = max(1, *map(len, rows)) if rows else 1
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.int32)


def token_noise(tokens_GL: Tensor, seed: int) -> Tensor:
    """Uniform noise for each recorded token, on the host. It is a function of seed and place, so it does not depend on
    the run or the batch."""
    places_G, places_L = (torch.arange(size) for size in tokens_GL.shape)
    return noise.uniform(noise.token_bits(torch.full_like(places_G, seed), places_G, places_L))
