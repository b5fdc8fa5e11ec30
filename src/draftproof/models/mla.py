"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one small vector that all
heads share, and the projections that would widen it are applied to queries and outputs instead.

The cache holds one head of [rotary part, compressed part], which is read as keys and as values.
Shapes: T rows, H hidden size, Q and C compressed sizes of queries and of keys and values, N head size without rotation,
R rotary part, V value head size, D = R + C cached per token, P positions of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftproof.attention.base import AttentionSpec, PagedAttention
from draftproof.kernels.certify import Shape
from draftproof.models.rope import score_factor
from draftproof.schema import flag, shown, whole

if TYPE_CHECKING:
    from draftproof.models.config import ModelConfig
    from draftproof.models.layers import LayerBuilder

KEYS = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"}
    | {"rope_interleave"}
)
_LOW_RANK_EPS = 1e-6  # epsilon of the norms inside, whatever the config says of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Sizes in elements. `q_rank` None: queries are not compressed. `interleaved`: rotated pairs are neighbours."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool
    scale: float

    @property
    def cached_dim(self) -> int:
        return self.rope_dim + self.kv_rank


def parse_mla(raw: Mapping[str, Any], where: str) -> MlaConfig:
    """The latent attention of a config. ValueError for a size that is missing or makes no sense."""
    nope = whole(raw, "qk_nope_head_dim", where)
    rope = whole(raw, "qk_rope_head_dim", where)
    if raw.get("qk_head_dim") not in (None, nope + rope):
        raise ValueError(
            f"{where}: qk_head_dim={shown(raw['qk_head_dim'])}: must be qk_nope_head_dim + qk_rope_head_dim = "
            f"{nope + rope}"
        )
    return MlaConfig(
        q_rank=None if raw.get("q_lora_rank") is None else whole(raw, "q_lora_rank", where),
        kv_rank=whole(raw, "kv_lora_rank", where),
        nope_dim=nope,
        rope_dim=rope,
        v_dim=whole(raw, "v_head_dim", where),
        interleaved=flag(raw, "rope_interleave", where, True),
        scale=(nope + rope) ** -0.5 * score_factor(raw, where),
    )


class LatentAttention:
    """Attention of one layer over compressed keys and values; takes the place of `layers.Attention`."""

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
        self,
        builder: LayerBuilder,
        prefix: str,
        config: ModelConfig,
        cos_sin_PD: Tensor,
        index: int,
        window: int = 0,
        input_size: int | None = None,
    ) -> None:
        """See `layers.Attention` for the arguments."""
        m = config.mla
        assert m is not None
        heads = config.num_heads
        hidden = input_size or config.hidden_size
        bias = config.qkv_bias
        self.index = index
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
        self.out = builder.linear(f"{prefix}.o_proj", heads * m.v_dim, config.hidden_size, bias=config.o_bias)
        self.spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=1,
            head_dim=m.cached_dim,
            scale=m.scale,
            window=window,
            cos_sin_PD=cos_sin_PD,
        )

    def __call__(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """x_TX [T, input_size], already normed -> [T, H]."""
        return self.out(self._attended(x_TX, attn))

    def partial_sums(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        """The output for `Norm.add`, perhaps still as sums over segments of K."""
        return self.out.partial_sums(self._attended(x_TX, attn))

    def _attended(self, x_TX: Tensor, attn: PagedAttention) -> Tensor:
        q_TX = x_TX if self._q_a is None else self._q_a(x_TX)
        q_TX = self._q(q_TX if self._q_norm is None else self._q_norm(q_TX))
        qk_TX = self._concat((self._into_latent(q_TX), self._k_rope(x_TX), self._kv_norm(self._kv(x_TX))))
        return self._from_latent(attn(self.index, qk_TX, self.spec))


class HeadProducts:
    """A weight for each head: rows of all heads side by side, [T, heads * X] -> [T, heads * Y]."""

    __slots__ = ("_heads", "_product", "_starts", "_swap")

    def __init__(self, builder: LayerBuilder, weights: Sequence[Tensor]) -> None:
        """weights: [Y, X] each."""
        outputs, inputs = weights[0].shape
        self._heads = len(weights)
        shape = Shape(outputs, inputs, builder.dtype, builder.dtype, False)
        self._product = builder.planner.pack_experts(len(weights), weights, shape, exact=builder.exact)
        self._swap = builder.ops.swap
        self._starts = builder.planner.equal_groups(len(weights))

    def __call__(self, x_TX: Tensor) -> Tensor:
        rows = len(x_TX)
        heads = self._heads
        y_PY = self._product(self._swap(x_TX, heads), self._starts(rows))
        width = y_PY.shape[1]
        return self._swap(y_PY.view(heads, rows * width), rows).view(rows, heads * width)


def _pair_order(m: MlaConfig) -> Tensor:
    """Which size of the rotary part comes first, second, ...: ours pairs one half with the other."""
    order_R = torch.arange(m.rope_dim)
    return torch.cat((order_R[::2], order_R[1::2])) if m.interleaved else order_R


def _into(k_NC: Tensor, m: MlaConfig, order_R: Tensor) -> Tensor:
    """The weight [D, N + R] that takes a head's query to its rotary part and to its products with what makes keys."""
    out_DX = k_NC.new_zeros(m.cached_dim, m.nope_dim + m.rope_dim)
    out_DX[torch.arange(m.rope_dim), m.nope_dim + order_R] = 1
    out_DX[m.rope_dim :, : m.nope_dim] = k_NC.t()
    return out_DX


def _from(v_VC: Tensor, m: MlaConfig) -> Tensor:
    """The weight [V, D] that makes a head's value of what was attended to, the rotary part left out."""
    return torch.cat((v_VC.new_zeros(m.v_dim, m.rope_dim), v_VC), dim=1)
