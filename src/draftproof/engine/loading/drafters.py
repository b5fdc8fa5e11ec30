"""Builds the drafters of a speculative_config from its plans, each in a sandbox, and joins them into one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from draftproof.attention import registry as registry_of_attention
from draftproof.attention.exactness import AttentionShape
from draftproof.config import ENGINE_WIDE, EngineConfig, SpeculativeConfig
from draftproof.drafters import registry
from draftproof.drafters.base import Drafter, DraftSpec, is_lookup
from draftproof.drafters.chain import ChainDrafter
from draftproof.drafters.context import DraftContext
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.drafters.short_texts import ShortTexts
from draftproof.engine import profile
from draftproof.engine.loading.base import Base
from draftproof.engine.loading.plans import DraftPlan
from draftproof.matmul.spec import DENSE
from draftproof.models.builder import LayerBuilder
from draftproof.models.decoder import Decoder
from draftproof.models.weights import WeightSource

log = logging.getLogger(__name__)
TARGETS = "the target's"


@dataclass(frozen=True, slots=True)
class Drafters:
    """All drafters of an engine, joined into one, and what the engine needs to know beside their spec."""

    drafter: Drafter | None
    members: tuple[DrafterSandbox, ...]
    num_drafts: int
    most: tuple[int, ...]  # number of drafts of each member
    levels: tuple[int, ...]  # numbers of drafts that may be asked for: K alone, or several from 0 to K
    identity: str  # key of measured draft times: what they depend on
    methods: tuple[str, ...] = ()  # one per drafter
    most_forced: int = 0  # maximum forced drafts of a request; 0: no drafter for forced text

    @property
    def names(self) -> tuple[str, ...]:
        """The drafters' methods; a repeated one gets a number: "ngram", "ngram-2"."""
        number = [self.methods[: i + 1].count(method) for i, method in enumerate(self.methods)]
        return tuple(m if n == 1 else f"{m}-{n}" for m, n in zip(self.methods, number, strict=True))

    @property
    def num_own(self) -> int:
        """Number of members that propose drafts themselves; those for forced text are behind them."""
        return sum(not member.spec.forced for member in self.members) or len(self.members)

    @property
    def lookups(self) -> list[int]:
        """Those of them that run no model, by their indices."""
        return [number for number in range(self.num_own) if is_lookup(self.members[number])]

    @property
    def is_auto(self) -> bool:
        return len(self.levels) > 1

    @property
    def spec(self) -> DraftSpec:
        return self.drafter.spec if self.drafter else DraftSpec()

    @property
    def is_trusted(self) -> bool:
        """Whether every drafter is built in or trusted by the user: a pass with them is a function of device memory."""
        return all(member.is_trusted for member in self.members)


def load_members(
    base: Base, target: Decoder, target_weights: WeightSource, plans: Sequence[DraftPlan], num_drafts: int
) -> list[DrafterSandbox]:
    """A drafter for each plan. num_drafts: the most that any of them proposes. ValueError if one does not fit here."""
    members = [
        _boxed(base, _one_drafter(base, target, target_weights, plan, num_drafts), plan) for plan in plans
    ]
    _check_fit(base, target, members)
    return members


def _boxed(base: Base, drafter: Drafter, plan: DraftPlan) -> DrafterSandbox:
    assert base.config.speculative_config is not None
    is_users = any(registry.is_custom(p.method) and not p.settings.trusted for p in (plan, *plan.inner))
    return DrafterSandbox(
        drafter,
        vocab_size=base.model.vocab_size,
        max_faults=base.config.speculative_config.max_faults,
        time_limit=base.config.speculative_config.time_limit,
        new_graphs=base.new_graphs if is_users else None,
    )


def _one_drafter(
    base: Base, target: Decoder, target_weights: WeightSource, plan: DraftPlan, num_drafts: int
) -> Drafter:
    """Build a plan's drafter; with a `max_model_len` of its own it drafts only for shorter texts. num_drafts: the most
    that any drafter of the engine proposes."""
    settings = plan.settings
    inner = [_one_drafter(base, target, target_weights, p, num_drafts) for p in plan.inner]
    if len(inner) > 1:
        boxed = [_boxed(base, drafter, p) for drafter, p in zip(inner, plan.inner, strict=True)]
        inner = [ChainDrafter(boxed, [p.num_drafts for p in plan.inner], base.model.vocab_size)]
    ctx = DraftContext(
        config=base.config,
        own=_own_settings(base.config, plan),
        options=settings.options,
        num_drafts=plan.num_drafts,
        checkpoint=plan.checkpoint,
        target=target,
        target_weights=target_weights,
        target_directory=base.directory,
        builder=LayerBuilder(
            plan.checkpoint.weights if plan.checkpoint else target_weights,
            base.ops,
            base.planner,
            base.device,
            base.dtype,
            exact=False,
            kind=settings.quantization or DENSE,
        ),
        max_model_len=base.max_model_len,
        max_positions=base.max_model_len + num_drafts + 1,
        inner=inner[0] if inner else None,
        vision=base.vision,
    )
    drafter = registry.build(plan.method, ctx)
    if settings.image_inputs == "embeddings" and not drafter.spec.takes_embeddings:
        raise ValueError(
            f"speculative_config: image_inputs='embeddings': a drafter of method={plan.method!r} is fed none; leave it "
            "out"
        )
    log.info("%s", _start_line(plan, drafter.spec, ctx))
    return drafter if settings.max_model_len is None else ShortTexts(drafter, settings.max_model_len)


