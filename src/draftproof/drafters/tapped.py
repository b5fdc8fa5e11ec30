"""The network that reads its tokens and fused states of several target layers: `a = [input_layernorm(embed);
hidden_norm(h)]` into the first layer, logits from `norm(x)`. It has one or more layers, and may read only the target's
last state.

Shapes: T target rows, N draft rows, M read rows, F = H fused width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, Taps
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadLayout, PassSize
from draftproof.drafters.validation import check_target
from draftproof.drafters.vocabulary import embedding, output_head
from draftproof.models import cost
from draftproof.models.builder import Norm
from draftproof.models.config import ModelConfig
from draftproof.models.cost import Cost
from draftproof.models.layers import load_layers, rope_tables, run_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedSettings:
    """Settings of a head. `layers`: the draft's own decoder layers; `taps`: None: 2, n/2 and n-3 of the target's n
    layers; empty: h is the state after the target's final norm, without fusion."""

    layers: ModelConfig
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None


class TappedNetwork(DraftHead):
    """EAGLE-3's network, and P-EAGLE's: fusion, layers and output head."""

    def __init__(self, ctx: DraftContext, spec: DraftSpec, layout: HeadLayout) -> None:
        s = ctx.settings(TappedSettings)
        builder = ctx.builder
        config = s.layers
        hidden = s.layers.hidden_size
        check_target(ctx, config, spec.taps.layers)
        self._settings = s
        self.ops = builder.ops
        self.spec = spec
        self.layout = layout

        def norm(name: str, size: int) -> Norm:
            return Norm.load(builder, name, size, config.norm_eps)

        fused = bool(spec.taps.layers)
        num_taps = len(spec.taps.layers)
        target_hidden = ctx.target.config.hidden_size
        self._input_norm = (
            norm("input_norm", num_taps * target_hidden) if s.norm_before_fc and fused else None
        )
        self._fc_norms = [norm(f"fc_norm.{i}", target_hidden) for i in range(num_taps) if s.fc_norm]
        self._fc = builder.linear("fc", num_taps * target_hidden, hidden) if fused else None
        tables = rope_tables(config, ctx.max_positions, builder.device)
        self._layers = load_layers(builder, "layers.", config, tables, first_input=2 * hidden)
        self._hidden_norm = norm("layers.0.hidden_norm", hidden)
        self._norm = norm("norm", hidden)
        self._embed_VH = embedding(ctx, config)
        self.ids_V, self._head = output_head(ctx, config, s.draft_vocab_size)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        if self._fc is None:
            return taps[0]
        if self._fc_norms:
            taps = tuple(norm(tap) for norm, tap in zip(self._fc_norms, taps, strict=True))
        fused_TF = self.ops.concat(taps)
        return self._fc(self._input_norm(fused_TF) if self._input_norm else fused_TF)

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        assert features_NF is not None
        embed_norm = self._layers[0].input_norm
        assert embed_norm is not None
        normed_NH = self._hidden_norm(features_NF)
        residual_NH = normed_NH if self._settings.norm_before_residual else features_NF
        embedded_NH = embed_norm(attn.rows.embedded(self.ops.gather(self._embed_VH, tokens_N)))
        x_NX = self.ops.concat((embedded_NH, normed_NH))
        x_NH, residual_NH = run_layers(self._layers, x_NX, residual_NH, attn)
        out_NH, stream_NH = self._norm.add(x_NH, residual_NH)
        return out_NH, out_NH if self._settings.norm_output else stream_NH

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._head(hidden_MH)

    def cost(self, size: PassSize) -> Cost:
        """Cost of a pass; the first layer reads twice the hidden size."""
        config, num_rows = self._settings.layers, size.requests * size.fed
        found = cost.layers_products(
            config, num_rows, self._head.weight_itemsize, first_input=2 * config.hidden_size
        )
        found += cost.attention(config, size.requests, size.fed, size.context, size.itemsize)
        if self._fc is not None:
            found += cost.linear(self._fc, size.requests * size.fused)
        return found + cost.linear(self._head, size.requests * size.read)


def tapped(ctx: DraftContext) -> Taps:
    """The layers whose states are fused: the checkpoint's, or the usual ones if it names none."""
    assert ctx.checkpoint is not None
    taps = ctx.settings(TappedSettings).taps
    n = ctx.target.config.num_layers
    ctx.notes["taps"] = "the usual ones, its config names none" if taps is None else "its config's"
    if taps is not None:
        return Taps(layers=taps, final=not taps)
    usual = (2, n // 2, n - 3)
    if n <= 6:
        raise ValueError(
            f"{ctx.checkpoint.where}: names no tapped layers, and the usual ones {list(usual)} make no sense for a "
            f"target of {n} layers; add eagle_aux_hidden_state_layer_ids to its config.json"
        )
    return Taps(layers=usual)
