"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one small vector that all
heads share; the up-projections are absorbed into queries and outputs.

The cache holds one head of [rotary part, compressed part], which is read both as keys and as values.
Shapes: T rows, H hidden size, Q and C compressed sizes of queries and of keys and values, N head size without rotation,
R rotary part, V value head size, D = R + C cached per token, P positions of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import AttentionSpec, PagedAttention
from draftproof.attention.exactness import AttentionShape
from draftproof.cache.pool import CacheSpec, PagedKV
from draftproof.kernels.exactness import Case
from draftproof.kernels.operator_checks import RopeShape
from draftproof.models.builder import LayerBuilder
from draftproof.models.cases import Where, attention_cases, norm_case
from draftproof.models.reading import Given
from draftproof.models.rope import RopeConfig, parse_rope, score_factor
from draftproof.models.spec import MixerConfig, Norms, Place
from draftproof.schema import flag, shown, whole

KEYS = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"}
    | {"rope_interleave"}
)
_LOW_RANK_EPS = 1e-6  # epsilon of the inner norms, independent of the config's


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Settings of a layer. `q_rank` None: queries are not compressed. `interleaved`: rotated pairs are neighbours."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool
    scale: float
    rope: RopeConfig
    window: int = 0
    bias: bool = False
    o_bias: bool = False

    @property
    def cached_dim(self) -> int:
        return self.rope_dim + self.kv_rank

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.cached_dim,
            window=self.window,
            shared=True,
        )

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return (PagedKV(heads=1, head_dim=self.cached_dim, shared=True, window=self.window),)

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

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, place: Place) -> LatentAttention:
        return LatentAttention(builder, f"{prefix}.self_attn", self, norms, place)

    def num_weights(self, input_size: int, hidden_size: int) -> int:
        """Weights of the products for queries, the cached vector, the heads' products with it, and the output."""
        heads, query = self.num_heads, self.nope_dim + self.rope_dim
        made = input_size * heads * query
        queries = made if self.q_rank is None else self.q_rank * (input_size + heads * query)
        cached = self.cached_dim * (input_size + heads * (query + self.v_dim))
        return queries + cached + heads * self.v_dim * hidden_size

    def cases(self, where: Where, norms: Norms) -> Iterator[Case]:
        for rank in (self.kv_rank, self.q_rank):
            if rank is not None:
                yield norm_case(rank, where, where.dtype)
        rope = RopeShape(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.cached_dim,
            rotary_dim=self.rope.rotary_dim,
            q_norm=False,
            k_norm=False,
            shared=True,
        )
        yield from attention_cases(rope, self.shape, where, where.dtype)


