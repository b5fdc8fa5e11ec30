"""Gemma 4's assistant: a few layers without keys and values of their own, which read the target's.

Its query sits at the position of the token that it reads, and stays there for all drafts of a round: that is how the
reference implementation runs it (another engine puts it one lower; drafts differ, outputs do not).
Shapes: T target rows, N draft rows, M read rows, H its hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, InputLayout, Taps
from draftproof.drafters.borrowed import caches_lent
from draftproof.drafters.centroids import CentroidHead
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadDrafter, PassSize
from draftproof.drafters.validation import check_leftovers
from draftproof.models import cost, gemma
from draftproof.models.config import ModelConfig
from draftproof.models.cost import Cost
from draftproof.models.layers import Linear, run_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Settings:
    """`layers`: the assistant's own; `num_centroids` 0: logits of all tokens are computed, else those of the tokens of
    the best `num_chosen` centroids."""

    layers: ModelConfig
    backbone_hidden_size: int
    num_centroids: int = 0
    num_chosen: int = 0


class Gemma4Head(DraftHead):
    """`x = pre_projection([scaled embed(token); state])`, layers, `d = norm(x)`; logits are made of d,
    and `post_projection(d)` is the next row's state. The first state is the target's after its final norm."""

    ids_V: Tensor | None = None

    def __init__(self, ctx: DraftContext, s: Gemma4Settings) -> None:
        config, builder, target = s.layers, ctx.builder, ctx.target
        own = config.gemma
        assert own is not None
        self._config = config
        self.spec = DraftSpec(
            taps=Taps(final=True),
            layout=lambda _: InputLayout(context="last", shift=1),
            borrow=caches_lent(ctx, config, s.backbone_hidden_size),
            advance=0,
        )
        ctx.notes["embed_tokens"] = "the target's"
        hidden, backbone = config.hidden_size, s.backbone_hidden_size
        self._concat, self._embed = builder.ops.concat, target.embed
        self._before = builder.linear("pre_projection", 2 * backbone, hidden)
        self._after = builder.linear("post_projection", hidden, backbone)
        # the target's tables; a row is told the place of the state that it goes on from: its token's is one higher
        tables = {rope: table_PD[1:] for rope, table_PD in target.rope_tables.items()}
        # its sliding layers were trained to see one row more than the window
        self._layers = [
            gemma.GemmaLayer(
                builder,
                f"model.layers.{i}",
                config,
                x,
                tables[x.rope],
                window=x.window + 1 if x.window else 0,
            )
            for i, x in enumerate(own.layers)
        ]
        self._norm = gemma.norm(builder, "model.norm", hidden, config)
        name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        weight_VH = builder.tensor(f"{name}.weight", (config.vocab_size, hidden))
        self._head: Linear
        if s.num_centroids:
            self._head = centroids = CentroidHead(ctx, s.num_centroids, s.num_chosen, weight_VH)
            self._logits_cost = centroids.cost
        else:
            self._head = packed = builder.pack(weight_VH, out_dtype=torch.float32)
            self._logits_cost = partial(cost.linear, packed)
        check_leftovers(ctx)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        return taps[0]

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        assert features_NF is not None
        stream_NH = self._before(self._concat((self._embed(tokens_N), features_NF)))
        first = self._layers[0].input_norm
        assert first is not None
        x_NH, residual_NH = run_layers(self._layers, first(stream_NH), stream_NH, attn)
        hidden_NH, _ = self._norm.add(x_NH, residual_NH)
        return hidden_NH, self._after(hidden_NH)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._head(hidden_MH)

    def cost(self, size: PassSize) -> Cost:
        num_rows = size.requests * size.fed
        found = cost.linear(self._before, num_rows) + cost.linear(self._after, num_rows)
        found += cost.layers_products(self._config, num_rows, self._before.weight_itemsize)
        found += cost.attention(self._config, size.requests, size.fed, size.context, size.itemsize)
        return found + self._logits_cost(size.requests * size.read)


def build(ctx: DraftContext) -> HeadDrafter:
    return HeadDrafter(Gemma4Head(ctx, ctx.settings(Gemma4Settings)), ctx.num_drafts)
