"""MTP: prediction modules trained with the target. A single module is applied repeatedly; of several, each drafts one
token further than the module before it.

DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.drafters.base import Drafter, DraftSpec, Taps
from draftproof.drafters.context import DraftContext
from draftproof.drafters.fused import FusedHead, FusedNetwork, Norms
from draftproof.drafters.head import HeadDrafter, Recurrent
from draftproof.drafters.modules import ModulesDrafter
from draftproof.drafters.validation import check_leftovers, check_num_drafts
from draftproof.drafters.vocabulary import embedding, output_head
from draftproof.models.config import ModelConfig
from draftproof.models.layers import rope_tables

_NORMS = Norms(embed=True, hidden=True, input=True, final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSettings:
    """Settings of a module in its own files. `layers`: its one decoder layer; `target_layers`: number of its target's
    layers according to its config."""

    layers: ModelConfig
    target_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMtpSettings:
    """Settings of modules in the target's files, tensors under `modules.k.`. `layers`: a module's decoder layer;
    `state_first`: see `FusedNetwork`."""

    layers: ModelConfig
    num_modules: int
    state_first: bool


def build(ctx: DraftContext) -> Drafter:
    assert ctx.checkpoint is not None
    in_target = isinstance(ctx.checkpoint.settings, TargetMtpSettings)
    return _build_from_target(ctx) if in_target else _build_own(ctx)


def _build_own(ctx: DraftContext) -> Drafter:
    """A module in its own files, trained on the target's last state before the final norm."""
    s = ctx.settings(MtpSettings)
    num_layers = ctx.target.config.num_layers
    assert ctx.checkpoint is not None
    if s.target_layers != num_layers:
        raise ValueError(
            f"{ctx.checkpoint.where}: num_hidden_layers={s.target_layers} of the model it was trained for, but the "
            f"target has {num_layers}; this draft head belongs to another target"
        )
    head = FusedHead(ctx, s.layers, Taps(layers=(num_layers,)), _NORMS)
    return HeadDrafter(head, Recurrent(head, leaves_rows=s.layers.may_leave_rows))


def _build_from_target(ctx: DraftContext) -> Drafter:
    """Modules in the target's files, which read its state after the final norm. Modules beyond the number of drafts are
    not loaded."""
    s = ctx.settings(TargetMtpSettings)
    builder = ctx.builder
    taps = Taps(final=True)
    if s.num_modules > 1:
        check_num_drafts(ctx, s.num_modules, f"num_nextn_predict_layers={s.num_modules}")
    num = min(s.num_modules, ctx.num_drafts)
    if num == 1:
        head = FusedHead(ctx, s.layers, taps, _NORMS, prefix="modules.0.", state_first=s.state_first)
        return HeadDrafter(head, Recurrent(head, leaves_rows=s.layers.may_leave_rows))
    tables = rope_tables(s.layers, ctx.max_positions, builder.device)
    modules = [
        FusedNetwork(
            builder,
            s.layers,
            _NORMS,
            tables,
            prefix=f"modules.{m}.",
            index=m,
            state_first=s.state_first,
        )
        for m in range(num)
    ]
    spec = DraftSpec(
        taps=taps,
        kv=s.layers.caches * num,
        attention=s.layers.attention_shapes,
        reads_ahead=num,
        takes_embeddings=ctx.takes_embeddings(s.layers.hidden_size),
    )
    embed_VH = embedding(ctx, s.layers)
    _, lm_head = output_head(ctx, s.layers, s.layers.vocab_size)
    check_leftovers(ctx, tuple(f"modules.{m}." for m in range(num)))
    return ModulesDrafter(modules, embed_VH, lm_head, spec)
