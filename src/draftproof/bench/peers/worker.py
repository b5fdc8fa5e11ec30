"""The process of one engine: `python -m draftproof.bench.peers.worker` answers each JSON line on stdin with one.

    {"do": "load", "spec": {...}}                                        {"version", "settings", "ways",
                                                                          "weight_bytes"}
    {"do": "generate", "batches": [[ids, ...], ...], "num_new", "way"}   {"outputs", "seconds", "cpu_seconds"}

An exception is answered with {"error": "its type and first line"}. Between two lines the process blocks in a read.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from draftproof.bench.peers.engine import Engine, Spec

TOLD = ("version", "settings", "ways", "weight_bytes")  # attributes of an engine in the answer to "load"


def main() -> None:
    """Answer until stdin ends. Libraries' output goes to stderr, so that stdout has only answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    engine: Engine | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "load":
                engine = load(Spec(**asked["spec"]))
                answer = {field: getattr(engine, field) for field in TOLD}
            else:
                assert engine is not None, "load comes first"
                answer = generate(engine, asked)
        except Exception as error:  # a foreign library may raise anything
            answer = {"error": short(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def load(spec: Spec) -> Engine:
    """The engine described by `spec`, with its number of threads."""
    import torch

    torch.set_num_threads(spec.num_threads)
    module, _, name = spec.where.partition(":")
    made: Engine = getattr(importlib.import_module(module), name)(spec)
    return made


def generate(engine: Engine, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Run the batches in sequence: ids and seconds of each, and processor seconds of all."""
    start = time.process_time()
    results = [engine.generate(batch, asked["num_new"], asked["way"]) for batch in asked["batches"]]
    return {
        "outputs": [ids for ids, _ in results],
        "seconds": [seconds for _, seconds in results],
        "cpu_seconds": time.process_time() - start,
    }


def short(error: Exception) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines)[:300] or 'no reason given'}"


if __name__ == "__main__":
    main()
