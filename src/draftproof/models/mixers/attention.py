"""Attention over the paged cache: multi-head, grouped-query or multi-query.

Shapes: T rows, H hidden size, X width of the input, D head size.
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
from draftproof.models.cases import Where, attention_cases, norm_dtype
from draftproof.models.reading import Given
from draftproof.models.rope import RopeConfig, parse_rope
from draftproof.models.spec import MixerConfig, Norms, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention with its own KV cache. `window` 0: rows see all positions; `qk_norm`: heads of q and k are normed;
    `v_norm`: those of v are, without weights; `k_is_v`: values are computed with the keys' weight."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    window: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    k_is_v: bool = False

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
        )

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return (PagedKV(heads=self.num_kv_heads, head_dim=self.head_dim, window=self.window),)

    @property
    def reads(self) -> None:
        return None

    @property
    def leaves_rows(self) -> bool:
        return True

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope,)

    @property
    def unread(self) -> tuple[str, ...]:
        return ()

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, place: Place) -> Attention:
        return Attention(builder, f"{prefix}.self_attn", self, norms, place)

    def num_weights(self, input_size: int, hidden_size: int) -> int:
        made = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return input_size * made + self.num_heads * self.head_dim * hidden_size

    def cases(self, where: Where, norms: Norms) -> Iterator[Case]:
        rope = RopeShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rope.rotary_dim,
            q_norm=self.qk_norm,
            k_norm=self.qk_norm,
            v_norm=self.v_norm,
        )
        return attention_cases(rope, self.shape, where, norm_dtype(where, norms.offset))


class Attention:
    """Attention of one layer; q, k and v come from one product."""

    __slots__ = ("config", "index", "out", "qkv", "spec")

    def __init__(
        self, builder: LayerBuilder, prefix: str, config: AttentionConfig, norms: Norms, place: Place
    ) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.index = place.cache
        # with k_is_v the keys' product is computed twice: such layers are few, and all layers share one row layout
        names = ["q_proj", "k_proj", "k_proj" if config.k_is_v else "v_proj"]
        self.qkv = builder.linear(
            [f"{prefix}.{name}" for name in names],
            place.input_size,
            [heads * dim, kv_heads * dim, kv_heads * dim],
            bias=config.qkv_bias,
        )
        self.out = builder.linear(f"{prefix}.o_proj", heads * dim, place.hidden_size, bias=config.o_bias)
        q_norm_D = k_norm_D = v_norm_D = None
        if config.qk_norm:
            q_norm_D = builder.norm_weight(f"{prefix}.q_norm", dim, norms.offset)
            k_norm_D = builder.norm_weight(f"{prefix}.k_norm", dim, norms.offset)
        if config.v_norm:
            dtype = builder.dtype if q_norm_D is None else q_norm_D.dtype
            v_norm_D = torch.ones(dim, dtype=dtype, device=builder.device)
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=config.scale,
            window=config.window,
            eps=norms.eps,
            cos_sin_PD=place.tables[config.rope],
            q_norm_D=q_norm_D,
            k_norm_D=k_norm_D,
            v_norm_D=v_norm_D,
            axes=config.rope.axes,
        )

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        return self.out(attn(self.index, self.qkv(x_TX), self.spec))

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        return self.out.partial_sums(attn(self.index, self.qkv(x_TX), self.spec))


def read(given: Given) -> list[MixerConfig]:
    """Each layer's settings; layers differ only in their windows."""
    head_dim = given.head_dim
    family = given.family
    rope = parse_rope(
        given.raw,
        head_dim,
        given.max_positions,
        given.where,
        family.default_theta,
        family.default_rotary,
        interleaved_axes=family.interleaved_axes,
    )
    return [
        AttentionConfig(
            num_heads=given.num_heads,
            num_kv_heads=given.num_kv_heads,
            head_dim=head_dim,
            rope=rope,
            scale=head_dim**-0.5,
            window=window,
            qkv_bias=given.switch(family.qkv_bias),
            o_bias=given.switch(family.o_bias),
            qk_norm=given.switch(family.qk_norm),
        )
        for window in given.windows
    ]
