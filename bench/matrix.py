"""The published cells of adaptive speculation, each drafter in its own process on its own cores.

`rows` runs them and returns the rows of `bench/adaptive.py`; `table` formats them for docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

NAMES = ("cpu",)
CORES_EACH = 2
PREDICTED_WITHIN = 0.10
MEASURED_SECONDS = 10.0  # least time for what a prediction is compared with
# times as many turns, when a cell that has failed is measured again, or as many seconds if its prediction was off
AGAIN = 4
VLLM, SGLANG = "auto/vLLM's", "auto/SGLang's"
MODELS = Path(os.environ.get("DRAFTPROOF_MODELS", "../shared/models"))  # `small` and its heads, if present
DATA, ASSETS = Path("tests/data"), Path("src/draftproof/assets")
CHAIN = [{"method": "suffix"}, {"model": str(ASSETS / "tiny-eagle3")}]

Drafters = dict[str, dict[str, Any]]
# (arguments of a process, a row of it) -> arguments
Again = Callable[[Sequence[str], dict[str, Any]], list[str]]


def heads(folder: Path, prefix: str) -> Drafters:
    """The heads in a folder, by their names without the prefix."""
    return {
        path.name.removeprefix(prefix): {"model": str(path)} for path in sorted(folder.glob(f"{prefix}*"))
    }


def tiny() -> Drafters:
    return {
        "n-gram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        "draft model": {"model": str(DATA / "draft")},
        "eagle3": {"model": str(ASSETS / "tiny-eagle3")},
        "mtp": {"model": str(DATA / "tiny-mtp")},
        "dflash": {"model": str(DATA / "tiny-dflash")},
        **heads(DATA / "heads", "tiny-"),
        "chain": {"method": "chain", "drafters": CHAIN},
    }


def small() -> Drafters:
    chain = [{"method": "suffix"}, {"model": str(MODELS / "small-eagle3")}]
    return {
        **heads(MODELS, "small-"),
        "n-gram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        "chain": {"method": "chain", "drafters": chain},
    }


def processes() -> Iterator[tuple[str, list[str]]]:
    """(name, arguments) of each process, the longest first."""
    models = {"small": (MODELS / "small", small()), "tiny": (ASSETS / "tiny", tiny())}
    for model, (path, drafters) in models.items():
        if not path.is_dir():
            print(f"{path} is missing: no cells of {model}", file=sys.stderr)
            continue
        for name, config in drafters.items():
            drafter = ["--model", str(path), "--drafter", json.dumps(config), "--waves", "1"]
            yield f"{model}, {name}", [*drafter, "--batches", "64,16,4", "--seconds", "9"]
            # one request at a time has the fewest tokens per turn, and needs the most turns
            alone = [*drafter, "--batches", "1", "--seconds", "25", "--num-turns", "24"]
            yield f"{model}, {name}, alone", alone
            if name == "eagle3":
                never = [*drafter, "--batches", "1,4,16,64", "--rates", "0", "--seconds", "8"]
                yield f"{model}, {name}, never right", never
            if name in ("eagle3", "n-gram"):
                changing = [*drafter, "--batches", "1,4", "--changing", "--num-turns", "18"]
                yield f"{model}, {name}, changing text", changing


def rows(
    name: str, num_jobs: int, program: str, only: str = "", *, predictions: bool = False
) -> list[dict[str, Any]]:
    """The rows of all cells, `num_jobs` processes at a time, each on two cores of its own. `only`: of processes in
    whose names this regular expression is found. Cells that fail are measured again, unless an output differs: chance
    changes none. Predictions that are off, too. `predictions`: nothing but these."""
    assert name in NAMES
    mine = _apart(os.sched_getaffinity(0), num_jobs * CORES_EACH)
    free: queue.Queue[set[int]] = queue.Queue()
    for number in range(num_jobs):
        cores = set(mine[number * CORES_EACH : (number + 1) * CORES_EACH])
        if not cores:
            raise SystemExit(
                f"--jobs={num_jobs}: {len(mine)} cores are for {len(mine) // CORES_EACH} at most"
            )
        free.put(cores)

    def run(named: tuple[str, list[str]]) -> list[dict[str, Any]]:
        cores = free.get()
        try:
            return _run(program, *named, cores)
        finally:
            free.put(cores)

    with ThreadPoolExecutor(num_jobs) as pool:
        chosen = {name: arguments for name, arguments in processes() if re.search(only, name)}
        if predictions:
            chosen = {
                name: [*given, "--predictions"] for name, given in chosen.items() if "--changing" not in given
            }
        found = [row for some in pool.map(run, chosen.items()) for row in some]

        def again(rows: list[dict[str, Any]], arguments: Again) -> list[dict[str, Any]]:
            """These rows, measured again with those arguments."""
            named = [(row["cell"], arguments(chosen[row["cell"]], row)) for row in rows]
            return [row for (row,) in pool.map(run, named)]

        failed = [row for row in found if row["same"] and not is_fast(row)]
        print(f"{len(failed)} of {len(found)} cells are measured again", flush=True)
        found = _with(found, failed, map(_replaced, failed, again(failed, _again)))
        off = [row for row in found if row["same"] and not is_predicted(row)]
        print(f"{len(off)} predictions are measured again", flush=True)
        return _with(found, off, map(_predicted_again, off, again(off, _longer)))


def _with(
    rows: list[dict[str, Any]], old: list[dict[str, Any]], new: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows, with the `new` ones in place of those `old` ones."""
    replaced = dict(zip(map(id, old), new, strict=True))
    return [replaced.get(id(row), row) for row in rows]


