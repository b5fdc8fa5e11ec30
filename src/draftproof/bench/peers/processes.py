"""The parent's side of engine processes, and processes that keep a processor busy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from draftproof.bench.peers.engine import Ids, Reach, Spec

WORKER = (sys.executable, "-m", "draftproof.bench.peers.worker")
# Ends when its parent ends, however that happens.
BUSY = (
    sys.executable,
    "-S",
    "-c",
    "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))",
)
LOAD_SECONDS = CALL_SECONDS = 600.0  # time limits


class EngineFailedError(Exception):
    """An engine raised, died or exceeded its time limit; the text says which, in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Result of `generate`: ids and seconds per batch, and the total processor time."""

    outputs: list[Ids]
    seconds: list[float]
    cpu_seconds: float


class EngineProcess:
    """One engine in its own process. `ways`, `version`, `settings` and `weight_bytes`: see `Engine`."""

    def __init__(self, name: str, spec: Spec, command: Sequence[str] = WORKER) -> None:
        """Start the process and wait until the model is loaded; raises EngineFailedError if that fails."""
        self.name = name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        threads = str(spec.num_threads)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            answer = self._ask(LOAD_SECONDS, do="load", spec=dataclasses.asdict(spec))
        except BaseException:
            self.close()
            raise
        self.version: str = answer["version"]
        self.settings: dict[str, Any] = answer["settings"]
        self.ways: dict[str, Reach] = answer["ways"]
        self.weight_bytes: float | None = answer["weight_bytes"]

    def generate(
        self, batches: Sequence[Ids], num_new: int, way: str = "", limit_s: float = CALL_SECONDS
    ) -> Answer:
        """Generate `num_new` ids for each prompt, one batch after the other."""
        found = self._ask(limit_s, do="generate", batches=list(batches), num_new=num_new, way=way)
        return Answer(found["outputs"], found["seconds"], found["cpu_seconds"])

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the process, which has no state to save."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, limit_s: float, **message: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise EngineFailedError(f"its process ended{self._last_words()}") from None
        if not select.select([stdout], [], [], limit_s)[0]:
            self._process.kill()
            self._process.wait()
            raise EngineFailedError(f"took more than {limit_s:.0f} s")
        line = stdout.readline()
        if not line:
            raise EngineFailedError(f"its process ended{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailedError(answer["error"])
        return answer

    def _last_words(self) -> str:
        """Exit status and last printed line."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        status = self._process.wait()
        return f" with status {status}" + (f" ({lines[-1][:200]})" if lines else "")


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[int]]:
    """Context manager with the ids of `count` single-threaded processes that compute until the end."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
