"""Shared by scripts that measure or check an engine in stages: flags, the order of stages, the log of checks."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftproof.bench.harness import free_memory


def parser(doc: str | None, stages: Sequence[str]) -> argparse.ArgumentParser:
    """The flags of every script."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--device", default="cuda", help="cuda or cpu")
    found.add_argument("--quick", action="store_true", help="small sizes: tries the script, proves little")
    found.add_argument("--models", type=Path, help="folder with small, small-eagle3 and so on")
    found.add_argument("--stages", default=",".join(stages), help=f"of {','.join(stages)}; default: all")
    return found


@dataclass
class CheckLog:
    """Prints and counts checks, one line each."""

    num_passed: int = 0
    failed: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        print(f"       {text}", flush=True)

    def check(self, name: str, ok: bool, detail: str) -> None:
        print(f"{'ok    ' if ok else 'FAILED'} {name}: {detail}", flush=True)
        if ok:
            self.num_passed += 1
        else:
            self.failed.append(name)

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Context manager that turns an exception into a failed check, so that later stages still run."""
        try:
            yield
        except Exception:
            self.check(name, False, f"raised\n{traceback.format_exc(limit=-6)}")

    def finish(self) -> int:
        """Print the summary; returns the exit status."""
        for name in self.failed:
            print(f"failed: {name}")
        print(f"{self.num_passed} checks passed, {len(self.failed)} failed", flush=True)
        return 1 if self.failed or not self.num_passed else 0


def run_stages(log: CheckLog, wanted: str, stages: Mapping[str, Callable[[], object]]) -> int:
    """Run every wanted stage, then print the summary; returns the exit status. ValueError for an unknown name."""
    names = wanted.split(",")
    unknown = [name for name in names if name not in stages]
    if unknown:
        raise ValueError(f"--stages: {unknown[0]!r}: choose from {', '.join(stages)}")
    for name in names:
        start = time.perf_counter()
        print(f"== {name}", flush=True)
        with log.guard(name):
            stages[name]()
        free_memory()
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return log.finish()


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def describe(device: str) -> str:
    """The machine, for a report's header."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}"
