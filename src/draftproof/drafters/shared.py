"""What heads that tap several layers share with their target: states, vocabulary, embedding, logits. Checked at start.

Shapes: H hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.drafters.build import DraftBuild
from draftproof.drafters.fits import check_hidden, check_vocabulary
from draftproof.models.config import ModelConfig
from draftproof.models.layers import Linear


def check_target(given: DraftBuild, layers: ModelConfig, taps: Sequence[int]) -> None:
    """ValueError where the head was made for another target, with both values."""
    assert given.checkpoint is not None
    where, target = given.checkpoint.where, given.target.config
    check_vocabulary(given, layers.vocab_size)
    given.target.check_taps(taps)
    shape = given.checkpoint.weights.shape("fc.weight")
    if shape is not None and shape[1] != len(taps) * target.hidden_size:
        raise ValueError(
            f"{where}: fc.weight reads {shape[1]} features, but {len(taps)} tapped layers of the target's "
            f"hidden_size={target.hidden_size} are {len(taps) * target.hidden_size}; this draft head belongs to "
            "another target"
        )
    if any(name not in given.checkpoint.weights for name in ("embed_tokens.weight", "lm_head.weight")):
        check_hidden(given, layers.hidden_size)


def checked_mask_token(given: DraftBuild, mask_token: int | None) -> int:
    """The id that mask rows carry; ValueError where there is none or the target has no such id."""
    assert given.checkpoint is not None
    where, vocab = given.checkpoint.where, given.target.config.vocab_size
    if mask_token is None:
        raise ValueError(f"{where}: mask_token_id is missing; add the id that the head was trained with")
    if not 0 <= mask_token < vocab:
        raise ValueError(
            f"{where}: mask_token_id={mask_token}, but the target's vocab_size={vocab}; this draft head belongs to "
            "another target"
        )
    return mask_token


def check_num_drafts(given: DraftBuild, most: int, why: str) -> None:
    """ValueError where the user asks for more drafts than the head has rows; in a chain the head gives what it can."""
    speculative = given.config.speculative_config
    asked = given.num_drafts if speculative is None or not speculative.drafters else 0
    if asked > most:
        raise ValueError(
            f"speculative_config: num_speculative_tokens={asked}, but the draft head's {why} allows {most}; ask for at "
            f"most {most}"
        )


def embedding(given: DraftBuild, layers: ModelConfig) -> Tensor:
    """The head's own, else the target's."""
    shape = (layers.vocab_size, layers.hidden_size)
    return given.own_or_target("embed_tokens.weight", given.target_embed_name, shape)


def output_head(
    given: DraftBuild, layers: ModelConfig, draft_vocab_size: int
) -> tuple[Tensor | None, Linear]:
    """(target id of each column or None, the product); the target's rows where the file has no head."""
    ids_D, head_DH = _head_weight(given, layers, draft_vocab_size)
    return ids_D, given.build.pack(head_DH, out_dtype=torch.float32)


def _head_weight(given: DraftBuild, layers: ModelConfig, size: int) -> tuple[Tensor | None, Tensor]:
    assert given.checkpoint is not None
    weights, vocab, hidden = given.checkpoint.weights, layers.vocab_size, layers.hidden_size
    if size == vocab:
        return None, given.own_or_target("lm_head.weight", given.target_head_name, (vocab, hidden))
    ids_D = weights.get("d2t", (size,)).long() + torch.arange(size)
    if not 0 <= int(ids_D.min()) <= int(ids_D.max()) < vocab:
        raise ValueError(f"{given.checkpoint.where}: d2t maps outside the vocabulary of {vocab}")
    if "lm_head.weight" in weights:
        head_DH = given.build.tensor("lm_head.weight", (size, hidden))
    else:
        full_VH = given.build.reading(given.target_weights).tensor(given.target_head_name, (vocab, hidden))
        head_DH = full_VH[ids_D]
    return ids_D.to(given.device), head_DH
