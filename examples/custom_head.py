"""A draft head of your own: a network beside the target. This one is EAGLE-3, with weights that come with draftproof.

    draftproof verify --speculative-config '{"method": "examples.custom_head.build", "num_speculative_tokens": 3}'

The engine takes care of rows, positions, the cache, unrolling, sampling and checking.
Shapes: T target rows, N draft rows, M rows that are sampled, H hidden size, V columns of logits.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from draftproof import DraftSpec, HeadLayout, Taps, assets
from draftproof.attention.base import PagedAttention
from draftproof.checkpoints import detect
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadDrafter
from draftproof.drafters.tapped import TappedSettings
from draftproof.drafters.vocabulary import embedding, output_head
from draftproof.models.builder import Norm
from draftproof.models.layers import load_layers, rope_tables, run_layers


class MyHead(DraftHead):
    def __init__(self, ctx: DraftContext) -> None:
        """Declare what it reads and keeps, and load its tensors by name from the checkpoint."""
        s = ctx.settings(TappedSettings)
        builder = ctx.builder
        config = s.layers
        hidden = s.layers.hidden_size
        self.spec = DraftSpec(
            taps=Taps(layers=s.taps or ()),  # the target's states that enter these layers
            kv=config.caches,  # keys and values of its own layer
            attention=config.attention_shapes,
        )
        self.layout = HeadLayout(context="all", shift=1)  # the row of state p carries token p + 1
        self.ops = builder.ops  # gather, concat: code made of these alone is recorded and costs no Python
        self.fc = builder.linear("fc", len(s.taps or ()) * ctx.target.config.hidden_size, hidden)
        self.state_norm = Norm.load(builder, "layers.0.hidden_norm", hidden, config.norm_eps)
        tables = rope_tables(config, ctx.max_positions, builder.device)
        (self.layer,) = load_layers(builder, "layers.", config, tables, first_input=2 * hidden)
        self.norm = Norm.load(builder, "norm", hidden, config.norm_eps)
        self.embed_VH = embedding(ctx, config)  # the target's, where the file has none
        self.ids_V, self.head = output_head(ctx, config, s.draft_vocab_size)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        return self.fc(self.ops.concat(taps))

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        """Returns the input of `logits` and the next row's features; later drafts continue from this head's state."""
        assert features_NF is not None and self.layer.input_norm is not None
        token_NH = self.layer.input_norm(self.ops.gather(self.embed_VH, tokens_N))
        state_NH = self.state_norm(features_NF)
        x_NH, residual_NH = run_layers([self.layer], self.ops.concat((token_NH, state_NH)), state_NH, attn)
        return self.norm.add(x_NH, residual_NH)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self.head(hidden_MH)


def build(ctx: DraftContext) -> HeadDrafter:
    """Called once, with the target and what a head is built from."""
    checkpoint = detect.read(assets.path("tiny-eagle3"))
    builder = ctx.builder.reading(checkpoint.weights)
    return HeadDrafter(MyHead(dataclasses.replace(ctx, checkpoint=checkpoint, builder=builder)))
