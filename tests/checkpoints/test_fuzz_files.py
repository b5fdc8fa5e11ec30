"""Broken files, a sample of those that `python -m tests.checkpoints.fuzz_files` makes."""

from __future__ import annotations

from tests.checkpoints import fuzz_files
from tests.slow import slow

pytestmark = slow

NUM_CASES = 100


def test_a_broken_file_is_one_line_or_changes_nothing() -> None:
    found = fuzz_files.run(range(NUM_CASES), seed=0)
    assert len(found) == NUM_CASES
    bad = [case for case in found if case[2] not in fuzz_files.GOOD]
    assert not bad, "\n".join(map(str, bad))
    verdicts = {(kind, verdict) for _, kind, verdict, _ in found}
    assert {(kind, "error") for kind in fuzz_files.KINDS} <= verdicts, verdicts


def test_a_case_that_hangs_is_told_of() -> None:
    long = 9  # this one decodes
    ((number, _, verdict, what),) = fuzz_files.run([long], seed=0, limit=1e-4)
    assert (number, verdict) == (long, "too much") and "Timeout" in what
