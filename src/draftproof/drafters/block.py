"""The network of the block methods: mask rows that attend to each other, over keys and values of target states.

The cache holds each layer's keys and values of fused target states. A pass over one block (the newest token and its
masks) writes keys and values past them, which the next target states overwrite.
Shapes: T target rows, N draft rows, M read rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from draftproof.attention.base import AttentionSpec, PagedAttention
from draftproof.drafters.base import DraftSpec, Taps
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter, HeadLayout, PassSize
from draftproof.drafters.parallel import BlockHead, Decode, Parallel
from draftproof.drafters.validation import check_leftovers, check_num_drafts, check_target, checked_mask_token
from draftproof.drafters.vocabulary import embedding, output_head
from draftproof.matmul.linear import PackedLinear
from draftproof.models import cost
from draftproof.models.builder import Norm
from draftproof.models.config import ModelConfig
from draftproof.models.cost import Cost
from draftproof.models.layers import DecoderLayer, Layer, SandwichLayer, load_layers, rope_tables, run_layers
from draftproof.models.mixers.attention import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSettings:
    """Settings of a block head. `sample_from_anchor`: the newest token's own row predicts, too. `sliding_causal`: in
    sliding layers a row sees the block only up to itself; the window counts from the block's first row.
    `last_tap_is_normed`: the checkpoint's tap of the last layer is the state after the final norm, which cannot be
    tapped among layers."""

    layers: ModelConfig
    draft_vocab_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token: int | None
    sample_from_anchor: bool
    sliding_causal: bool
    last_tap_is_normed: bool = False


class BlockNetwork(BlockHead):
    """The block network. `wrap(i, layer)` may wrap layer i."""

    def __init__(
        self,
        ctx: DraftContext,
        s: BlockSettings,
        wrap: Callable[[int, DecoderLayer | SandwichLayer], Layer] = lambda i, layer: layer,
    ) -> None:
        check_target(ctx, s.layers, s.taps)
        builder = ctx.builder
        config = s.layers
        hidden = s.layers.hidden_size
        self.spec = _spec(ctx, s)
        self.layout = HeadLayout(
            context="none",
            anchor=True,
            masks=s.block_size - 1,
            mask_token=checked_mask_token(ctx, s.mask_token),
            anchor_predicts=s.sample_from_anchor,
        )
        self._config = config
        self._ops = builder.ops
        self._fc = builder.linear("fc", len(s.taps) * ctx.target.config.hidden_size, hidden)
        self._hidden_norm = Norm.load(builder, "hidden_norm", hidden, config.norm_eps)
        tables = rope_tables(config, ctx.max_positions + s.block_size, builder.device)
        layers = load_layers(builder, "layers.", config, tables)
        self._context, self._specs = list[PackedLinear](), list[AttentionSpec]()
        for i, layer in enumerate(layers):
            mixer = _plain_attention(ctx, layer)
            kv = mixer.config.num_kv_heads * mixer.config.head_dim
            names = [f"layers.{i}.self_attn.{part}_proj" for part in "kv"]
            self._context.append(builder.linear(names, hidden, [kv, kv], bias=mixer.config.qkv_bias))
            mixer.spec = replace(mixer.spec, causal=bool(mixer.spec.window) and s.sliding_causal)
            self._specs.append(mixer.spec)
        self._norm = Norm.load(builder, "norm", hidden, config.norm_eps)
        self._layers = [wrap(i, layer) for i, layer in enumerate(layers)]
        self._embed_VH = embedding(ctx, config)
        self.ids_V, self._head = output_head(ctx, config, s.draft_vocab_size)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        return self._hidden_norm(self._fc(self._ops.concat(taps)))

    def remember(self, features_TF: Tensor, attn: PagedAttention) -> None:
        for i, (keys_values, spec) in enumerate(zip(self._context, self._specs, strict=True)):
            attn.store(i, keys_values(features_TF), spec)

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, None]:
        embedded_NH = self._ops.gather(self._embed_VH, tokens_N)
        first = self._layers[0].input_norm
        assert first is not None
        return self._norm.add(*run_layers(self._layers, first(embedded_NH), embedded_NH, attn))[0], None

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._head(hidden_MH)

    def cost(self, size: PassSize) -> Cost:
        """Cost of fusing and storing target states, and of feeding the block."""
        config, num_states, num_rows = self._config, size.requests * size.fused, size.requests * size.fed
        found = cost.linear(self._head, size.requests * size.read)
        for packed in (self._fc, *self._context):
            found += cost.linear(packed, num_states)
        if size.fed:
            found += cost.layers_products(config, num_rows, self._fc.weight_itemsize)
            found += cost.attention(config, size.requests, size.fed, size.context, size.itemsize)
        return found


def drafter(ctx: DraftContext, network: BlockNetwork, decode: Decode | None = None) -> HeadDrafter:
    check_leftovers(ctx)
    unroll = Parallel(network, block=network, decode=decode)
    return HeadDrafter(network, unroll)


def _plain_attention(ctx: DraftContext, layer: DecoderLayer | SandwichLayer) -> Attention:
    """The layer's mixer; ValueError if it is not plain attention, whose keys and values other rows can store."""
    assert ctx.checkpoint is not None
    if not isinstance(layer.mixer, Attention):
        raise ValueError(
            f"{ctx.checkpoint.where}: model_type: layers of type {type(layer.mixer).__name__} cannot draft blocks; "
            "they must be plain attention"
        )
    return layer.mixer


def _spec(ctx: DraftContext, s: BlockSettings) -> DraftSpec:
    """The needs of a block method. A pass always has a full block, however few drafts are wanted: its rows attend to
    each other, so a shorter block would predict something else."""
    assert ctx.checkpoint is not None
    num_layers = ctx.target.config.num_layers
    if s.last_tap_is_normed and num_layers in s.taps:
        raise ValueError(
            f"{ctx.checkpoint.where}: target_layer_ids={[i - 1 for i in s.taps]}: {num_layers - 1} means the state "
            f"after the final norm of a target of {num_layers} layers, which is not among those that can be tapped; "
            f"ids may run from 0 to {num_layers - 2}"
        )
    check_num_drafts(ctx, s.block_size - (not s.sample_from_anchor), f"block_size={s.block_size}")
    ctx.notes["taps"] = "its config's"
    return DraftSpec(
        taps=Taps(layers=s.taps),
        kv=s.layers.caches,
        attention=s.layers.attention_shapes,
    )
