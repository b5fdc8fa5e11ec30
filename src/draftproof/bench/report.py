"""A benchmark's results as files in one folder: results.json, and results.md for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Results = Mapping[str, Any]  # benchmark, settings, environment, memory, runs, against, notes, identical

COLUMNS = (
    ("run", "name", ""),
    ("batch", "batch_size", ""),
    ("req/s asked", "request_rate", "g"),
    ("tokens/s", "output_throughput", ".4g"),
    ("speed-up", "speedup", ".2f"),
    ("req/s", "request_throughput", ".3g"),
    ("goodput", "request_goodput", ".3g"),
    ("TTFT p50 ms", "median_ttft_ms", ".4g"),
    ("p99", "p99_ttft_ms", ".4g"),
    ("TPOT p50 ms", "median_tpot_ms", ".3g"),
    ("p99", "p99_tpot_ms", ".3g"),
    ("ITL p50 ms", "median_itl_ms", ".3g"),
    ("p99", "p99_itl_ms", ".3g"),
    ("tau", "spec_decode_acceptance_length", ".2f"),
    ("of roofline", "roofline_share", ".0%"),
    ("identical", "identical", ""),
)


def write(folder: Path, results: Results) -> None:
    """results.json and results.md, over what was there. ValueError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(results), indent=1, ensure_ascii=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        (folder / "results.md").write_text(markdown(results), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output-dir {folder}: cannot be written: {error}") from None


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes text, as `vllm bench` writes it."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def markdown(results: Results) -> str:
    """The whole page."""
    environment, settings = results["environment"], results["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"# draftproof bench {results['benchmark']}",
        "",
        f"{environment['device']}, {environment['dtype']}, model {settings['model']}, commit "
        f"{environment['commit'] or 'unknown'}, {environment['date']}; Python {environment['python']}, {versions}.",
        f"{settings['num_prompts']} prompts ({settings['prompts']}), {settings['output_len']} new tokens, temperature "
        f"{settings['temperature']:g}; drafter {settings['drafter'] or 'none'}.",
        "",
        *table(results["runs"]),
        "",
        identity(results),
        "",
        *_speculation(results["runs"]),
        *_splits(results["runs"]),
        *_against(results.get("against", [])),
        *(f"{line.replace('memory', f'memory ({name})', 1)}\n" for name, line in results["memory"].items()),
        *(f"Note: {note}\n" for note in results["notes"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(runs: Sequence[Record]) -> list[str]:
    """One line a run; columns that nothing stands in are left out."""
    columns = [c for c in COLUMNS if any(run.get(c[1]) is not None for run in runs)]
    rows = [[_cell(run.get(key), form) for _, key, form in columns] for run in runs]
    return _table([title for title, _, _ in columns], rows)


def identity(results: Results) -> str:
    """What the comparison of plain and speculative outputs rests on."""
    compared = sum(run["num_compared"] for run in results["runs"])
    different = sum(run["num_different"] for run in results["runs"])
    tokens = sum(run["total_output_tokens"] for run in results["runs"])
    accepted = sum(run.get("spec_decode_accepted_tokens", 0) for run in results["runs"])
    if results["identical"] is None:
        return "identical: no draft was accepted, so nothing is proved"
    verdict = "yes" if results["identical"] else f"NO, {different} differ"
    counts = f"{compared} outputs compared with plain ones; {tokens} tokens, {accepted} accepted drafts"
    return f"identical: {verdict} ({counts})"


def verdict(runs: Sequence[Record]) -> bool | None:
    """Whether all outputs were the plain ones; None where no draft was accepted, which proves nothing."""
    if any(run["num_different"] for run in runs):
        return False
    return True if any(run.get("spec_decode_accepted_tokens") for run in runs) else None


def title(run: Record) -> str:
    """Its name, and the rate at which requests came."""
    return (
        run["name"] if run["request_rate"] is None else f"{run['name']}, {run['request_rate']:g} requests/s"
    )


def _speculation(runs: Sequence[Record]) -> list[str]:
    drafting = [run for run in runs if "spec_decode_acceptance_length" in run]
    rows = [
        [
            title(run),
            str(run["batch_size"]),
            f"{run['spec_decode_acceptance_length']:.2f}",
            f"{run['median_acceptance_length']:.2f} ({run['min_acceptance_length']:.2f} to "
            f"{run['max_acceptance_length']:.2f})",
            " ".join(f"{share:.2f}" for share in run["spec_decode_per_position_acceptance_rates"]),
        ]
        for run in drafting
    ]
    titles = [
        "run",
        "batch",
        "tau, all rounds",
        "tau by request: median (range)",
        "accepted at draft 1, 2, ...",
    ]
    return ["## Acceptance", "", *_table(titles, rows), ""] if rows else []


def _splits(runs: Sequence[Record]) -> list[str]:
    known = [run for run in runs if run["time_split"]]
    rows = [
        [
            title(run),
            str(run["batch_size"]),
            *(f"{run['time_split'][part]:.0%}" for part in ("verify", "draft", "host")),
        ]
        for run in known
    ]
    if not rows:
        return []
    titles = ["run", "batch", "target and verify", "draft", "host"]
    return [f"## Where the time goes ({known[0]['time_split']['method']})", "", *_table(titles, rows), ""]


def _against(rows: Sequence[Record]) -> list[str]:
    if not rows:
        return []
    cells = [
        [
            row["name"],
            str(row["batch_size"]),
            f"{row['output_throughput']:.4g}",
            f"{row['plain_over_it']:.2f}",
            f"{row['num_identical']} of {row['num_compared']}",
        ]
        for row in rows
    ]
    titles = ["run", "batch", "tokens/s", "draftproof plain / it", "outputs with our ids"]
    return ["## Against transformers, same weights", "", *_table(titles, cells), ""]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, form) if form else str(value)
