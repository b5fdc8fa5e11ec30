"""A smaller language model as drafter. Leviathan et al., arXiv 2211.17192; with a tokenizer that differs from the
target's: Timor et al., arXiv 2502.05202.

Shapes: V columns of logits, C columns of tokens in both vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from draftproof.config import parse_options
from draftproof.drafters import token_map
from draftproof.drafters.base import Drafter, OwnEmbeddings
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter, HeadLayout
from draftproof.drafters.model_head import (
    DraftModelHead,
    DraftModelSettings,
    load_decoder,
    own_embeddings,
)
from draftproof.drafters.text_model import TextDrafter, context_of
from draftproof.drafters.token_map import TokenMap
from draftproof.drafters.validation import shares_vocabulary
from draftproof.models.config import ModelConfig
from draftproof.models.decoder import Decoder
from draftproof.models.tokenizer_file import open_tokenizer
from draftproof.models.weights import Weights
from draftproof.schema import check_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions:
    """Settings for a model whose tokenizer differs from the target's. "table": its embedding and head are remapped to
    the target's ids, and it drafts tokens of both vocabularies; "text": it reads and writes text, on the host; "auto":
    "table" if it has more than half of the target's tokens, else "text"."""

    token_map: Literal["auto", "table", "text"] = "auto"

    def __post_init__(self) -> None:
        check_choice("speculative_config: token_map", self.token_map, ("auto", "table", "text"))


def build(ctx: DraftContext) -> Drafter:
    """A drafter that is fed every token unshifted, the newest as a row of its own; or the text, see `text_model`.

    ValueError, with both sizes, if the vocabularies differ and a tokenizer.json to match them is missing.
    """
    options = parse_options("speculative_config", ctx.options, DraftModelOptions)
    model = ctx.settings(DraftModelSettings).model
    if options.token_map != "text" and shares_vocabulary(ctx, model.vocab_size):
        embeds = own_embeddings(ctx)
        return _head_drafter(load_decoder(ctx, model, ctx.builder.weights), None, embeds)
    target, draft = _tokenizers(ctx)
    ctx.notes["vocabulary"] = "its own, by text"
    if options.token_map == "text":
        return _text_drafter(ctx, model, target, draft)
    mapped = token_map.compare(target, draft, ctx.target.config.vocab_size, model.vocab_size)
    if options.token_map == "auto" and mapped.coverage <= 0.5:
        return _text_drafter(ctx, model, target, draft)
    if not mapped.num_common:
        raise ValueError(
            f"speculative_config: token_map='table': none of the target's {mapped.num_tokens} tokens is one of the "
            f"draft's {draft.get_vocab_size()}; use token_map='text'"
        )
    ctx.notes["vocabulary"] = f"{mapped.num_common} of the target's {mapped.num_tokens} tokens, by their text"
    return _mapped_drafter(ctx, model, mapped)


def _mapped_drafter(ctx: DraftContext, model: ModelConfig, mapped: TokenMap) -> HeadDrafter:
    """The model with its tables remapped to target ids, so that nothing is mapped at run time."""
    weights = ctx.builder.weights
    ids_C = mapped.common_ids()
    tied = model.tie_word_embeddings
    if isinstance(weights, Weights):  # random weights need no mapping
        weights = token_map.translated(weights, mapped, tied=tied)
    model = replace(
        model, vocab_size=ctx.target.config.vocab_size, tie_word_embeddings=tied and ids_C is None
    )
    decoder = load_decoder(ctx, model, weights, num_columns=mapped.num_common)
    return _head_drafter(decoder, None if ids_C is None else ids_C.to(ctx.device))


def _head_drafter(
    decoder: Decoder, ids_V: Tensor | None, embeds: tuple[OwnEmbeddings, ...] = ()
) -> HeadDrafter:
    layout = HeadLayout(context="all", anchor=True)
    return HeadDrafter(DraftModelHead(decoder, layout, ids_V, embeds))


def _text_drafter(ctx: DraftContext, model: ModelConfig, target: Any, draft: Any) -> TextDrafter:
    context = context_of(ctx, model.max_position_embeddings)
    decoder = load_decoder(ctx, model, ctx.builder.weights, max_positions=context)
    return TextDrafter(ctx, decoder, context, target, draft)


def _tokenizers(ctx: DraftContext) -> tuple[Any, Any]:
    """(the target's tokenizer, the draft's)."""
    assert ctx.checkpoint is not None
    model = ctx.settings(DraftModelSettings).model
    folders = (ctx.tokenizer_directory, ctx.checkpoint.directory)
    target, draft = found = tuple(open_tokenizer(folder) for folder in folders)
    if target is None or draft is None:
        lost = [str(folder) for folder, one in zip(folders, found, strict=True) if one is None]
        raise ValueError(
            f"{ctx.checkpoint.where}: vocab_size={model.vocab_size}, but the target's is "
            f"{ctx.target.config.vocab_size}, and there is no tokenizer.json in {' and '.join(lost)}; with both "
            "files tokens are matched by their text, without them the draft must share the target's tokenizer"
        )
    return target, draft
