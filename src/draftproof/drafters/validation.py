"""Checks that a draft checkpoint matches its target: a mismatch is refused at start, with both values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftproof.drafters.context import DraftContext
from draftproof.models.config import ModelConfig
from draftproof.models.tokenizer_file import read_vocabulary
from draftproof.models.weights import Weights

# Tensors that may stay unread: copies and extras, and `embed_tokens`, `lm_head` and the confidence head, which only
# some heads read.
_IGNORABLE = (
    r"verifier_.*",
    r".*rotary_emb\.inv_freq",
    r"embed_tokens\.weight",
    r"lm_head\.weight",
    "[dt]2[dt]",
    r"confidence_head\..*",
)


def check_vocabulary(ctx: DraftContext, vocab_size: int) -> None:
    """Raise ValueError if draft and target differ in vocabulary size or in tokens' texts."""
    assert ctx.checkpoint is not None
    if vocab_size != ctx.target.config.vocab_size:
        raise ValueError(
            f"{ctx.checkpoint.where}: vocab_size={vocab_size}, but the target's is "
            f"{ctx.target.config.vocab_size}; the draft must share the target's tokenizer, so this one belongs to "
            "another target"
        )
    _check_tokenizers(ctx.checkpoint.directory, ctx.tokenizer_directory)


def shares_vocabulary(ctx: DraftContext, vocab_size: int) -> bool:
    """Whether draft and target have the same vocabulary, as far as their files tell."""
    assert ctx.checkpoint is not None
    if vocab_size != ctx.target.config.vocab_size:
        return False
    draft_ids = read_vocabulary(ctx.checkpoint.directory)
    target_ids = read_vocabulary(ctx.tokenizer_directory)
    return draft_ids is None or target_ids is None or draft_ids == target_ids


def check_hidden(ctx: DraftContext, hidden_size: int, name: str = "hidden_size") -> None:
    """Raise ValueError if a head that reads target states, or shares its embeddings, has another hidden size."""
    assert ctx.checkpoint is not None
    if hidden_size != ctx.target.config.hidden_size:
        raise ValueError(
            f"{ctx.checkpoint.where}: {name}={hidden_size}, but the target's is "
            f"{ctx.target.config.hidden_size}; this draft head belongs to another target"
        )


def check_leftovers(ctx: DraftContext, prefixes: tuple[str, ...] = ("",)) -> None:
    """Raise ValueError for an unused tensor of the head (name begins with one of `prefixes`), such as a bias that the
    config excludes."""
    assert ctx.checkpoint is not None
    if isinstance(ctx.checkpoint.weights, Weights):
        ctx.checkpoint.weights.check_used(lambda name: name.startswith(prefixes), _IGNORABLE)


def check_target(ctx: DraftContext, layers: ModelConfig, taps: Sequence[int]) -> None:
    """Raise ValueError, with both values, if the head was trained for another target."""
    assert ctx.checkpoint is not None
    where = ctx.checkpoint.where
    target = ctx.target.config
    check_vocabulary(ctx, layers.vocab_size)
    _check_layers(ctx, taps)
    shape = ctx.checkpoint.weights.shape("fc.weight", 2) if taps else None
    if shape is not None and shape[1] != len(taps) * target.hidden_size:
        raise ValueError(
            f"{where}: fc.weight reads {shape[1]} features, but {len(taps)} tapped layers of the target's "
            f"hidden_size={target.hidden_size} are {len(taps) * target.hidden_size}; this draft head belongs to "
            "another target"
        )
    own = all(name in ctx.checkpoint.weights for name in ("embed_tokens.weight", "lm_head.weight"))
    if not (taps and own):
        check_hidden(ctx, layers.hidden_size)


def _check_layers(ctx: DraftContext, taps: Sequence[int]) -> None:
    """Raise ValueError, with the files' own ids, if the head's target had another number of layers."""
    assert ctx.checkpoint is not None
    where = ctx.checkpoint.where
    shift = ctx.checkpoint.tap_shift
    made_for = ctx.checkpoint.num_target_layers
    last = ctx.target.config.num_layers
    if made_for not in (None, last):
        raise ValueError(
            f"{where}: num_target_layers={made_for}, but the target's num_hidden_layers is {last}; this draft head "
            "belongs to another target"
        )
    wrong = [i for i in taps if not 0 <= i <= last]
    if wrong:
        raise ValueError(
            f"{where}: tapped layer id {wrong[0] - shift} of {[i - shift for i in taps]} is out of range: the target "
            f"has num_layers={last}, so ids run from {-shift} to {last - shift}; this draft head belongs to another "
            "target"
        )


def checked_mask_token(ctx: DraftContext, mask_token: int | None) -> int:
    """The id that mask rows carry; ValueError if it is missing or not in the target's vocabulary."""
    assert ctx.checkpoint is not None
    where = ctx.checkpoint.where
    vocab = ctx.target.config.vocab_size
    if mask_token is None:
        raise ValueError(f"{where}: mask_token_id is missing; add the id that the head was trained with")
    if not 0 <= mask_token < vocab:
        raise ValueError(
            f"{where}: mask_token_id={mask_token}, but the target's vocab_size={vocab}; this draft head belongs to "
            "another target"
        )
    return mask_token


def check_num_drafts(ctx: DraftContext, most: int, why: str) -> None:
    """Raise ValueError if the user asks for more drafts than the head has rows; in a chain the head drafts fewer."""
    speculative = ctx.config.speculative_config
    asked = ctx.num_drafts if speculative is None or not speculative.drafters else 0
    if asked > most:
        raise ValueError(
            f"speculative_config: num_speculative_tokens={asked}, but the draft head's {why} allows {most}; ask for at "
            f"most {most}"
        )


def _check_tokenizers(draft: Path, target: Path) -> None:
    """Raise ValueError if tokenizers of one size differ: token 17 must be the same text in both. Passes if either file
    is missing."""
    draft_ids = read_vocabulary(draft)
    target_ids = read_vocabulary(target)
    if draft_ids is None or target_ids is None or draft_ids == target_ids:
        return
    token = min(
        (t for t in target_ids if draft_ids.get(t) != target_ids[t]), key=target_ids.__getitem__, default="?"
    )
    raise ValueError(
        f"{draft}: its tokenizer differs from the target's: token {token!r} has id {draft_ids.get(token)} there and "
        f"{target_ids.get(token)} in the target's; the draft must share the target's tokenizer"
    )
