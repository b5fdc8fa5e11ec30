"""Which drafters a speculative_config asks for: methods, checkpoints and how many drafts, before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftproof.checkpoints import detect, native
from draftproof.config import SpeculativeConfig, reject_unknown_keys
from draftproof.drafters import registry
from draftproof.drafters.build import DraftCheckpoint
from draftproof.models.loading import WeightSource, resolve


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One drafter to build; a chain has several. `inner`: drafters that it runs."""

    method: str
    checkpoint: DraftCheckpoint | None
    settings: SpeculativeConfig
    inner: tuple[DraftPlan, ...] = ()


def draft_plans(settings: SpeculativeConfig, weights: WeightSource | None, target: Path) -> list[DraftPlan]:
    """`weights`: given to draft checkpoints instead of their files; `target`: its folder."""
    inner = [SpeculativeConfig.from_dict(d) for d in settings.drafters]
    members = [plan for one in inner for plan in draft_plans(one, weights, target)]
    if settings.method == registry.CHAIN:
        if not settings.drafters:
            raise ValueError(
                "speculative_config: method='chain' needs drafters=[{...}, {...}], tried in this order"
            )
        names = [f.name for f in dataclasses.fields(settings) if f.name != "options"]
        reject_unknown_keys("speculative_config", settings.options, names)
        return members
    if settings.method is not None:
        registry.check(settings.method)
    method = registry.METHODS.get(settings.method or "")
    if settings.drafters and not (method and method.runs_others):
        raise ValueError(
            f"speculative_config: drafters=... goes with method='chain', not {settings.method!r}"
        )
    if settings.method is not None and not (method and method.needs_model):
        return [DraftPlan(settings.method, None, settings, tuple(members))]
    if method and method.may_be_native and _is_target(settings.model, target):
        return [DraftPlan(settings.method or "", native.read(target, weights), settings)]
    if settings.model is None:
        raise ValueError(
            f"speculative_config: method={settings.method!r} without model: give the checkpoint's folder or hub id"
            if settings.method
            else "speculative_config: give 'method' (such as 'ngram') or 'model' (a draft checkpoint)"
        )
    checkpoint = detect.read(resolve(settings.model), weights)
    if settings.method not in (None, checkpoint.method):
        raise ValueError(
            f"speculative_config: method={settings.method!r}, but {checkpoint.where} is a checkpoint for "
            f"{checkpoint.method!r}; leave method out, or give another model"
        )
    return [DraftPlan(checkpoint.method, checkpoint, settings)]


def _is_target(model: str | None, target: Path) -> bool:
    """Whether a drafter's `model` is the target's folder; none given means that it is."""
    return model is None or resolve(model).samefile(target)


def most_drafts(settings: SpeculativeConfig, plans: Sequence[DraftPlan]) -> int:
    """K: the user's, else the checkpoint's, else the method's; in a chain the largest of its members'."""
    if settings.num_speculative_tokens is not None:
        return settings.num_speculative_tokens

    def one(plan: DraftPlan) -> int:
        method = registry.METHODS.get(plan.method)
        own = plan.checkpoint.num_drafts if plan.checkpoint else max(map(one, plan.inner), default=None)
        return plan.settings.num_speculative_tokens or own or (method.default_drafts if method else 5)

    return max(one(plan) for plan in plans)
