"""The draft methods there are. Adding one is a file in this folder and a row here."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from draftproof.config import parse_options, reject_unknown_keys
from draftproof.drafters import (
    custom,
    dflash,
    dflash2,
    draft_model,
    dspark,
    eagle1,
    eagle3,
    mtp,
    pard,
    peagle,
    replay,
    suffix,
    xpress,
)
from draftproof.drafters.base import Drafter
from draftproof.drafters.build import DraftBuild
from draftproof.drafters.ngram import NgramDrafter, NgramOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One row. `needs_model`: the method has a checkpoint; `runs_others`: it takes `drafters`; `default_drafts` where
    neither user nor checkpoint says."""

    build: Callable[[DraftBuild], Drafter]
    needs_model: bool = True
    runs_others: bool = False
    default_drafts: int = 5


def _build_ngram(given: DraftBuild) -> Drafter:
    return NgramDrafter(parse_options("speculative_config", given.options, NgramOptions))


def _without_options(build: Callable[[DraftBuild], Drafter]) -> Callable[[DraftBuild], Drafter]:
    def checked(given: DraftBuild) -> Drafter:
        known = ["method", "model", "num_speculative_tokens", "policy", "max_faults", "time_limit"]
        reject_unknown_keys("speculative_config", given.options, known)
        return build(given)

    return checked


METHODS: dict[str, Method] = {
    "ngram": Method(build=_build_ngram, needs_model=False, default_drafts=4),
    "draft_model": Method(build=draft_model.build),
    "eagle": Method(build=_without_options(eagle1.build)),
    "eagle3": Method(build=_without_options(eagle3.build)),
    "mtp": Method(build=_without_options(mtp.build)),
    "replay": Method(build=replay.build, needs_model=False, runs_others=True),
    "peagle": Method(build=_without_options(peagle.build)),
    "pard": Method(build=_without_options(pard.build)),
    "dflash": Method(build=_without_options(dflash.build)),
    "dspark": Method(build=dspark.build),
    "dflash2": Method(build=_without_options(dflash2.build)),
    "xpress": Method(build=_without_options(xpress.build)),
    "suffix": Method(build=suffix.build, needs_model=False, default_drafts=16),
}
CHAIN = "chain"  # its members are methods of their own: the engine's builder puts it together


def is_custom(method: str) -> bool:
    """A dotted name is a user's class."""
    return "." in method


def check(method: str) -> None:
    """ValueError for a method that does not exist, with the nearest that does."""
    names = [*METHODS, CHAIN]
    if method in names or is_custom(method):
        return
    near = difflib.get_close_matches(method, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}, or 'package.module.Class'"
    raise ValueError(f"speculative_config: method={method!r}: {hint}")


def build(method: str, given: DraftBuild) -> Drafter:
    """A drafter of a method that `check` let pass."""
    if is_custom(method):
        return custom.load(method, given)
    return METHODS[method].build(given)
