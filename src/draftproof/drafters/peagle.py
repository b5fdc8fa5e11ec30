"""P-EAGLE: EAGLE's fused states, and mask rows with a learned state, so that one pass drafts all tokens.

Shapes: T target rows, F fused width.
"""

from __future__ import annotations

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, InputLayout
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fits import check_leftovers, checked_mask_token
from draftproof.drafters.head import DraftHead, HeadDrafter, PassSize
from draftproof.drafters.parallel import Parallel
from draftproof.drafters.tapped import TappedNetwork, TappedSettings, tapped
from draftproof.models.cost import Cost
from draftproof.models.decoder import kv_shapes


class PEagleHead(DraftHead):
    """The fused network; `mask_hidden` stands in for the tapped states of rows that have none."""

    def __init__(self, given: DraftBuild, spec: DraftSpec) -> None:
        assert given.checkpoint is not None
        if "embed_tokens.weight" not in given.checkpoint.weights:
            raise ValueError(
                f"{given.checkpoint.where}: embed_tokens.weight is missing, and this kind of head is trained with an "
                "embedding of its own, not the target's; download the files again"
            )
        self.spec = spec
        self._network = TappedNetwork(given, spec)
        self.ids_V = self._network.ids_V
        self._mask_1X = _mask_state(given, (len(spec.taps.layers) or 1) * given.target.config.hidden_size)

    def features(self, taps: tuple[Tensor, ...]) -> Tensor:
        """[T + 1, F], the mask rows' last."""
        concat, num_rows = self._network.ops.concat, len(taps[0])
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


def _mask_state(given: DraftBuild, width: int) -> Tensor:
    """[1, X]; files have it with one axis, two or three."""
    assert given.checkpoint is not None
    shape = given.checkpoint.weights.shape("mask_hidden", 1, 2, 3) or (1, 1, width)
    axes = (1,) * (len(shape) - 1)
    return given.build.tensor("mask_hidden", (*axes, width)).view(1, width)


def build(given: DraftBuild) -> HeadDrafter:
    s = given.settings(TappedSettings)
    spec = DraftSpec(
        taps=tapped(given),
        layout=lambda k: InputLayout(context="all", shift=1, masks=k - 1),
        kv=kv_shapes(s.layers),
        mask_token=checked_mask_token(given, s.mask_token),
    )
    head = PEagleHead(given, spec)
    check_leftovers(given)
    return HeadDrafter(head, given.num_drafts, Parallel(head, given.num_drafts))
