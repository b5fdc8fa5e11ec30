"""Rows whose input embedding replaces their token's: rows of a prompt's images, or of `prompt_embeds`.

Shapes: T rows, S slots, W positions of a window, E embeddings, H hidden size, X = H * (1 + L): an embedding followed by
L vectors, of which the i-th is added to the residual stream after layer i (deepstack).
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
    """What a family adds to the residual stream at an image's rows: one vector after each of its first `num_layers`
    layers. `in_taps`: a drafter that taps the stream there sees it with the vector added.
    """

    num_layers: int = 0
    in_taps: bool = True


NOTHING_ADDED = Added()


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """The embeddings of a pass's rows.

    Row t has the first H numbers of given_EX[index_T[t]], or its token's embedding if the index is -1. `adds_E`: which
    embeddings also have vectors to add after layers. `whole`: a drafter's rows that see each other.
    """

    index_T: Tensor
    given_EX: Tensor
    added: Added = NOTHING_ADDED
    adds_E: Tensor | None = None
    whole: WholeRows | None = None

    def replaced(self, tokens_T: Tensor, blank: int) -> Tensor:
        """The rows' tokens, with `blank` for rows that have an embedding."""
        return tokens_T.where(self.index_T < 0, blank)

    def over(self, embedded_TH: Tensor) -> Tensor:
        """The rows' input embeddings; embedded_TH: their tokens'."""
        given_TH = self._part(0, embedded_TH.shape[1])
        return torch.where((self.index_T >= 0)[:, None], given_TH, embedded_TH)

    def adding(self, layer: int, stream_TH: Tensor) -> tuple[Tensor, Tensor] | None:
        """(mask of the rows to which vectors are added after a layer [T, 1], the stream with them added); None: no
        rows.
        """
        if self.adds_E is None or layer >= self.added.num_layers:
            return None
        is_given_T1 = ((self.index_T >= 0) & self.adds_E[self.index_T.clamp(min=0)])[:, None]
        added_TH = stream_TH + self._part(1 + layer, stream_TH.shape[1])
        return is_given_T1, torch.where(is_given_T1, added_TH, stream_TH)

    def _part(self, number: int, size: int) -> Tensor:
        """Part `number` of every row's vector, [T, size]; arbitrary for rows without an embedding."""
        return self.given_EX[:, number * size : (number + 1) * size][self.index_T.clamp(min=0)]


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Rows that see beyond their own position, to the end of their item: row t sees more_T[t] more positions.

    `more`, `positions`: the same numbers and the rows' positions, on the host. `windows_only`: in layers without a
    window rows see only up to their own position.
    """

    more_T: Tensor
    more: np.ndarray[Any, np.dtype[np.int64]]
    positions: np.ndarray[Any, np.dtype[np.int64]]
    windows_only: bool = False

    def groups(self, window: int) -> list[tuple[int, Tensor]]:
        """(effective window, indices of the rows that have it). A window counts from a row's own position.

        An effective window of 0 means all positions, for rows whose window excludes none.
        """
        windows = window + self.more
        windows[(self.more > 0) & (self.positions < window)] = 0
        device = self.more_T.device
        return [
            (int(each), torch.from_numpy(np.flatnonzero(windows == each)).to(device))
            for each in np.unique(windows)
        ]


@dataclass(frozen=True, slots=True)
class GivenRows:
    """The embeddings of a step, by slot and position.

    Slot s has given_EX[index_SW[s, w]] at position first_S[s] + w, and its token's embedding if the index is -1 or the
    position is outside the window.
    Example: a slot whose rows 10..15 are computed, of which 12..14 are an image's: first 10, index -1 -1 0 1 2 -1.
    """

    given_EX: Tensor
    index_SW: Tensor  # int64
    first_S: Tensor  # int64
    added: Added = NOTHING_ADDED
    adds_E: Tensor | None = None  # see `GivenEmbeddings`
    more_SW: Tensor | None = None  # int64: additional positions that a drafter's row sees after its own
    windows_only: bool = False  # see `WholeRows`
    # by owner of separate embeddings (a drafter): makes these rows with them
    others: Mapping[object, Callable[[], GivenRows]] = field(default_factory=dict)

    def of(self, embeds: Sequence[object]) -> GivenRows:
        """These rows with a drafter's own embeddings (`DraftSpec.embeds`); unchanged if it has none."""
        return self.others[embeds[0]]() if embeds else self

    def at(self, slots_T: Tensor, positions_T: Tensor) -> GivenEmbeddings:
        """The embeddings of rows whose tokens are at these positions; negative positions have none."""
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
