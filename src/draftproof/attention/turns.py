"""Where rows stand for rotary embeddings of several axes (M-RoPE): an image's rows at their times, heights and widths,
and text after it where the largest of these ends, which is not the row's place in the cache.

A slot's text past its images stands at its place plus one number, on all axes alike: that is all a row needs to know
once a prompt is through. While it is not, a step has a window of positions.
Shapes: S slots, E entries of a window, P positions of a table, D rotated size, F = D / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Window:
    """Positions on the three axes of the rows of a step: entry e holds axes_3E[:, e], and the row at a place of slot s
    has the entry place + shift_S[s]. `tables`: what was looked up for the layers of the step so far."""

    axes_3E: Tensor
    shift_S: Tensor
    tables: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def table(self, cos_sin_PD: Tensor, axes: Sequence[int]) -> Tensor:
        """Cosines and sines of the entries, [E, D]: pair f turns by the position on axis axes[f]."""
        key = cos_sin_PD.data_ptr(), tuple(axes)
        found = self.tables.get(key)
        if found is None:
            axis_D = torch.tensor([*axes, *axes], device=cos_sin_PD.device)
            index_ED = self.axes_3E.clamp(0, len(cos_sin_PD) - 1)[axis_D].t()
            found = self.tables[key] = cos_sin_PD.gather(0, index_ED).contiguous()
        return found


@dataclass(slots=True)
class Turns:
    """What is added to the place of a slot's row, int64; `window` instead, in a step that computes rows of images or
    before them."""

    shift_S: Tensor
    window: Window | None = None

    def of(self, cos_sin_PD: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(a table of cosines and sines, what is added to a row's place to find its row of the table)."""
        if self.window is None:
            return cos_sin_PD, self.shift_S
        return self.window.table(cos_sin_PD, axes), self.window.shift_S