def _apart(cores: Iterable[int], num_needed: int) -> list[int]:
    """These cores, in an order in which each of the first `num_needed` is a processor's core of its own, if there are
    so many; else those that share one are neighbours. Example: 0 and 1 share one, 2 and 3 another: 0, 2, 1, 3 for two
    of them."""
    shared: dict[str, list[int]] = {}
    for core in sorted(cores):
        file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        name = file.read_text().strip() if file.is_file() else str(core)
        shared.setdefault(name, []).append(core)
    if len(shared) < num_needed:
        return [core for together in shared.values() for core in together]
    threads = itertools.zip_longest(*shared.values())
    return [core for some in threads for core in some if core is not None]


def _again(arguments: Sequence[str], row: dict[str, Any]) -> list[str]:
    """The arguments to measure this row's cell alone and for longer; of options that are repeated the last counts."""
    longer = [*arguments, "--batches", str(row["batch"]), "--num-turns", str(AGAIN * row["num_turns"])]
    return [*longer, "--seconds", "inf"]


def _longer(arguments: Sequence[str], row: dict[str, Any]) -> list[str]:
    """The arguments to measure this row's prediction alone and for longer; where the text changes first, all of it."""
    alone = [] if "--changing" in arguments else ["--predictions"]
    seconds = str(AGAIN * MEASURED_SECONDS)
    return [*arguments, "--batches", str(row["batch"]), *alone, "--measured-seconds", seconds]


def _replaced(row: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    return {**later, "first_ratios": row["ratios"]}


def _predicted_again(row: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The row with what is predicted and measured later, unless no drafts are predicted then: they were, and that was
    off."""
    first = {"first_predicted": (row["predicted"], row["measured"])}
    if row["predicted_k"] and not later["predicted_k"]:
        return row | first
    found = {name: later[name] for name in ("predicted_k", "predicted", "measured", "same")}
    return {**row, **found, **first}


def _run(program: str, name: str, arguments: Sequence[str], cores: set[int]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, program, *arguments, "--json", str(file)]
        pin = partial(os.sched_setaffinity, 0, cores)
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=pin, check=False)
        if not file.is_file():
            raise SystemExit(f"{name}: {' '.join(command)}\n{done.stdout}{done.stderr}")
        print(done.stdout, flush=True)
        found: list[dict[str, Any]] = json.loads(file.read_text())
    return [{**row, "cell": name} for row in found]


def holds(row: dict[str, Any]) -> bool:
    """Whether the outputs are equal, no interval is below its bound, if there are any, and the prediction is right."""
    return bool(row["same"] and is_fast(row) and is_predicted(row))


def is_fast(row: dict[str, Any]) -> bool:
    """Whether no interval is below its bound."""
    return all(r["ok"] for r in row.get("ratios", {}).values())


def is_predicted(row: dict[str, Any]) -> bool:
    return abs(row["predicted"] / row["measured"] - 1.0) <= PREDICTED_WITHIN


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All cells: ratios to plain decoding, to the best fixed number and to the rules; predicted and measured."""
    if rows and "ratios" not in rows[0]:
        lines = [f"| {row['cell']} | {row['batch']} | {_predicted(row)} |" for row in rows]
        return "\n".join(["| cell | batch | predicted / measured |\n|---|---|---|", *lines])
    head = (
        "| cell | batch | turns | auto to plain | new to plain | auto to best fixed | auto to vLLM's, SGLang's "
        "| predicted / measured | holds |\n|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *map(_line, rows)])


def _predicted(row: dict[str, Any]) -> str:
    shown = f"{row['predicted']:.2f} / {row['measured']:.2f} (K={row['predicted_k']})"
    if "first_predicted" in row:
        shown += ", first {:.2f} / {:.2f}".format(*row["first_predicted"])
    return shown + ("" if is_predicted(row) else " **off**")


def _line(row: dict[str, Any]) -> str:
    ratios = row["ratios"]
    best = next(name for name in ratios if name.startswith("auto/best"))

    def shown(name: str) -> str:
        r = ratios[name]
        return f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]{'' if r['ok'] else ' **fails**'}"

    columns = (
        row["cell"],
        str(row["batch"]),
        str(row["num_turns"]) + (", again" if "first_ratios" in row else ""),
        shown("auto/plain"),
        shown("new/plain"),
        f"{shown(best)} {best.removeprefix('auto/best ')}",
        f"{shown(VLLM)}, {shown(SGLANG)}",
        _predicted(row),
        "yes" if holds(row) else "no",
    )
    return f"| {' | '.join(columns)} |"
