"""A user's own drafter, named as "package.module.Class", or as "package.module.build" where it needs the target."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from draftproof.drafters import vllm_proposer
from draftproof.drafters.base import Drafter, DraftSpec
from draftproof.drafters.build import DraftBuild


def find(name: str) -> Any:
    """The class or function; ValueError where importing it fails, whatever its module raises. The current folder is
    importable, as it is for a script."""
    module_name, _, own_name = name.rpartition(".")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), own_name)
    except Exception as error:
        if vllm_proposer.needs_vllm(error):
            raise ValueError(vllm_proposer.advice(name)) from error
        raise ValueError(
            f"speculative_config: method={name!r}: cannot be imported ({type(error).__name__}: {error}); run in the "
            "folder that holds it, or put that on PYTHONPATH"
        ) from error


def load(name: str, given: DraftBuild) -> Drafter:
    """Find it, build it, and check that it looks like a `Drafter`. Raises ValueError naming what is missing.

    A class gets the engine's config; a function gets `given`, as the methods of this package do, and returns the
    drafter. A class written for vLLM gets such a config as it expects.
    """
    maker, own_name = find(name), name.rpartition(".")[2]
    is_class = isinstance(maker, type)
    try:
        if vllm_proposer.is_proposer(maker):
            return vllm_proposer.load(name, maker, given)
        drafter = maker(given.config if is_class else given)
    except Exception as error:
        if vllm_proposer.needs_vllm(error):
            raise ValueError(vllm_proposer.advice(name)) from error
        argument = "config" if is_class else "given"
        raise ValueError(
            f"speculative_config: method={name!r}: {own_name}({argument}) raised {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(drafter, "propose", None)):
        raise ValueError(f"speculative_config: method={name!r}: has no method propose(verified, num_drafts)")
    if not isinstance(getattr(drafter, "spec", None), DraftSpec):
        raise ValueError(
            f"speculative_config: method={name!r}: needs an attribute spec = DraftSpec(...), or a method "
            f"propose({', '.join(vllm_proposer.POSITIONAL)}, {vllm_proposer.NAMED[0]}=None) as vLLM calls it"
        )
    if drafter.spec.borrow:
        raise ValueError(
            f"speculative_config: method={name!r}: spec.borrow={drafter.spec.borrow}: the target's keys and values are "
            "lent to methods of this package only, since a write to them would change outputs; declare taps instead"
        )
    return drafter
