"""What these tests share with those of the other operators."""

from __future__ import annotations

from tests.operator_fixtures import library as library
from tests.operator_fixtures import one_thread as one_thread
from tests.operator_fixtures import table as table
from tests.operator_fixtures import threads as threads
