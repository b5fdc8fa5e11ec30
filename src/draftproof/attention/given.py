"""Rows that carry an embedding in place of their token's: those of a prompt's images, or of embeddings given as such.

Shapes: T rows, S slots, W positions of a window, E embeddings, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """The embeddings of a pass's rows: row t carries given_EH[index_T[t]], or its token's where that is -1."""

    index_T: Tensor
    given_EH: Tensor

    def replaced(self, tokens_T: Tensor, blank: int) -> Tensor:
        """The rows' tokens, `blank` where a row carries an embedding."""
        return tokens_T.where(self.index_T < 0, blank)

    def over(self, embedded_TH: Tensor) -> Tensor:
        """The rows' embeddings; embedded_TH: their tokens'."""
        given_TH = self.given_EH[self.index_T.clamp(min=0)]
        return torch.where((self.index_T >= 0)[:, None], given_TH, embedded_TH)


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
    """The embeddings of a step, by slot and position: slot s carries given_EH[index_SW[s, w]] at position
    first_S[s] + w, and its token's where that is -1 or past the window.

    Example: a slot whose rows 10..15 are computed, of which 12..14 are an image's: first 10, index -1 -1 0 1 2 -1.
    """

    given_EH: Tensor
    index_SW: Tensor  # int64
    first_S: Tensor  # int64

    def at(self, slots_T: Tensor, positions_T: Tensor) -> GivenEmbeddings:
        """The embeddings of rows whose tokens stand at these positions; a negative one has none."""
        offset_T = positions_T - self.first_S[slots_T]
        width = self.index_SW.shape[1]
        index_T = self.index_SW[slots_T, offset_T.clamp(0, width - 1)]
        inside_T = (offset_T >= 0) & (offset_T < width) & (positions_T >= 0)
        return GivenEmbeddings(torch.where(inside_T, index_T, -1), self.given_EH)
