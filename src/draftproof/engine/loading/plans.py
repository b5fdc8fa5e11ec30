"""Plans the drafters of a speculative_config and how many drafts each proposes; checks all before any is built."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from draftproof.checkpoints import detect, in_target
from draftproof.config import ENGINE_WIDE, SpeculativeConfig
from draftproof.drafters import registry, vllm_names
from draftproof.drafters.context import DraftCheckpoint
from draftproof.models.loading import resolve
from draftproof.models.weights import WeightSource
from draftproof.schema import did_you_mean, shown

_OF_CHECKPOINTS = (
    "quantization",
    "image_inputs",
    "revision",
    "load_format",
    "parallel_drafting",
    "hf_overrides",
)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One drafter to build; a chain has several. `num_drafts`: maximum that it proposes; `inner`: drafters that it
    runs itself."""

    method: str
    checkpoint: DraftCheckpoint | None
    settings: SpeculativeConfig
    num_drafts: int
    inner: tuple[DraftPlan, ...] = ()

    @property
    def identity(self) -> str:
        """Key of measured draft times: what they depend on."""
        shape = self.checkpoint and self.checkpoint.settings
        return repr((self.method, self.num_drafts, shape, self.settings, [p.identity for p in self.inner]))


@dataclass(frozen=True, slots=True)
class Files:
    """Where draft checkpoints are read from. `target`: the target's folder; `random`: weights used in place of files if
    `load_format` is "dummy" (the drafter's own setting, else this one, the engine's); `overrides`: keys that replace
    those of the target's config.json."""

    target: Path
    random: WeightSource
    load_format: Literal["auto", "gguf", "dummy"] = "auto"
    overrides: Mapping[str, Any] | None = None

    def weights(self, settings: SpeculativeConfig) -> WeightSource | None:
        """Random weights for a drafter with these settings; None: read the checkpoint's files."""
        return self.random if (settings.load_format or self.load_format) == "dummy" else None


def draft_plans(settings: SpeculativeConfig, files: Files) -> list[DraftPlan]:
    """One plan, or for a chain one per member. A plan's K is the user's for this drafter, else the checkpoint's, else
    the method's; a chain's K limits its members'. ValueError for settings that make no sense."""
    settings = vllm_names.named(settings)
    if settings.method == registry.CHAIN:
        return _chain(settings, files)
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
        # inner drafters are run for their cost only, so by default they make as many drafts as are asked of the method
        members = tuple(_members(settings, files, settings.num_speculative_tokens))
        own = max((m.num_drafts for m in members), default=None)
        return [_plan(settings.method, None, settings, own, members)]
    if method and method.may_be_in_target and _is_target(settings, files.target):
        _refuse_given(settings, ("hf_overrides",), "is in the target's files, whose hf_overrides hold")
        checkpoint = in_target.read(files.target, files.weights(settings), files.overrides)
        return [_plan(checkpoint.method, checkpoint, settings, checkpoint.num_drafts)]
    if settings.model is None:
        _refuse_nothing(settings)
    checkpoint = detect.read(_folder(settings), files.weights(settings), settings.hf_overrides)
    if not vllm_names.accepts(settings.method, checkpoint.method):
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
    options = registry.own_options(method, settings.options)
    if checkpoint is None:
        _refuse_settings_of_checkpoints(settings)
    row = registry.METHODS.get(method)
    if not registry.is_custom(method):
        _refuse_given(settings, ("trusted",), "is the package's own")
    if settings.parallel_drafting and not (row and row.parallel):
        raise ValueError(
            f"speculative_config: parallel_drafting=True: method={method!r} drafts one token after another; leave it "
            "out, or give a checkpoint that was trained with mask tokens"
        )
    default = registry.default_drafts(method, is_auto=settings.is_auto)
    number = settings.num_speculative_tokens or own or default
    return DraftPlan(method, checkpoint, replace(settings, options=options), number, inner)


def _chain(settings: SpeculativeConfig, files: Files) -> list[DraftPlan]:
    if not settings.drafters:
        raise ValueError(
            "speculative_config: method='chain' needs drafters=[{...}, {...}], tried in this order"
        )
    _refuse_model(settings)
    _refuse_settings_of_checkpoints(settings)
    _refuse_given(settings, ("trusted",), "is the package's own")
    registry.own_options(registry.CHAIN, settings.options)
    return [_within(member, settings) for member in _members(settings, files)]


def _within(member: DraftPlan, chain: SpeculativeConfig) -> DraftPlan:
    """The member's plan, with its number of drafts and `max_model_len` limited to the chain's."""
    num_drafts = min(member.num_drafts, chain.num_speculative_tokens or member.num_drafts)
    limits = [x for x in (member.settings.max_model_len, chain.max_model_len) if x is not None]
    settings = replace(member.settings, max_model_len=min(limits, default=None))
    return replace(member, num_drafts=num_drafts, settings=settings)


def _members(settings: SpeculativeConfig, files: Files, num_drafts: int | None = None) -> list[DraftPlan]:
    """Plans of the `drafters` entries. `num_drafts`: K of those that name none."""
    found: list[DraftPlan] = []
    for i, raw in enumerate(settings.drafters):
        try:
            member = replace(_member(raw, num_drafts), policy="adaptive" if settings.is_auto else "fixed")
            found += draft_plans(member, files)
        except ValueError as error:  # name the member in the message
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


def _folder(settings: SpeculativeConfig) -> Path:
    """The folder of the draft checkpoint."""
    assert settings.model is not None
    return resolve(
        settings.model,
        settings.revision,
        field="speculative_config: model",
        load_format=settings.load_format or "auto",
    )


def _is_target(settings: SpeculativeConfig, target: Path) -> bool:
    """Whether a drafter's `model` is the target's folder, which is the default."""
    return settings.model is None or _folder(settings).samefile(target)


def _refuse_nothing(settings: SpeculativeConfig) -> NoReturn:
    """ValueError for settings without a checkpoint, of which a key may be a misspelt `method` or `model`."""
    if settings.method is not None:
        raise ValueError(
            f"speculative_config: method={settings.method!r} without model: give the checkpoint's folder or hub id"
        )
    for key in settings.options:
        hint = did_you_mean(key, ("method", "model"))
        if hint:
            raise ValueError(f"speculative_config: unknown key {key!r}: {hint}")
    raise ValueError("speculative_config: give 'method' (such as 'ngram') or 'model' (a draft checkpoint)")


def _refuse_model(settings: SpeculativeConfig) -> None:
    if settings.model is not None:
        raise ValueError(
            f"speculative_config: method={settings.method!r} has no checkpoint, but model={settings.model!r} is "
            "given: leave one of them out"
        )


def _refuse_settings_of_checkpoints(settings: SpeculativeConfig) -> None:
    _refuse_given(settings, _OF_CHECKPOINTS, "has no checkpoint")


def _refuse_given(settings: SpeculativeConfig, keys: Sequence[str], why: str) -> None:
    """ValueError for the first of `keys` that has a value; `why` the method cannot use it."""
    for key in keys:
        value = getattr(settings, key)
        if value not in (None, False, {}):
            instead = ", or give it to those of its drafters that have" if settings.drafters else ""
            raise ValueError(
                f"speculative_config: {key}={shown(value)}: method={settings.method!r} {why}; leave it out{instead}"
            )
