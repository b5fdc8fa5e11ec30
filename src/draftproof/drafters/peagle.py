"""P-EAGLE: EAGLE's fused states, and mask rows with a learned state, so that one pass drafts all tokens.

Shapes: T target rows, F fused width.
"""

from __future__ import annotations

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import DraftHead, HeadDrafter, HeadLayout, PassSize
from draftproof.drafters.parallel import Parallel
from draftproof.drafters.tapped import TappedNetwork, TappedSettings, tapped
from draftproof.drafters.validation import check_leftovers, checked_mask_token
from draftproof.models.cost import Cost


class PEagleHead(DraftHead):
    """The fused network; `mask_hidden` replaces the tapped states at mask rows."""

    def __init__(self, ctx: DraftContext, spec: DraftSpec, layout: HeadLayout) -> None:
        assert ctx.checkpoint is not None
        if "embed_tokens.weight" not in ctx.checkpoint.weights:
            raise ValueError(
                f"{ctx.checkpoint.where}: embed_tokens.weight is missing, and this kind of head is trained with an "
                "embedding of its own, not the target's; download the files again"
            )
        self.spec = spec
        self.layout = layout
        self._network = TappedNetwork(ctx, spec, layout)
        self.ids_V = self._network.ids_V
        self._mask_1X = _mask_state(ctx, (len(spec.taps.layers) or 1) * ctx.target.config.hidden_size)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        """The rows' features [T + 1, F]; the last row is the feature of all mask rows."""
        concat = self._network.ops.concat
        num_rows = len(taps[0])
        masks = self._mask_1X.split([tap.shape[1] for tap in taps], dim=1)
        flat = (concat((tap.view(1, -1), mask)) for tap, mask in zip(taps, masks, strict=True))
        return self._network.features(tuple(x.view(num_rows + 1, -1) for x in flat))

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, Tensor]:
        return self._network(tokens_N, features_NF, attn)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._network.logits(hidden_MH)

    def cost(self, size: PassSize) -> Cost:
        return self._network.cost(size)


def _mask_state(ctx: DraftContext, width: int) -> Tensor:
    """The state of mask rows, [1, X]; files store it with one, two or three axes."""
    assert ctx.checkpoint is not None
    shape = ctx.checkpoint.weights.shape("mask_hidden", 1, 2, 3) or (1, 1, width)
    axes = (1,) * (len(shape) - 1)
    return ctx.builder.tensor("mask_hidden", (*axes, width)).view(1, width)


def build(ctx: DraftContext) -> HeadDrafter:
    s = ctx.settings(TappedSettings)
    spec = DraftSpec(
        taps=tapped(ctx),
        kv=s.layers.caches,
        attention=s.layers.attention_shapes,
        takes_embeddings=ctx.takes_embeddings(s.layers.hidden_size),
    )
    layout = HeadLayout(
        context="all",
        shift=1,
        masks=ctx.num_drafts - 1,
        mask_token=checked_mask_token(ctx, s.mask_token),
    )
    head = PEagleHead(ctx, spec, layout)
    check_leftovers(ctx)
    return HeadDrafter(head, Parallel(head))
