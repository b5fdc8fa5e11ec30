"""What tests of commands share."""

from __future__ import annotations

import pytest

from draftproof.cli import options
from tests.cli.fake_llm import Engines


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """A fake engine in place of the real one."""
    made = Engines()
    monkeypatch.setattr(options, "make_llm", made.make)
    monkeypatch.setenv("COLUMNS", "200")
    return made
