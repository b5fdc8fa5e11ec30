"""Which of a target's caches a head without keys and values of its own reads."""

from __future__ import annotations

from draftproof.drafters.context import DraftContext
from draftproof.drafters.validation import check_hidden, check_vocabulary
from draftproof.models.config import ModelConfig


def caches_lent(ctx: DraftContext, layers: ModelConfig, backbone_hidden_size: int) -> tuple[int, ...]:
    """Which of the target's caches the assistant's kinds of layers read; ValueError where the pair does not fit."""
    own = layers.gemma
    assert ctx.checkpoint is not None and own is not None
    where, target = ctx.checkpoint.where, ctx.target.config
    other = "this assistant belongs to another target"
    if target.gemma is None or not target.gemma.values_normed:
        raise ValueError(
            f"{where}: model_type='gemma4_assistant', but the target's is {target.model_type!r}; an assistant reads "
            "the keys and values of a Gemma 4 target"
        )
    check_vocabulary(ctx, layers.vocab_size)
    check_hidden(ctx, backbone_hidden_size, "backbone_hidden_size")
    lent = []
    for kind in own.kinds:
        cache = target.gemma.last_cache(kind)
        if cache is None:
            raise ValueError(f"{where}: has layers of type {kind!r}, but the target has none; {other}")
        mine = next(layer for layer in own.layers if layer.kind == kind)
        theirs = next(layer for layer in target.gemma.layers if layer.owns_cache and layer.cache == cache)
        for name in ("num_kv_heads", "head_dim", "rope", "window"):
            wanted, found = getattr(mine, name), getattr(theirs, name)
            if wanted != found:
                raise ValueError(f"{where}: {kind}: {name}={wanted}, but the target's is {found}; {other}")
        lent.append(cache)
    return tuple(lent)
