"""The embedding and output matrix of a draft head: its own, else its target's.

The target's matrices are shared without a copy if dtype and vocabulary match.
Shapes: H hidden, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.drafters.context import DraftContext
from draftproof.matmul.linear import PackedLinear
from draftproof.matmul.spec import DENSE
from draftproof.models.config import ModelConfig

_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"


def embedding(ctx: DraftContext, layers: ModelConfig) -> Tensor:
    """The embedding [V, H]: the head's own, else the target's."""
    assert ctx.checkpoint is not None
    shape = (layers.vocab_size, layers.hidden_size)
    _note_owner(ctx, _EMBED)
    if _EMBED in ctx.checkpoint.weights:
        return ctx.builder.tensor(_EMBED, shape)
    if ctx.builder.dtype == ctx.target.embed_VH.dtype:
        assert ctx.target.embed_VH.shape == shape
        return ctx.target.embed_VH
    return ctx.builder.place(ctx.target_weights.get(ctx.target_embed_name, shape))


def output_head(
    ctx: DraftContext, layers: ModelConfig, draft_vocab_size: int
) -> tuple[Tensor | None, PackedLinear]:
    """(target id of each column or None, the product); uses the target's rows if the file has no head.

    The target's product itself is used if vocabulary and dtype are the same and weights stay dense.
    """
    assert ctx.checkpoint is not None
    builder = ctx.builder
    weights = ctx.checkpoint.weights
    _note_owner(ctx, _HEAD)
    ids_D = None if draft_vocab_size == layers.vocab_size else _target_ids(ctx, draft_vocab_size)
    if _HEAD in weights:
        head_DH = builder.tensor(_HEAD, (draft_vocab_size, layers.hidden_size))
    elif ids_D is None and builder.dtype == ctx.target.head.shape.dtype and builder.kind == DENSE:
        return None, ctx.target.head
    else:
        full_VH = ctx.target_weights.get(ctx.target_head_name, (layers.vocab_size, layers.hidden_size))
        head_DH = builder.place(full_VH if ids_D is None else full_VH[ids_D])
    return None if ids_D is None else ids_D.to(ctx.device), builder.pack(head_DH, out_dtype=torch.float32)


def _note_owner(ctx: DraftContext, name: str) -> None:
    assert ctx.checkpoint is not None
    is_own = name in ctx.checkpoint.weights
    ctx.notes[name.removesuffix(".weight")] = "own" if is_own else "the target's"


def _target_ids(ctx: DraftContext, draft_vocab_size: int) -> Tensor:
    """Target id of each draft id, int64 [D] on the CPU. ValueError if the file names ids that the target lacks."""
    assert ctx.checkpoint is not None
    vocab = ctx.target.config.vocab_size
    weights = ctx.checkpoint.weights
    ids_D = weights.get("d2t", (draft_vocab_size,), "ids").long() + torch.arange(draft_vocab_size)
    if not 0 <= int(ids_D.min()) <= int(ids_D.max()) < vocab:
        raise ValueError(f"{ctx.checkpoint.where}: d2t maps outside the vocabulary of {vocab}")
    ctx.notes["vocabulary"] = f"{draft_vocab_size} of the target's {vocab} ids, by d2t"
    return ids_D
