"""A layer with a state per slot: attention that also sums the inputs of permanent rows.

Shapes: T rows, S slots, R requests, X width of the input, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.cache.pool import CacheSpec
from draftproof.cache.states import PassOfRows
from draftproof.models.builder import LayerBuilder
from draftproof.models.mixers import attention
from draftproof.models.mixers.attention import Attention, AttentionConfig
from draftproof.models.reading import Given
from draftproof.models.spec import MixerConfig, Norms, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSpec:
    """The sum of all permanent rows' first `size` numbers."""

    size: int

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> SumState:
        return SumState(num_slots, self.size, device)


class SumState:
    """For each slot the sum of its permanent rows' inputs, in fp64.

    For tests: `texts`: for each request that had a slot, (tokens of its permanent rows, their final sum), from the last
    gap in its rows on; `num_cut`: number of commits in which some of a request's rows were rejected; `most`: most
    accepted rows of a request in one commit.
    """

    def __init__(self, num_slots: int, size: int, device: torch.device) -> None:
        self.sum_SX = torch.zeros(num_slots, size, dtype=torch.float64, device=device)
        self.texts: list[tuple[list[int], list[float]]] = []
        self.num_cut = self.most = 0
        self._text_of: dict[int, list[int]] = {}
        self._end_of: dict[int, int] = {}
        self._written_TX: Tensor | None = None

    def admit(self, slot: int) -> None:
        self.close(slot)
        self._text_of[slot], self._end_of[slot] = [], 0

    def close(self, slot: int) -> None:
        """Record the result of the request in a slot, and reset the slot."""
        if self._text_of.get(slot):
            self.texts.append((self._text_of.pop(slot), self.sum_SX[slot].tolist()))
        self.sum_SX[slot] = 0

    def write(self, x_TX: Tensor) -> None:
        self._written_TX = x_TX[:, : self.sum_SX.shape[1]].double()

    def commit(self, rows: PassOfRows) -> None:
        assert self._written_TX is not None, "each pass goes through every layer once"
        starts = rows.query_start_loc_R1.tolist()
        tokens = rows.tokens_T.tolist()
        for r, (slot, live) in enumerate(zip(rows.slots_R.tolist(), rows.live_R.tolist(), strict=True)):
            if live and slot in self._text_of:
                if int(rows.first_R[r]) != self._end_of[slot]:  # the rows between were never committed
                    self._text_of[slot] = []
                    self.sum_SX[slot] = 0
                self._end_of[slot] = int(rows.first_R[r]) + live
                self._text_of[slot] += tokens[starts[r] : starts[r] + live]
                self.num_cut += live < starts[r + 1] - starts[r]
                self.most = max(self.most, live)
            self.sum_SX[slot] += self._written_TX[starts[r] : starts[r] + live].sum(0)
        self._written_TX = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SummingConfig(AttentionConfig):
    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return (*AttentionConfig.caches.fget(self), SumSpec(size=8))  # type: ignore[attr-defined]

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, place: Place) -> Summing:
        return Summing(builder, f"{prefix}.self_attn", self, norms, place)


class Summing(Attention):
    """Attention that passes the first numbers of each row's input to its state."""

    __slots__ = ("state",)

    def __init__(
        self, builder: LayerBuilder, prefix: str, config: SummingConfig, norms: Norms, place: Place
    ) -> None:
        super().__init__(builder, prefix, config, norms, place)
        self.state = place.state

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        self._write(x_TX, attn)
        return super().__call__(x_TX, attn)

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        self._write(x_TX, attn)
        return super().partial_sums(x_TX, attn)

    def _write(self, x_TX: Tensor, attn: PagedAttention) -> None:
        state = attn.cache.states[self.state]
        assert isinstance(state, SumState)
        state.write(x_TX)


def read(given: Given) -> list[MixerConfig]:
    """Configs of all layers: attention's, as `SummingConfig`."""
    fields = AttentionConfig.__dataclass_fields__
    plain = attention.read(given)
    return [SummingConfig(**{name: getattr(mixer, name) for name in fields}) for mixer in plain]