def read(given: Given) -> list[MixerConfig]:
    """Each layer's settings; layers differ only in their windows."""
    raw, where, family = given.raw, given.where, given.family
    nope = given.whole("qk_nope_head_dim")
    rope_dim = given.even("qk_rope_head_dim")
    if raw.get("qk_head_dim") not in (None, nope + rope_dim):
        raise ValueError(
            f"{where}: qk_head_dim={shown(raw['qk_head_dim'])}: must be qk_nope_head_dim + qk_rope_head_dim = "
            f"{nope + rope_dim}"
        )
    rope = parse_rope(raw, rope_dim, given.max_positions, where, family.default_theta, family.default_rotary)
    return [
        LatentConfig(
            num_heads=given.num_heads,
            q_rank=None if raw.get("q_lora_rank") is None else whole(raw, "q_lora_rank", where),
            kv_rank=given.whole("kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope_dim,
            v_dim=given.whole("v_head_dim"),
            interleaved=flag(raw, "rope_interleave", where, True),
            scale=(nope + rope_dim) ** -0.5 * score_factor(raw, where),
            rope=rope,
            window=window,
            bias=given.switch(family.qkv_bias),
            o_bias=given.switch(family.o_bias),
        )
        for window in given.windows
    ]


class LatentAttention:
    """Attention of one layer over compressed keys and values."""

    __slots__ = (
        "_concat",
        "_from_latent",
        "_into_latent",
        "_k_rope",
        "_kv",
        "_kv_norm",
        "_q",
        "_q_a",
        "_q_norm",
        "index",
        "out",
        "spec",
    )

    def __init__(
        self, builder: LayerBuilder, prefix: str, m: LatentConfig, norms: Norms, place: Place
    ) -> None:
        heads = m.num_heads
        hidden = place.input_size
        bias = m.bias
        self.index = place.cache
        self._concat = builder.ops.concat
        self._q_a = self._q_norm = None
        if m.q_rank is None:
            self._q = builder.linear(f"{prefix}.q_proj", hidden, heads * (m.nope_dim + m.rope_dim))
        else:
            self._q_a = builder.linear(f"{prefix}.q_a_proj", hidden, m.q_rank, bias=bias)
            self._q_norm = builder.norm(f"{prefix}.q_a_layernorm", m.q_rank, _LOW_RANK_EPS)
            self._q = builder.linear(f"{prefix}.q_b_proj", m.q_rank, heads * (m.nope_dim + m.rope_dim))
        self._kv_norm = builder.norm(f"{prefix}.kv_a_layernorm", m.kv_rank, _LOW_RANK_EPS)
        name = f"{prefix}.kv_a_proj_with_mqa"
        order_R = _pair_order(m)
        kv_XH = builder.tensor(f"{name}.weight", (m.kv_rank + m.rope_dim, hidden))
        kv_X = builder.tensor(f"{name}.bias", (m.kv_rank + m.rope_dim,)) if bias else None
        rope_R = order_R.to(builder.device) + m.kv_rank
        self._kv = builder.pack(kv_XH[: m.kv_rank].contiguous(), None if kv_X is None else kv_X[: m.kv_rank])
        self._k_rope = builder.pack(kv_XH[rope_R], None if kv_X is None else kv_X[rope_R])
        width = m.nope_dim + m.v_dim
        up_XC = builder.tensor(f"{prefix}.kv_b_proj.weight", (heads * width, m.kv_rank))
        up = up_XC.view(heads, width, m.kv_rank)
        self._into_latent = HeadProducts(builder, [_into(k_NC, m, order_R) for k_NC in up[:, : m.nope_dim]])
        self._from_latent = HeadProducts(builder, [_from(v_VC, m) for v_VC in up[:, m.nope_dim :]])
        self.out = builder.linear(f"{prefix}.o_proj", heads * m.v_dim, place.hidden_size, bias=m.o_bias)
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=1,
            head_dim=m.cached_dim,
            scale=m.scale,
            window=m.window,
            cos_sin_PD=place.tables[m.rope],
        )

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        return self.out(self._attended(x_TX, attn))

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        return self.out.partial_sums(self._attended(x_TX, attn))

    def _attended(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        q_TX = x_TX if self._q_a is None else self._q_a(x_TX)
        q_TX = self._q(q_TX if self._q_norm is None else self._q_norm(q_TX))
        qk_TX = self._concat((self._into_latent(q_TX), self._k_rope(x_TX), self._kv_norm(self._kv(x_TX))))
        return self._from_latent(attn(self.index, qk_TX, self.spec))


class HeadProducts:
    """Products with one weight per head, heads concatenated: [T, heads * X] -> [T, heads * Y]."""

    __slots__ = ("_heads", "_product", "_starts", "_swap")

    def __init__(self, builder: LayerBuilder, weights: Sequence[Tensor]) -> None:
        """weights: [Y, X] each."""
        self._heads = len(weights)
        self._product = builder.planner.pack_experts(len(weights), weights, exact=builder.exact)
        self._swap = builder.ops.swap
        self._starts = builder.planner.equal_groups(len(weights))

    def __call__(self, x_TX: Tensor) -> Tensor:
        rows = len(x_TX)
        heads = self._heads
        y_PY = self._product(self._swap(x_TX, heads), self._starts(rows))
        width = y_PY.shape[1]
        return self._swap(y_PY.view(heads, rows * width), rows).view(rows, heads * width)


def _pair_order(m: LatentConfig) -> Tensor:
    """Permutation of the rotary part from interleaved pairs to ours, which pairs element i with i + R/2."""
    order_R = torch.arange(m.rope_dim)
    return torch.cat((order_R[::2], order_R[1::2])) if m.interleaved else order_R


def _into(k_NC: Tensor, m: LatentConfig, order_R: Tensor) -> Tensor:
    """The weight [D, N + R] that maps a head's query to [rotary part, query times key up-projection]."""
    out_DX = k_NC.new_zeros(m.cached_dim, m.nope_dim + m.rope_dim)
    out_DX[torch.arange(m.rope_dim), m.nope_dim + order_R] = 1
    out_DX[m.rope_dim :, : m.nope_dim] = k_NC.t()
    return out_DX


def _from(v_VC: Tensor, m: LatentConfig) -> Tensor:
    """The weight [V, D] that maps a head's attention output to its value, ignoring the rotary part."""
    return torch.cat((v_VC.new_zeros(m.v_dim, m.rope_dim), v_VC), dim=1)
