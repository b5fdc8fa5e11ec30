"""Marks the async tests of `test_ahead.py` as slow, except those of one head."""

from __future__ import annotations

import pytest

from tests.slow import slow

FUNCTIONS = ("test_running_ahead_changes_nothing", "test_whole_steps_serve_a_batch_smaller_than_the_bucket")
KEPT = ("eagle3-preempted", "eagle3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, _, case = item.name.rstrip("]").partition("[")
        if item.path.name == "test_ahead.py" and name in FUNCTIONS and case not in KEPT:
            item.add_marker(slow)
