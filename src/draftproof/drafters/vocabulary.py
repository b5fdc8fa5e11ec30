"""The tables a draft head reads tokens with and makes logits with: its own, else its target's.

Shapes: H hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.drafters.build import DraftBuild
from draftproof.models.config import ModelConfig
from draftproof.models.layers import Linear


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
