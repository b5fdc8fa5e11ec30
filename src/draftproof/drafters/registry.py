"""The table of draft methods. Adding one is a file in this folder and a row here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.config import SpeculativeConfig, parse_options
from draftproof.drafters import (
    custom,
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle1,
    eagle3,
    forced,
    gemma4,
    mtp,
    ngram,
    pard,
    peagle,
    replay,
    suffix,
    vllm_names,
    xpress,
)
from draftproof.drafters.base import Drafter
from draftproof.drafters.context import DraftContext
from draftproof.schema import did_you_mean, reject_unknown_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """The settings of a method that has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of the table. `options`: the dataclass of its own settings; `needs_model`: the method has a checkpoint, and
    `may_be_in_target`: it may be in the target's files; `runs_others`: it takes `drafters`; `parallel`: one pass drafts
    all tokens; `default_drafts`: K if neither user nor checkpoint sets it; `most_drafts`: the maximum if the engine
    chooses K."""

    build: Callable[[DraftContext], Drafter]
    options: type[Any] = NoOptions
    needs_model: bool = True
    may_be_in_target: bool = False
    runs_others: bool = False
    parallel: bool = False
    default_drafts: int = 5
    most_drafts: int | None = None


METHODS: dict[str, Method] = {
    "ngram": Method(
        build=ngram.build, options=ngram.NgramOptions, needs_model=False, default_drafts=4, most_drafts=16
    ),
    "draft_model": Method(build=draft_model.build, options=draft_model.DraftModelOptions),
    "eagle": Method(build=eagle1.build),
    "eagle3": Method(build=eagle3.build),
    "mtp": Method(build=mtp.build, may_be_in_target=True),
    "gemma4_mtp": Method(build=gemma4.build),
    "replay": Method(build=replay.build, options=replay.ReplayOptions, needs_model=False, runs_others=True),
    "peagle": Method(build=peagle.build, parallel=True),
    "pard": Method(build=pard.build, parallel=True),
    "dflash": Method(build=dflash.build, parallel=True),
    "dspark": Method(build=dspark.build, options=dspark.DSparkOptions, parallel=True),
    "dflash2": Method(build=dflash2.build, parallel=True),
    "xpress": Method(build=xpress.build, parallel=True),
    "ff": Method(build=forced.build, needs_model=False, default_drafts=8),
    "suffix": Method(build=suffix.build, options=suffix.SuffixOptions, needs_model=False, default_drafts=16),
}
CUSTOM_DRAFTS = 5  # default K of a user's class
CHAIN = "chain"  # not in the table: the engine's builder makes it from its members' methods


def is_custom(method: str) -> bool:
    """Whether the method is a user's class: a dotted name."""
    return "." in method


def default_drafts(method: str, *, is_auto: bool = False) -> int:
    """K if neither user nor checkpoint sets it; `is_auto`: the engine chooses K up to this."""
    if method not in METHODS:
        return CUSTOM_DRAFTS
    row = METHODS[method]
    return row.most_drafts if is_auto and row.most_drafts is not None else row.default_drafts


def check(method: str) -> None:
    """Raise ValueError for a method that does not exist (naming the nearest that does) or cannot be imported."""
    names = [*METHODS, CHAIN]
    if is_custom(method):
        custom.find(method)
    if method in names or is_custom(method):
        return
    hint = did_you_mean(method, names) or f"known: {', '.join(names)}, or 'package.module.Class'"
    raise ValueError(f"speculative_config: method={method!r}: {hint}")


def own_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own settings among `given`, after vLLM's keys are handled. A user's class gets the rest unchecked.

    ValueError for settings that the method does not have, or invalid values.
    """
    if is_custom(method):
        return vllm_names.read_options(given, None)
    kind = METHODS[method].options if method in METHODS else NoOptions
    own = [f.name for f in dataclasses.fields(kind)]
    options = vllm_names.read_options(given, own)
    fields = [f.name for f in dataclasses.fields(SpeculativeConfig) if f.name != "options"]
    reject_unknown_keys("speculative_config", options, [*own, *fields])
    parse_options("speculative_config", options, kind)
    return options


def build(method: str, ctx: DraftContext) -> Drafter:
    """A drafter of a method that `check` accepted."""
    if is_custom(method):
        return custom.load(method, ctx)
    return METHODS[method].build(ctx)
