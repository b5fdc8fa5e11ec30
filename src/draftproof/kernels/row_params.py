"""The sampling parameters of rows as one packed record, passed whole to every operator that samples.

A row is 64 bytes: int64 seed and top-k; fp32 temperature, top-p, min-p, repetition, presence and frequency penalty;
int64 prompt length, `PENALISED | CONSTRAINED | MASKED`, and the position below which stop ids are suppressed.
row_params.h declares the same record in C++, and Triton kernels read it by column. Shapes: M rows, or S slots.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_COLUMNS = 8  # int64; twice as many as fp32
# the slot has penalties; a list of constraints; masks of its rows (see kernels/process/spec.py)
PENALISED, CONSTRAINED, MASKED = 1, 2, 4
_ROW = struct.Struct("<2q6f3q")


def pack_row(
    *,
    seed: int = 0,
    top_k: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    prompt_len: int = 0,
    flags: int = 0,
    held_until: int = 0,
) -> list[int]:
    """One row as `NUM_COLUMNS` integers. The defaults are greedy sampling without processing."""
    floats = (temperature, top_p, min_p, repetition, presence, frequency)
    row = _ROW.pack(seed, top_k, *floats, prompt_len, flags, held_until)
    return list(struct.unpack(f"<{NUM_COLUMNS}q", row))


@dataclass(frozen=True, slots=True)
class RowParams:
    """The record of each row: int64 [M, NUM_COLUMNS]. The fields are views of it."""

    packed_MC: Tensor

    @classmethod
    def of(
        cls, temperature_M: Tensor, top_k_M: Tensor, top_p_M: Tensor, min_p_M: Tensor, seeds_M: Tensor
    ) -> RowParams:
        """Rows without processing other than temperature and filters."""
        row = torch.tensor(pack_row(), dtype=torch.int64, device=seeds_M.device)
        made = cls(row.expand(len(seeds_M), -1).clone())
        made.seeds_M.copy_(seeds_M)
        made.top_k_M.copy_(top_k_M)
        for column_M, given_M in (
            (made.temperature_M, temperature_M),
            (made.top_p_M, top_p_M),
            (made.min_p_M, min_p_M),
        ):
            column_M.copy_(given_M)
        return made

    def __getitem__(self, rows_M: Tensor | slice) -> RowParams:
        return RowParams(self.packed_MC[rows_M])

    def __len__(self) -> int:
        return len(self.packed_MC)

    @property
    def seeds_M(self) -> Tensor:  # noqa: N802
        return self.packed_MC[:, 0]

    @property
    def top_k_M(self) -> Tensor:  # noqa: N802
        return self.packed_MC[:, 1]

    @property
    def temperature_M(self) -> Tensor:  # noqa: N802
        return self._float(0)

    @property
    def top_p_M(self) -> Tensor:  # noqa: N802
        return self._float(1)

    @property
    def min_p_M(self) -> Tensor:  # noqa: N802
        return self._float(2)

    @property
    def repetition_M(self) -> Tensor:  # noqa: N802
        return self._float(3)

    @property
    def presence_M(self) -> Tensor:  # noqa: N802
        return self._float(4)

    @property
    def frequency_M(self) -> Tensor:  # noqa: N802
        return self._float(5)

    @property
    def prompt_len_M(self) -> Tensor:  # noqa: N802
        return self.packed_MC[:, 5]

    @property
    def flags_M(self) -> Tensor:  # noqa: N802
        return self.packed_MC[:, 6]

    @property
    def held_until_M(self) -> Tensor:  # noqa: N802
        return self.packed_MC[:, 7]

    def _float(self, number: int) -> Tensor:
        return self.packed_MC.view(torch.float32)[:, 4 + number]
