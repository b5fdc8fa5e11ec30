"""Engines in processes of their own, as their parent sees them, and programs that keep a processor busy."""

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
# It ends with whoever started it, however that ended.
BUSY = (
    sys.executable,
    "-S",
    "-c",
    "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))",
)
LOAD_SECONDS = CALL_SECONDS = 600.0  # most that one may take


class EngineFailedError(Exception):
    """An engine raised, died or took too long; the text says which, in one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What `generate` gave: by batch, ids and seconds; and the processor time of all."""

    outputs: list[Ids]
    seconds: list[float]
    cpu_seconds: float


class EngineProcess:
    """One engine in a process of its own. `ways`, `version`, `settings` and `weight_bytes`: see `Engine`."""

    def __init__(self, name: str, spec: Spec, command: Sequence[str] = WORKER) -> None:
        """Starts it and waits until the model is loaded; raises EngineFailedError where it cannot be."""
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
        """`num_new` ids for each prompt, one batch after the other."""
        found = self._ask(limit_s, do="generate", batches=list(batches), num_new=num_new, way=way)
        return Answer(found["outputs"], found["seconds"], found["cpu_seconds"])

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it: at once, since it keeps nothing."""
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
        """What it printed last, and how it ended."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        status = self._process.wait()
        return f" with status {status}" + (f" ({lines[-1][:200]})" if lines else "")


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[int]]:
    """The ids of `count` processes of one thread each that compute without end."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
