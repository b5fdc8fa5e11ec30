"""A user's own drafter, named as "package.module.Class"."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from draftproof.config import EngineConfig
from draftproof.drafters.base import Drafter, DraftSpec


def load(name: str, config: EngineConfig) -> Drafter:
    """Import the class, build it with the engine's config, and check that it looks like a `Drafter`.

    The current folder is importable, as it is for a script. Raises ValueError naming what is missing.
    """
    module_name, _, class_name = name.rpartition(".")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"speculative_config: method={name!r}: cannot be imported ({error})") from error
    try:
        drafter = cls(config)
    except Exception as error:
        raise ValueError(
            f"speculative_config: method={name!r}: {class_name}(config) raised {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(drafter, "propose", None)):
        raise ValueError(f"speculative_config: method={name!r}: has no method propose(verified, num_drafts)")
    if not isinstance(getattr(drafter, "spec", None), DraftSpec):
        raise ValueError(f"speculative_config: method={name!r}: needs an attribute spec = DraftSpec(...)")
    return drafter
