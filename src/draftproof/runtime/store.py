"""The on-disk store shared by processes: certificates, choices, costs."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Store:
    """A JSON object on disk that processes add to. Unreadable contents count as absent."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        try:
            raw = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return raw if isinstance(raw, dict) else {}

    def add(self, entries: Mapping[str, Any]) -> None:
        """Add entries atomically. If the folder is not writable, warn once: the next start then repeats the work."""
        temporary = self._path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({**self.read(), **entries}, indent=1))
            os.replace(temporary, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            warnings.warn(
                f"{self._path.parent}: cannot be written ({error.strerror}), so operators are compiled and certified "
                "again at every start; set XDG_CACHE_HOME to a folder that can be written",
                stacklevel=1,  # one place, so it is shown once
            )
