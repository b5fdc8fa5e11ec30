"""A custom mixer: a row's output is the mean of the values in its window, whatever the query.

Shapes: T rows, H hidden size, X width of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import AttentionSpec, PagedAttention
from draftproof.attention.exactness import AttentionShape
from draftproof.cache.pool import CacheSpec, PagedKV
from draftproof.kernels.exactness import Case
from draftproof.kernels.operator_checks import RopeShape
from draftproof.models.builder import LayerBuilder
from draftproof.models.cases import Where, attention_cases
from draftproof.models.reading import Given
from draftproof.models.rope import RopeConfig
from draftproof.models.spec import MixerConfig, Norms, Place

KEYS = frozenset({"mean_size", "mean_window"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanConfig:
    size: int
    window: int

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(num_heads=1, num_kv_heads=1, head_dim=self.size, window=self.window)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return (PagedKV(heads=1, head_dim=self.size),)

    @property
    def reads(self) -> None:
        return None

    @property
    def leaves_rows(self) -> bool:
        return False

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return ()

    @property
    def unread(self) -> tuple[str, ...]:
        return ()

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, place: Place) -> Mean:
        return Mean(builder, prefix, self, place)

    def num_weights(self, input_size: int, hidden_size: int) -> int:
        return self.size * (input_size + hidden_size)

    def cases(self, where: Where, norms: Norms) -> Iterator[Case]:
        rope = RopeShape(
            num_heads=1, num_kv_heads=1, head_dim=self.size, rotary_dim=2, q_norm=False, k_norm=False
        )
        return attention_cases(rope, self.shape, where, where.dtype)


class Mean:
    def __init__(self, builder: LayerBuilder, prefix: str, config: MeanConfig, place: Place) -> None:
        self._index = place.cache
        self._concat = builder.ops.concat
        self._value = builder.linear(f"{prefix}.mean.value", place.input_size, config.size)
        self._out = builder.linear(f"{prefix}.mean.out", config.size, place.hidden_size)
        unturned_P2 = torch.tensor([[1.0, 0.0]], device=builder.device).expand(4096, 2).contiguous()
        self._spec = AttentionSpec(
            num_heads=1,
            num_kv_heads=1,
            head_dim=config.size,
            scale=1.0,
            window=config.window,
            cos_sin_PD=unturned_P2,
        )

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        value_TD = self._value(x_TX)
        alike_TD = torch.zeros_like(value_TD)  # zero queries and keys, so all scores are equal
        return self._out(attn(self._index, self._concat((alike_TD, alike_TD, value_TD)), self._spec))

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        return self(x_TX, attn)


def read(given: Given) -> list[MixerConfig]:
    return [MeanConfig(size=given.even("mean_size"), window=given.whole("mean_window"))] * given.num_layers
