"""A user's own drafter, named as "package.module.Class", or as "package.module.build" if it needs the target."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftproof.drafters import vllm_proposer
from draftproof.drafters.base import Drafter, DraftSpec
from draftproof.drafters.contained import DrafterError, contained
from draftproof.drafters.context import DraftContext
from draftproof.drafters.users import TrustedDrafter, UsersDrafter
from draftproof.schema import is_whole

MOST_AHEAD = 1024  # tokens, or positions


def find(name: str) -> Any:
    """The class or function; ValueError if importing it fails, whatever its module raises. The current folder is
    importable, as it is for a script."""
    module_name, _, own_name = name.rpartition(".")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        with contained():
            return getattr(importlib.import_module(module_name), own_name)
    except DrafterError as fault:
        _name_vllm(name, fault)
        raise ValueError(
            f"speculative_config: method={name!r}: cannot be imported ({fault}); run in the folder that holds it, or "
            "put that on PYTHONPATH"
        ) from fault


def load(name: str, ctx: DraftContext) -> Drafter:
    """Find and build the drafter `name`, and check that it looks like a `Drafter`. ValueError names what is missing.

    A class gets the engine's config with its own `speculative_config`; a function gets `ctx` with that config, as this
    package's methods do, and returns the drafter. A class written for vLLM gets a config in vLLM's form.
    """
    maker = find(name)
    own_name = name.rpartition(".")[2]
    ctx = replace(ctx, config=replace(ctx.config, speculative_config=ctx.own))
    is_class = isinstance(maker, type)
    try:
        with contained():
            if vllm_proposer.is_proposer(maker):
                drafter: Any = vllm_proposer.load(name, maker, ctx)
            else:
                drafter = maker(ctx.config if is_class else ctx)
    except DrafterError as fault:
        _name_vllm(name, fault)
        argument = "config" if is_class else "given"
        raise ValueError(
            f"speculative_config: method={name!r}: {own_name}({argument}) raised {fault}"
        ) from fault
    try:
        with contained():
            wrong = _what_is_wrong(drafter)
            own_class = maker if is_class else type(drafter)
            kind = TrustedDrafter if ctx.own.trusted else UsersDrafter
            users = None if wrong else kind(drafter, own_class.__name__)
    except DrafterError as error:
        raise ValueError(f"speculative_config: method={name!r}: its spec raised {error}") from error
    if users is None:
        raise ValueError(f"speculative_config: method={name!r}: {wrong}")
    return users


def _name_vllm(name: str, fault: DrafterError) -> None:
    """Raise ValueError if the user's code failed because vLLM is not installed."""
    if fault.__cause__ is not None and vllm_proposer.needs_vllm(fault.__cause__):
        raise ValueError(vllm_proposer.advice(name)) from fault


def _what_is_wrong(drafter: Any) -> str:
    if not callable(getattr(drafter, "propose", None)):
        return "has no method propose(verified, num_drafts)"
    if not isinstance(getattr(drafter, "spec", None), DraftSpec):
        return (
            f"needs an attribute spec = DraftSpec(...), or a method propose({', '.join(vllm_proposer.POSITIONAL)}, "
            f"{vllm_proposer.NAMED[0]}=None) as vLLM calls it"
        )
    for name in ("reads_ahead", "lookahead"):
        number = getattr(drafter.spec, name)
        if not is_whole(number, 0, MOST_AHEAD):
            return f"spec.{name}={number!r}: must be an integer from 0 to {MOST_AHEAD}"
    if drafter.spec.borrow:
        return (
            f"spec.borrow={drafter.spec.borrow}: the target's keys and values are lent to methods of this package "
            "only, since a write to them would change outputs; declare taps instead"
        )
    return ""
