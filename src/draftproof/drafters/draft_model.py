"""A smaller language model with the target's tokenizer as drafter. Leviathan et al., arXiv 2211.17192.

Shapes: N draft rows, M read rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, InputLayout
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fits import check_vocabulary
from draftproof.drafters.head import HeadDrafter
from draftproof.models.config import ModelConfig
from draftproof.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSettings:
    """`mask_token`: of models that were trained to fill masks."""

    model: ModelConfig
    mask_token: int | None = None


class DraftModelHead:
    """The model as a head."""

    ids_V: Tensor | None = None

    def __init__(self, decoder: Decoder, spec: DraftSpec) -> None:
        self._decoder = decoder
        self.spec = spec

    def features(self, taps: tuple[Tensor, ...]) -> None:
        return None

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, None]:
        return self._decoder(tokens_N, attn).hidden_TH, None

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._decoder.logits(hidden_MH)


def build(given: DraftBuild) -> HeadDrafter:
    """Every token unshifted, then the newest one as a row of its own."""
    decoder = load(given)
    spec = DraftSpec(layout=lambda _: InputLayout(context="all", anchor=True), kv=decoder.kv)
    return HeadDrafter(DraftModelHead(decoder, spec), given.num_drafts)


def load(given: DraftBuild) -> Decoder:
    """Raises ValueError where the vocabularies differ, naming both sizes or the first token that differs."""
    s, made = given.settings(DraftModelSettings), given.build
    assert given.checkpoint is not None
    check_vocabulary(given, s.model.vocab_size)
    return Decoder.load(
        given.checkpoint.weights,
        s.model,
        made.ops,
        made.planner,
        made.device,
        made.dtype,
        max_positions=given.max_positions,
        exact=False,
    )
