"""Rows that carry an embedding in place of their token's: those of a prompt's images, or of embeddings given as such.

Shapes: T rows, S slots, W positions of a window, E embeddings, H hidden size, X = H * (1 + L) an embedding and what
follows it: L vectors, of which the stream is given the i-th after layer i (deepstack).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Added:
    """What a family adds to the stream at an image's rows: after each of its first `num_layers` layers one vector.
    `in_taps`: a drafter that taps the stream there sees it with the vector."""

    num_layers: int = 0
    in_taps: bool = True


NOTHING_ADDED = Added()


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """The embeddings of a pass's rows: row t carries the first H of given_EX[index_T[t]], or its token's embedding
    where that is -1. `adds_E`: which of them have something to add after layers, too. `whole`: rows of a drafter's that
    see each other."""

    index_T: Tensor
    given_EX: Tensor
    added: Added = NOTHING_ADDED
    adds_E: Tensor | None = None
    whole: WholeRows | None = None

    def replaced(self, tokens_T: Tensor, blank: int) -> Tensor:
        """The rows' tokens, `blank` where a row carries an embedding."""
        return tokens_T.where(self.index_T < 0, blank)

    def over(self, embedded_TH: Tensor) -> Tensor:
        """The rows' embeddings; embedded_TH: their tokens'."""
        given_TH = self._part(0, embedded_TH.shape[1])
        return torch.where((self.index_T >= 0)[:, None], given_TH, embedded_TH)

    def adding(self, layer: int, stream_TH: Tensor) -> tuple[Tensor, Tensor] | None:
        """(which rows are given something after a layer [T, 1], the stream with it); None: none are."""
        if self.adds_E is None or layer >= self.added.num_layers:
            return None
        is_given_T1 = ((self.index_T >= 0) & self.adds_E[self.index_T.clamp(min=0)])[:, None]
        added_TH = stream_TH + self._part(1 + layer, stream_TH.shape[1])
        return is_given_T1, torch.where(is_given_T1, added_TH, stream_TH)

    def _part(self, number: int, size: int) -> Tensor:
        """Part `number` of every row's vector, [T, size]; anything for rows without."""
        return self.given_EX[:, number * size : (number + 1) * size][self.index_T.clamp(min=0)]


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Rows that see beyond their own position, to the end of the item they belong to: row t sees more_T[t] positions
    more. `more`, `positions`: the same numbers and the rows' positions on the host. `windows_only`: in layers without a
    window rows see no further than their own position."""

    more_T: Tensor
    more: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]
    windows_only: bool = False

    def groups(self, window: int) -> list[tuple[int, Tensor]]:
        """(window, index of the rows) of rows that see as many positions before their end: a window counts from a row's
        own position. 0: all positions, where the window cuts none off."""
        windows = window + self.more
        windows[(self.more > 0) & (self.positions < window)] = 0
        device = self.more_T.device
        return [
            (int(each), torch.from_numpy(np.flatnonzero(windows == each)).to(device))
            for each in np.unique(windows)
        ]


@dataclass(frozen=True, slots=True)
class GivenRows:
    """The embeddings of a step, by slot and position: slot s carries given_EX[index_SW[s, w]] at position
    first_S[s] + w, and its token's where that is -1 or past the window.

    Example: a slot whose rows 10..15 are computed, of which 12..14 are an image's: first 10, index -1 -1 0 1 2 -1.
    """

    given_EX: Tensor
    index_SW: Tensor  # int64
    first_S: Tensor  # int64
    added: Added = NOTHING_ADDED
    adds_E: Tensor | None = None  # see `GivenEmbeddings`
    more_SW: Tensor | None = None  # int64: positions that a drafter's row sees beyond its own
    windows_only: bool = False  # see `WholeRows`
    # by whoever has embeddings of its own: what makes the same rows of these
    others: Mapping[object, Callable[[], GivenRows]] = field(default_factory=dict)

    def of(self, embeds: Sequence[object]) -> GivenRows:
        """These rows with a drafter's own embeddings, `DraftSpec.embeds`; as they are, where it has none."""
        return self.others[embeds[0]]() if embeds else self

    def at(self, slots_T: Tensor, positions_T: Tensor) -> GivenEmbeddings:
        """The embeddings of rows whose tokens stand at these positions; a negative one has none."""
        offset_T = positions_T - self.first_S[slots_T]
        width = self.index_SW.shape[1]
        index_T = self.index_SW[slots_T, offset_T.clamp(0, width - 1)]
        inside_T = (offset_T >= 0) & (offset_T < width) & (positions_T >= 0)
        whole = None
        if self.more_SW is not None:
            more_T = torch.where(inside_T, self.more_SW[slots_T, offset_T.clamp(0, width - 1)], 0)
            more, positions = more_T.cpu().numpy(), positions_T.cpu().numpy()
            whole = WholeRows(more_T, more, positions, self.windows_only) if more.any() else None
        return GivenEmbeddings(
            torch.where(inside_T, index_T, -1), self.given_EX, self.added, self.adds_E, whole
        )
