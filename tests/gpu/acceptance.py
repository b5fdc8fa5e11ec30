"""Acceptance of trained heads in fp32 against that of an independent reference implementation.

PYTHONPATH=src:. python tests/gpu/acceptance.py --models DIR
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from draftproof.bench.stages import CheckLog, describe, parser, run_stages
from tests.drafters import golden


def stage(log: CheckLog, head: str, device: str, folder: Path | None) -> None:
    found = golden.folders(head, folder)
    if found is None:
        raise ValueError(f"--models: {head!r} is not in {folder}; give the folder that holds it")
    start = time.perf_counter()
    measured, expected = golden.measure(*found, device=device)
    for key, value in expected.items():
        took = f"{time.perf_counter() - start:.0f} s"
        log.check(f"{head} {key}", measured[key] == value, f"{measured[key]}, golden {value}; {took}")


def main() -> int:
    given = parser(__doc__, golden.SUPPORTED).parse_args()
    print(describe(given.device), flush=True)
    log = CheckLog()
    stages = {
        head: (lambda head=head: stage(log, head, given.device, given.models)) for head in golden.SUPPORTED
    }
    wanted = "tiny-eagle3" if given.quick and given.stages == ",".join(stages) else given.stages
    return run_stages(log, wanted, stages)


if __name__ == "__main__":
    sys.exit(main())
