"""A smaller language model with the target's tokenizer as drafter. Leviathan et al., arXiv 2211.17192.

Shapes: N draft rows, M read rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.base import DraftSpec, InputLayout
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.head import HeadDrafter
from draftproof.models.config import ModelConfig
from draftproof.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSettings:
    model: ModelConfig


class DraftModelHead:
    """The model as a head: it reads every token unshifted, then the newest one as a row of its own."""

    ids_V: Tensor | None = None

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.spec = DraftSpec(layout=lambda _: InputLayout(context="all", anchor=True), kv=decoder.kv)

    def features(self, taps: tuple[Tensor, ...]) -> None:
        return None

    def __call__(
        self, tokens_N: Tensor, features_NF: Tensor | None, attn: PagedAttention
    ) -> tuple[Tensor, None]:
        return self._decoder(tokens_N, attn).hidden_TH, None

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self._decoder.logits(hidden_MH)


def build(given: DraftBuild) -> HeadDrafter:
    """Raises ValueError where the vocabularies differ, naming both sizes or the first token that differs."""
    s, made = given.settings(DraftModelSettings), given.build
    assert given.checkpoint is not None
    if s.model.vocab_size != given.target.config.vocab_size:
        raise ValueError(
            f"{given.checkpoint.where}: vocab_size={s.model.vocab_size}, but the target's is "
            f"{given.target.config.vocab_size}; a draft model must share the target's tokenizer"
        )
    _check_tokenizers(given.checkpoint.directory, given.target_directory)
    decoder = Decoder.load(
        given.checkpoint.weights,
        s.model,
        made.ops,
        made.planner,
        made.device,
        made.dtype,
        max_positions=given.max_positions,
        exact=False,
    )
    return HeadDrafter(DraftModelHead(decoder), given.num_drafts)


def _check_tokenizers(draft: Path, target: Path) -> None:
    """Equal sizes are not enough: token 17 must be the same text in both. Without both files there is no telling."""
    draft_ids, target_ids = _vocabulary(draft), _vocabulary(target)
    if draft_ids is None or target_ids is None or draft_ids == target_ids:
        return
    token = min(
        (t for t in target_ids if draft_ids.get(t) != target_ids[t]), key=target_ids.__getitem__, default="?"
    )
    raise ValueError(
        f"{draft}: its tokenizer differs from the target's: token {token!r} has id {draft_ids.get(token)} there and "
        f"{target_ids.get(token)} in the target's; a draft model must share the target's tokenizer"
    )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    vocab = json.loads(path.read_text(encoding="utf-8")).get("model", {}).get("vocab")
    return vocab if isinstance(vocab, dict) else None
