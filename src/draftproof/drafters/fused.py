"""The head that reads one target state and one token: `fc([token; state])`, decoder layers, the target's own lm_head.

Shapes: N draft rows, M read rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, Taps
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadLayout, PassSize
from draftproof.drafters.validation import check_hidden, check_leftovers, check_vocabulary
from draftproof.drafters.vocabulary import embedding, output_head
from draftproof.models import cost
from draftproof.models.builder import LayerBuilder, Norm
from draftproof.models.config import ModelConfig
from draftproof.models.cost import Cost
from draftproof.models.layers import load_layers, rope_tables, run_layers
from draftproof.models.spec import RopeTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Which norms a head has: of the embedding, the state, the first layer's input, the output."""

    embed: bool
    hidden: bool
    input: bool
    final: bool


class FusedNetwork:
    """`x = fc([embed_norm(embed); hidden_norm(h)])`, layers, `out = norm(x)`.

    Tensors, as checkpoint readers name them: fc, embed_norm, hidden_norm, norm, layers.i.*, each after `prefix`.
    `index`: its first layer's index in the draft cache. `state_first`: fc reads `[h; embed]`.
    """

    def __init__(
        self,
        builder: LayerBuilder,
        config: ModelConfig,
        norms: Norms,
        tables: RopeTables,
        *,
        prefix: str = "",
        index: int = 0,
        fc_bias: bool = False,
        state_first: bool = False,
    ) -> None:
        hidden = config.hidden_size
        eps = config.norm_eps
        self._config = config
        self._ops = builder.ops
        self._state_first = state_first

        def norm(name: str, wanted: bool) -> Norm | None:
            return builder.norm(prefix + name, hidden, eps) if wanted else None

        self._embed_norm = norm("embed_norm", norms.embed)
        self._hidden_norm = norm("hidden_norm", norms.hidden)
        ones_H = torch.ones(hidden, dtype=builder.dtype, device=builder.device)
        self._has_final_norm = norms.final
        self.norm = norm("norm", norms.final) or Norm(ones_H, eps, builder.ops)
        self._fc = builder.linear(f"{prefix}fc", 2 * hidden, hidden, bias=fc_bias)
        self._layers = load_layers(
            builder, f"{prefix}layers.", config, tables, first_cache=index, first_norm=norms.input
        )

    def __call__(self, embedded_NH: Tensor, state_NH: Tensor, attn: PagedAttention) -> Tensor:
        if self._embed_norm is not None:
            embedded_NH = self._embed_norm(embedded_NH)
        if self._hidden_norm is not None:
            state_NH = self._hidden_norm(state_NH)
        parts = (state_NH, embedded_NH) if self._state_first else (embedded_NH, state_NH)
        fused_NH = self._fc(self._ops.concat(parts))
        first = self._layers[0].input_norm
        x_NH = fused_NH if first is None else first(fused_NH)
        x_NH, residual_NH = run_layers(self._layers, x_NH, fused_NH, attn)
        normed_NH, stream_NH = self.norm.add(x_NH, residual_NH)
        return normed_NH if self._has_final_norm else stream_NH

    def cost(self, size: PassSize) -> Cost:
        """Cost of a pass, without logits."""
        num_rows = size.requests * size.fed
        found = cost.linear(self._fc, num_rows)
        found += cost.layers_products(self._config, num_rows, self._fc.weight_itemsize)
        return found + cost.attention(self._config, size.requests, size.fed, size.context, size.itemsize)


class FusedHead(DraftHead):
    """A fused network as a head: its output feeds the output head and, as state, its next step. `taps` names the one
    state h."""

    def __init__(
        self,
        ctx: DraftContext,
        config: ModelConfig,
        taps: Taps,
        norms: Norms,
        *,
        prefix: str = "",
        fc_bias: bool = False,
        state_first: bool = False,
    ) -> None:
        check_vocabulary(ctx, config.vocab_size)
        check_hidden(ctx, config.hidden_size)
        builder = ctx.builder
        self._gather = builder.ops.gather
        self.spec = DraftSpec(
            taps=taps,
            kv=config.caches,
            attention=config.attention_shapes,
            takes_embeddings=ctx.takes_embeddings(config.hidden_size),
        )
        self.layout = HeadLayout(context="all", shift=1)
        tables = rope_tables(config, ctx.max_positions, builder.device)
        self.network = FusedNetwork(
            builder, config, norms, tables, prefix=prefix, fc_bias=fc_bias, state_first=state_first
        )
        self._embed_VH = embedding(ctx, config)
        self.ids_V, self._head = output_head(ctx, config, config.vocab_size)
        check_leftovers(ctx, (prefix,))

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        return taps[0]

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        assert features_NF is not None
        embedded_NH = attn.rows.embedded(self._gather(self._embed_VH, tokens_N))
        out_NH = self.network(embedded_NH, features_NF, attn)
        return out_NH, out_NH

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._head(hidden_MH)

    def cost(self, size: PassSize) -> Cost:
        return self.network.cost(size) + cost.linear(self._head, size.requests * size.read)
