"""Deprecated alias of `draftproof.frontend.llm`, kept for one version."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

warnings.warn(
    "draftproof.engine.llm: is draftproof.frontend.llm now; import LLM from draftproof",
    DeprecationWarning,
    stacklevel=2,
)
LLM: Any = importlib.import_module("draftproof.frontend.llm").LLM  # by name: engine may not import frontend
