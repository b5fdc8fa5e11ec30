"""Whether the library that trains heads is installed: without it its tests are skipped, with a message."""

from __future__ import annotations

import importlib.util

import pytest

_MISSING = [
    name for name in ("speculators", "hs_connectors", "loguru") if importlib.util.find_spec(name) is None
]
needs_library = pytest.mark.skipif(
    bool(_MISSING), reason=f"needs {', '.join(_MISSING)}: pip install 'draftproof[train]'"
)