def _own_settings(config: EngineConfig, plan: DraftPlan) -> SpeculativeConfig:
    """The plan's settings, with those that hold for all drafters (`ENGINE_WIDE`) filled in."""
    shared = {name: getattr(config.speculative_config, name) for name in ENGINE_WIDE}
    return dataclasses.replace(
        plan.settings, method=plan.method, num_speculative_tokens=plan.num_drafts, **shared
    )


def _check_fit(base: Base, target: Decoder, members: Sequence[DrafterSandbox]) -> None:
    """ValueError for a drafter that taps layers the target lacks, has states without being trusted, or has heads that
    no attention backend here supports."""
    for member in members:
        spec = member.spec
        target.check_taps(spec.taps.layers)
        if spec.states and not member.is_trusted:
            raise ValueError(
                f"drafter {member.name}: spec.states={spec.states}: their code would run in the engine's steps; set "
                "speculative_config['trusted']=True, or keep them in the drafter"
            )
        shapes = spec.attention or [
            AttentionShape(num_heads=kv.heads, num_kv_heads=kv.heads, head_dim=kv.head_dim) for kv in spec.kv
        ]
        whose = f"drafter {member.name}"
        registry_of_attention.check_sizes(base.device, base.config.attention_backend, shapes, whose)


def together(base: Base, plans: Sequence[DraftPlan], members: Sequence[DrafterSandbox]) -> Drafters:
    """Join the drafters. Those for forced text come last, so that the others are numbered from 0; they never widen a
    pass beyond the others' drafts."""
    order = sorted(range(len(plans)), key=lambda i: members[i].spec.forced)
    plans, members = [plans[i] for i in order], [members[i] for i in order]
    most = [plan.num_drafts for plan in plans]
    num_own = sum(not member.spec.forced for member in members)
    num_drafts = max(most[:num_own] or most, default=0)
    speculative = base.config.speculative_config
    is_auto = speculative is not None and speculative.is_auto
    return Drafters(
        _joined(members[:num_own] or members, most, base.model.vocab_size),
        tuple(members),
        num_drafts,
        most=tuple(most),
        levels=profile.levels_up_to(num_drafts, base.device.type) if is_auto else (num_drafts,),
        identity=repr([plan.identity for plan in plans]),
        methods=tuple(plan.method for plan in plans),
        most_forced=min(num_drafts, sum(most[num_own:])),
    )


def _joined(members: Sequence[DrafterSandbox], most: Sequence[int], vocab_size: int) -> Drafter | None:
    """The members as one drafter. `most`: maximum number of drafts of each."""
    if len(members) > 1:
        return ChainDrafter(members, most[: len(members)], vocab_size)
    return members[0] if members else None


def _start_line(plan: DraftPlan, spec: DraftSpec, ctx: DraftContext) -> str:
    """Log line: a drafter's K and its origin, its taps, and what it shares with its target."""
    notes = ctx.notes
    parts = [f"drafter {plan.method}: K={plan.num_drafts} ({_whose_number(plan)})", _taps(spec, notes)]
    if plan.checkpoint is not None:
        parts.append(f"embedding: {notes.get('embed_tokens', 'own')}")
        parts.append(f"lm_head: {notes.get('lm_head', 'own')}")
        parts.append(f"vocabulary: {notes.get('vocabulary', TARGETS)}")
        parts.append(f"from {plan.checkpoint.where}")
    return "; ".join(parts)


def _whose_number(plan: DraftPlan) -> str:
    """Where K comes from."""
    own = None if plan.checkpoint is None else plan.checkpoint.num_drafts
    number, whose = registry.default_drafts(plan.method, is_auto=plan.settings.is_auto), "the method's"
    if own is not None:
        number, whose = own, "its checkpoint's"
    if plan.settings.num_speculative_tokens is not None:
        number, whose = plan.settings.num_speculative_tokens, "as asked"
    return whose if number == plan.num_drafts else "what its chain allows"


def _taps(spec: DraftSpec, notes: dict[str, str]) -> str:
    names = [str(layer) for layer in spec.taps.layers] + ["final"] * spec.taps.final
    return f"taps: {' '.join(names)} ({notes.get('taps', 'the method sets them')})" if names else "taps: none"
