"""Positions of rows for rotary embeddings with several axes (M-RoPE). An image's rows have a time, height and width;
text after it continues from the largest of these, which differs from the row's place in the cache.

The position of text after a slot's images is its place plus one number, on all axes alike. After prefill that number is
all that rows need; during prefill, a step has a window of positions.
Shapes: S slots, E entries of a window, P positions of a table, D rotated size, F = D / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Window:
    """Positions on the three axes of the rows of a step.

    Entry e holds axes_3E[:, e]; the row at a place of slot s has entry place + shift_S[s]. `tables`: cached lookups for
    the layers of the step.
    """

    axes_3E: Tensor
    shift_S: Tensor
    tables: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def table(self, cos_sin_PD: Tensor, axes: Sequence[int]) -> Tensor:
        """Cosines and sines of the entries, [E, D]: pair f rotates by the position on axis axes[f]."""
        key = cos_sin_PD.data_ptr(), tuple(axes)
        found = self.tables.get(key)
        if found is None:
            axis_D = torch.tensor([*axes, *axes], device=cos_sin_PD.device)
            index_ED = self.axes_3E.clamp(0, len(cos_sin_PD) - 1)[axis_D].t()
            found = self.tables[key] = cos_sin_PD.gather(0, index_ED).contiguous()
        return found


@dataclass(slots=True)
class Turns:
    """The shift added to the place of a slot's row, int64. `window` replaces it in a step that computes rows of images
    or before them.
    """

    shift_S: Tensor
    window: Window | None = None

    def of(self, cos_sin_PD: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(a table of cosines and sines, the shift added to a row's place to index the table)."""
        if self.window is None:
            return cos_sin_PD, self.shift_S
        return self.window.table(cos_sin_PD, axes), self.window.shift_S
