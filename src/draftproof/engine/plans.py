"""Which drafters a speculative_config asks for, and how many drafts each proposes: checked before any is built."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftproof.checkpoints import detect, native
from draftproof.config import ENGINE_WIDE, SpeculativeConfig, reject_unknown_keys
from draftproof.drafters import registry
from draftproof.drafters.build import DraftCheckpoint
from draftproof.models.loading import WeightSource, resolve


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One drafter to build; a chain has several. `num_drafts`: the most that it proposes. `inner`: drafters that it
    runs."""

    method: str
    checkpoint: DraftCheckpoint | None
    settings: SpeculativeConfig
    num_drafts: int
    inner: tuple[DraftPlan, ...] = ()


def draft_plans(settings: SpeculativeConfig, weights: WeightSource | None, target: Path) -> list[DraftPlan]:
    """`weights`: given to draft checkpoints instead of their files; `target`: its folder.

    A plan's K is the user's for this drafter, else the checkpoint's, else the method's; a chain's own K is the most
    that any of its members proposes. ValueError for what makes no sense.
    """
    if settings.method == registry.CHAIN:
        return _chain(settings, weights, target)
    if settings.method is not None:
        registry.check(settings.method)
    method = registry.METHODS.get(settings.method or "")
    if settings.drafters and not (method and method.runs_others):
        raise ValueError(
            f"speculative_config: drafters=... goes with method='chain', not {settings.method!r}"
        )
    if settings.method is not None and not (method and method.needs_model):
        if method is not None:
            _refuse_model(settings)
        # what is run for its cost alone costs what as many drafts cost
        members = tuple(_members(settings, weights, target, settings.num_speculative_tokens))
        own = max((m.num_drafts for m in members), default=None)
        return [_plan(settings.method, None, settings, own, members)]
    if method and method.may_be_native and _is_target(settings.model, target):
        checkpoint = native.read(target, weights)
        return [_plan(checkpoint.method, checkpoint, settings, checkpoint.num_drafts)]
    if settings.model is None:
        raise ValueError(
            f"speculative_config: method={settings.method!r} without model: give the checkpoint's folder or hub id"
            if settings.method
            else "speculative_config: give 'method' (such as 'ngram') or 'model' (a draft checkpoint)"
        )
    checkpoint = detect.read(resolve(settings.model, field="speculative_config: model"), weights)
    if settings.method not in (None, checkpoint.method):
        raise ValueError(
            f"speculative_config: method={settings.method!r}, but {checkpoint.where} is a checkpoint for "
            f"{checkpoint.method!r}; leave method out, or give another model"
        )
    return [_plan(checkpoint.method, checkpoint, settings, checkpoint.num_drafts)]


def _plan(
    method: str,
    checkpoint: DraftCheckpoint | None,
    settings: SpeculativeConfig,
    own: int | None,
    inner: tuple[DraftPlan, ...] = (),
) -> DraftPlan:
    registry.check_options(method, settings.options)
    if checkpoint is None:
        _refuse_quantization(settings)
    row = registry.METHODS.get(method)
    number = settings.num_speculative_tokens or own or (row.default_drafts if row else 5)
    return DraftPlan(method, checkpoint, settings, number, inner)


def _chain(settings: SpeculativeConfig, weights: WeightSource | None, target: Path) -> list[DraftPlan]:
    if not settings.drafters:
        raise ValueError(
            "speculative_config: method='chain' needs drafters=[{...}, {...}], tried in this order"
        )
    _refuse_model(settings)
    _refuse_quantization(settings)
    names = [f.name for f in dataclasses.fields(settings) if f.name != "options"]
    reject_unknown_keys("speculative_config", settings.options, names)
    most = settings.num_speculative_tokens
    return [
        m if most is None else replace(m, num_drafts=min(m.num_drafts, most))
        for m in _members(settings, weights, target)
    ]


def _members(
    settings: SpeculativeConfig, weights: WeightSource | None, target: Path, num_drafts: int | None = None
) -> list[DraftPlan]:
    """`num_drafts`: K of members that have none of their own."""
    found: list[DraftPlan] = []
    for i, raw in enumerate(settings.drafters):
        try:
            found += draft_plans(_member(raw, num_drafts), weights, target)
        except ValueError as error:  # where it speaks of a setting it says whose
            own = f"speculative_config: drafters[{i}]"
            raise ValueError(re.sub("^speculative_config", own, str(error))) from error
    return found


def _member(raw: Mapping[str, Any], num_drafts: int | None) -> SpeculativeConfig:
    member = SpeculativeConfig.from_dict(raw)
    for key in ENGINE_WIDE:
        if key in raw:
            raise ValueError(
                f"speculative_config: {key}={raw[key]!r}: holds for all drafters together; give it "
                "beside 'drafters', not in one of them"
            )
    if num_drafts is not None and member.num_speculative_tokens is None:
        return replace(member, num_speculative_tokens=num_drafts)
    return member


def _is_target(model: str | None, target: Path) -> bool:
    """Whether a drafter's `model` is the target's folder; none given means that it is."""
    return model is None or resolve(model, field="speculative_config: model").samefile(target)


def _refuse_model(settings: SpeculativeConfig) -> None:
    if settings.model is not None:
        raise ValueError(
            f"speculative_config: method={settings.method!r} has no checkpoint, but model={settings.model!r} is "
            "given: leave one of them out"
        )


def _refuse_quantization(settings: SpeculativeConfig) -> None:
    if settings.quantization is not None:
        instead = ", or give it to those of its drafters that have" if settings.drafters else ""
        raise ValueError(
            f"speculative_config: quantization={settings.quantization!r}: method={settings.method!r} has no checkpoint "
            f"whose weights could be rounded; leave it out{instead}"
        )
