"""Deprecated module name of `draftproof.drafters.context`, kept for one version."""

from __future__ import annotations

import warnings

from draftproof.drafters.context import DraftCheckpoint, DraftContext

__all__ = ["DraftBuild", "DraftCheckpoint"]

warnings.warn(
    "draftproof.drafters.build: is draftproof.drafters.context now, and DraftBuild is DraftContext",
    DeprecationWarning,
    stacklevel=2,
)
DraftBuild = DraftContext
