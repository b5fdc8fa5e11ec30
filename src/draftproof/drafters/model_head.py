"""A language model as a draft head: its settings, its network, and how it is loaded.

Shapes: N draft rows, M read rows, V columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, OwnEmbeddings
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadLayout, PassSize
from draftproof.drafters.validation import check_vocabulary
from draftproof.models import cost
from draftproof.models.config import ModelConfig
from draftproof.models.cost import Cost
from draftproof.models.decoder import Decoder
from draftproof.models.image_encoder import ImageEncoder
from draftproof.models.vision import Vision
from draftproof.models.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSettings:
    """A draft model's config, its `mask_token` if it was trained to fill masks, and its image settings if any."""

    model: ModelConfig
    mask_token: int | None = None
    vision: Vision | None = None


class DraftModelHead(DraftHead):
    """A language model as a head."""

    def __init__(
        self,
        decoder: Decoder,
        layout: HeadLayout,
        ids_V: Tensor | None = None,
        embeds: tuple[OwnEmbeddings, ...] = (),
    ) -> None:
        self._decoder = decoder
        self.spec = DraftSpec(
            kv=decoder.kv,
            attention=decoder.config.attention_shapes,
            takes_embeddings=bool(embeds),
            embeds=embeds,
        )
        self.layout = layout
        self.ids_V = ids_V

    def features(self, taps: tuple[Tensor, ...]) -> None:
        return None

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, None]:
        return self._decoder(tokens_N, attn, given=attn.rows.given).hidden_TH, None

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._decoder.logits(hidden_MH)

    def cost(self, size: PassSize) -> Cost:
        return pass_cost(self._decoder, size)


def pass_cost(decoder: Decoder, size: PassSize) -> Cost:
    """Lower bound of what a pass of the model reads and computes."""
    found = cost.layers_products(decoder.config, size.requests * size.fed, decoder.head.weight_itemsize)
    found += cost.attention(decoder.config, size.requests, size.fed, size.context, size.itemsize)
    return found + cost.linear(decoder.head, size.requests * size.read)


def load(ctx: DraftContext) -> Decoder:
    """A model that must share the target's tokenizer; ValueError names both sizes or the first token that differs."""
    model = ctx.settings(DraftModelSettings).model
    check_vocabulary(ctx, model.vocab_size)
    return load_decoder(ctx, model, ctx.builder.weights)


def own_embeddings(ctx: DraftContext) -> tuple[OwnEmbeddings, ...]:
    """The model's own encoder for the target's images; empty if it is fed the images' placeholder ids instead.
    ValueError if embeddings are requested and it cannot read those images."""
    s = ctx.settings(DraftModelSettings)
    own, wanted = s.vision, ctx.own.image_inputs
    if own is None or ctx.vision is None or not own.reads_as(ctx.vision):
        if wanted == "embeddings":
            assert ctx.checkpoint is not None
            raise ValueError(
                f"speculative_config: image_inputs='embeddings': {ctx.checkpoint.where}: a draft model makes them by "
                "itself, and this one does not read what the target's image processor gives; use 'tokens'"
            )
        return ()
    if wanted == "tokens":
        return ()
    made = ctx.builder
    encoder = ImageEncoder(own, made.weights, made.device, made.dtype)
    ctx.notes["images"] = "its own encoder's"
    return (
        OwnEmbeddings(
            encode=encoder,
            hidden_size=s.model.hidden_size,
            added=own.added,
            num_bytes=encoder.num_bytes,
            is_whole=own.is_whole,
            windows_only=own.family.windows_only,
        ),
    )


def load_decoder(
    ctx: DraftContext,
    model: ModelConfig,
    weights: WeightSource,
    *,
    num_columns: int | None = None,
    max_positions: int | None = None,
) -> Decoder:
    """The model, exempt from exactness. `num_columns`: columns of its logits; None: the model's own number."""
    made = ctx.builder
    return Decoder.load(
        weights,
        model,
        made.ops,
        made.planner,
        made.device,
        made.dtype,
        max_positions=max_positions or ctx.max_positions,
        exact=False,
        kind=made.kind,
        num_columns=num_columns,
    )
