"""Attention of a layer that computes only queries and reads another layer's keys and values.

Shapes: T rows, H hidden size, X width of the input, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from draftproof.attention.base import AttentionSpec, PagedAttention
from draftproof.attention.exactness import AttentionShape
from draftproof.cache.pool import CacheSpec
from draftproof.kernels.exactness import Case
from draftproof.kernels.operator_checks import RopeShape
from draftproof.models.builder import LayerBuilder
from draftproof.models.cases import Where, attention_cases, norm_dtype
from draftproof.models.rope import RopeConfig
from draftproof.models.spec import Norms, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKVConfig:
    """Settings of a layer; sizes are those of the cache it reads. `reads`: that cache's index among the model's caches;
    in an assistant, among the target's caches that it reads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    reads: int
    window: int = 0
    bias: bool = False

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
        return ()

    @property
    def leaves_rows(self) -> bool:
        return True

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope,)

    @property
    def unread(self) -> tuple[str, ...]:
        return (r"self_attn\.[kv]_(proj|norm)\.\w+",)

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, place: Place) -> SharedKV:
        return SharedKV(builder, f"{prefix}.self_attn", self, norms, place)

    def num_weights(self, input_size: int, hidden_size: int) -> int:
        return self.num_heads * self.head_dim * (input_size + hidden_size)

    def cases(self, where: Where, norms: Norms) -> Iterator[Case]:
        rope = RopeShape(
            num_heads=self.num_heads,
            num_kv_heads=0,
            head_dim=self.head_dim,
            rotary_dim=self.rope.rotary_dim,
            q_norm=True,
            k_norm=False,
        )
        return attention_cases(rope, self.shape, where, norm_dtype(where, norms.offset))


class SharedKV:
    """Attention over another layer's keys and values."""

    __slots__ = ("index", "out", "query", "spec")

    def __init__(
        self, builder: LayerBuilder, prefix: str, config: SharedKVConfig, norms: Norms, place: Place
    ) -> None:
        heads, dim = config.num_heads, config.head_dim
        self.index = place.cache
        self.query = builder.linear(f"{prefix}.q_proj", place.input_size, heads * dim, bias=config.bias)
        self.out = builder.linear(f"{prefix}.o_proj", heads * dim, place.hidden_size, bias=config.bias)
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=dim,
            scale=config.scale,
            window=config.window,
            eps=norms.eps,
            cos_sin_PD=place.tables[config.rope],
            axes=config.rope.axes,
            q_norm_D=builder.norm_weight(f"{prefix}.q_norm", dim, norms.offset),
        )

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        return self.out(attn.query(self.index, self.query(x_TX), self.spec))

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        return self.out.partial_sums(attn.query(self.index, self.query(x_TX), self.spec))
