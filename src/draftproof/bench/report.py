"""A benchmark's results as files in one folder: JSON, a Markdown page, and plots if matplotlib is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.bench import plots
from draftproof.bench.figures import HOST_PARTS, title
from draftproof.bench.peers import MEMORY

Record = Mapping[str, Any]
Results = Mapping[str, Any]  # settings, environment, notes, rows of figures, and a benchmark's own entries
Column = tuple[str, str, str | Callable[[Any], str]]  # title, key, and format of the cells

MOST_POSITIONS = 5  # acceptance positions in the table of methods; methods.json has all
# Share of right answers below which scores are not shown: a score near 0 cannot show a drafter's effect.
WORTH_SHOWING = 0.1


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind of benchmark is shown. `stem`: of its files' names; `rows`: key of its figures in the results."""

    stem: str
    rows: str
    page: Callable[[Results], str]
    draw: Callable[[Path, Sequence[Record]], list[str]]


def write(folder: Path, form: Form, results: Results) -> list[str]:
    """Write the files, replacing old ones; returns their names. ValueError if the folder cannot be written."""
    names = [f"{form.stem}.json", f"{form.stem}.md"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(results), indent=1, ensure_ascii=False)
        (folder / names[0]).write_text(text + "\n", encoding="utf-8")
        (folder / names[1]).write_text(form.page(results), encoding="utf-8")
        return names + (form.draw(folder, results[form.rows]) if plots.available() else [])
    except OSError as error:
        raise ValueError(f"--output-dir {folder}: cannot be written: {error}") from None


def _finite(value: Any) -> Any:
    """`value` with infinities and NaN as text, as in `vllm bench`, since JSON has none."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def table(columns: Sequence[Column], rows: Sequence[Record]) -> list[str]:
    """A Markdown table, one line per row; empty columns are left out."""
    cells = [[_cell(row.get(key), form) for row in rows] for _, key, form in columns]
    shown = [(title, own) for (title, _, _), own in zip(columns, cells, strict=True) if any(own)]
    lines = [[title for title, _ in shown], ["---"] * len(shown)]
    lines += [[own[i] for _, own in shown] for i in range(len(rows))]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _cell(value: Any, form: str | Callable[[Any], str]) -> str:
    if value is None:
        return ""
    if callable(form):
        return form(value)
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, form) if form else str(value)


def _section(heading: str, columns: Sequence[Column], rows: Sequence[Record]) -> list[str]:
    """A table with a heading; empty without rows."""
    return [f"## {heading}", "", *table(columns, rows), ""] if rows else []


def _page(results: Results, parts: Sequence[str]) -> str:
    return "\n".join([*parts, *(f"Note: {note}\n" for note in results["notes"])]).rstrip() + "\n"


def _shares(most: int | None) -> Callable[[Sequence[float]], str]:
    """A format for shares by position that shows the first `most`."""
    return lambda shares: (
        " ".join(f"{share:.2f}" for share in shares[:most]) + (" ..." if most and len(shares) > most else "")
    )


def identity(rows: Sequence[Record]) -> str:
    """The line on whether plain and speculative outputs are equal, and what that is based on."""
    if verdict(rows) is None:
        return "identical: no draft was accepted, so nothing is proved"
    drafting = [row for row in rows if row["num_speculative_tokens"]]
    different = list(dict.fromkeys(title(row) for row in rows if row["num_different"]))
    num_different = sum(row["num_different"] for row in rows)
    found = f"NO ({', '.join(different)}), {num_different} differ" if different else "yes"
    compared, tokens, accepted = (
        sum(row[key] for row in drafting) for key in ("num_compared", "num_tokens", "num_accepted")
    )
    counts = f"{compared} outputs compared with plain ones; {tokens} tokens, {accepted} accepted drafts"
    return f"identical: {found} ({counts})"


def verdict(rows: Sequence[Record]) -> bool | None:
    """Whether all outputs equal the plain ones; None if no draft was accepted, which proves nothing."""
    if any(row["num_different"] for row in rows):
        return False
    return True if any(row["num_accepted"] for row in rows) else None


def _host_time(rows: Sequence[Record]) -> list[str]:
    found = [
        {"run": title(row), "batch": row.get("batch_size"), **row["host_time"]}
        for row in rows
        if row["host_time"] is not None
    ]
    columns: list[Column] = [("run", "run", ""), ("batch", "batch", "")]
    columns += [(part, f"{part}_ms", ".3f") for part in HOST_PARTS]
    return _section("Host time of a decoding step, ms", columns, found)


# the sweeps

SWEEP_COLUMNS: tuple[Column, ...] = (
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
ACCEPTANCE_COLUMNS: tuple[Column, ...] = (
    ("run", "title", ""),
    ("batch", "batch_size", ""),
    ("tau, all rounds", "spec_decode_acceptance_length", ".2f"),
    ("tau by request: median (range)", "range", ""),
    ("accepted at draft 1, 2, ...", "spec_decode_per_position_acceptance_rates", _shares(None)),
)
SPLIT_COLUMNS: tuple[Column, ...] = (
    ("run", "title", ""),
    ("batch", "batch_size", ""),
    ("target and verify", "verify", ".0%"),
    ("draft", "draft", ".0%"),
    ("host", "host", ".0%"),
)
AGAINST_COLUMNS: tuple[Column, ...] = (
    ("engine", "name", ""),
    ("dtype", "dtype", ""),
    ("batch", "batch_size", ""),
    ("tokens/s", "output_throughput", ".4g"),
    ("draftproof / it", "plain_over_it", ".2f"),
    ("prompt and 2 tokens, ms", "prompt_ms", ".4g"),
    ("outputs with our ids", "same", ""),
    ("share of the read rate", "read_rate_share", ".0%"),
    ("foreign load", "foreign_load", ".0%"),
    ("most", "most_foreign_load", ".0%"),
)
BUSY_COLUMNS: tuple[Column, ...] = (
    ("engine", "name", ""),
    ("dtype", "dtype", ""),
    ("batch", "batch_size", ""),
    ("busy processes", "num_busy", ""),
    ("tokens/s", "output_throughput", ".4g"),
    ("of quiet", "of_quiet", ".2f"),
    ("of its fair share", "of_fair_share", ".2f"),
    ("rounds", "num_rounds", ""),
)


def sweep_page(results: Results) -> str:
    """The whole page of a sweep."""
    environment, settings, runs = results["environment"], results["settings"], results["runs"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    parts = [
        f"# draftproof bench {results['benchmark']}",
        "",
        f"{environment['device']}, {environment['dtype']}, model {settings['model']}, commit "
        f"{environment['commit'] or 'unknown'}, {environment['date']}; Python {environment['python']}, {versions}.",
        f"{settings['num_prompts']} prompts ({settings['prompts']}), {settings['output_len']} new tokens, temperature "
        f"{settings['temperature']:g}; drafter {settings['drafter'] or 'none'}.",
        "",
        *table(SWEEP_COLUMNS, runs),
        "",
        identity(runs),
        "",
        *_acceptance(runs),
        *_splits(runs),
        *_host_time(runs),
        *beside_others(results.get("against")),
        *(f"{line.replace('memory', f'memory ({name})', 1)}\n" for name, line in results["memory"].items()),
    ]
    return _page(results, parts)


def beside_others(found: Record | None) -> list[str]:
    """Comparison with other engines: two tables, and notes on how they were measured."""
    if found is None:
        return []
    rows = [
        row | {"same": f"{row['num_identical']} of {row['num_compared']}" if row["num_compared"] else None}
        for row in found["rows"]
    ]
    rates = [f"{rate / 1e9:.1f} GB/s beside {dtype}" for dtype, rate in found["bytes_per_second"].items()]
    known = [f"The machine reads {', '.join(rates)}.", ""] if rates else []
    engines = [
        f"{name} {engine['version']}: "
        + "; ".join(
            f"{dtype}: " + ", ".join(f"{key} {value}" for key, value in own.items())
            for dtype, own in engine["settings"].items()
        )
        + "\n"
        for name, engine in found["engines"].items()
        if name != MEMORY
    ]
    return [
        *_section("Beside other engines, same weights", AGAINST_COLUMNS, rows),
        *_section("Beside busy processes", BUSY_COLUMNS, found["busy"]),
        *known,
        *engines,
        *(f"Note: {note}\n" for note in found["notes"]),
    ]


def _acceptance(runs: Sequence[Record]) -> list[str]:
    drafting = [
        {
            **run,
            "title": title(run),
            "range": f"{run['median_acceptance_length']:.2f} ({run['min_acceptance_length']:.2f} to "
            f"{run['max_acceptance_length']:.2f})",
        }
        for run in runs
        if "spec_decode_acceptance_length" in run
    ]
    return _section("Acceptance", ACCEPTANCE_COLUMNS, drafting)


def _splits(runs: Sequence[Record]) -> list[str]:
    known = [
        {"title": title(run), "batch_size": run["batch_size"], **run["time_split"]}
        for run in runs
        if run["time_split"]
    ]
    method = known[0]["method"] if known else ""
    return _section(f"Where the time goes ({method})", SPLIT_COLUMNS, known)


# the methods

METHOD_COLUMNS: tuple[Column, ...] = (
    ("method", "name", ""),
    ("K", "num_speculative_tokens", lambda number: str(number or "")),
    ("tau", "tau", ".2f"),
    ("accepted at 1, 2, ...", "accepted_per_position", _shares(MOST_POSITIONS)),
    ("draft ms", "draft_ms", ".2f"),
    ("verify ms", "verify_ms", ".2f"),
    ("rest ms", "rest_ms", ".2f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("speed-up", "speedup", ".2f"),
    ("right", "right", ""),
    ("same answers", "same", ""),
)


def methods_page(results: Results) -> str:
    """The page of the methods: the table, and notes on how it was measured."""
    rows, s, e = results["methods"], results["settings"], results["environment"]
    parts = [
        f"# Draft methods on {results['model']}",
        "",
        *methods_table(rows),
        "",
        f"{s['num_prompts']} prompts, {s['batch_size']} at once, up to {s['max_tokens']} new tokens, temperature "
        f"{s['temperature']:g}, policy {s['policy']}, best of {s['repeats']}; {e['device']}, {e['dtype']}, "
        f"{e['threads']} threads, torch {e['versions']['torch']}, commit {e['commit'] or 'unknown'}.",
        "",
        identity(rows),
        "",
        *_host_time(rows),
    ]
    return _page(results, parts)


def methods_table(rows: Sequence[Record]) -> list[str]:
    """The table of the methods, one line each."""
    scores = any(row["num_right"] >= max(1, WORTH_SHOWING * row["num_asked"]) for row in rows)
    shown = [
        {
            **row,
            "right": f"{row['num_right']} of {row['num_asked']}" if scores else None,
            "same": f"{row['num_same']} of {row['num_outputs']}" if row["num_speculative_tokens"] else None,
        }
        for row in rows
    ]
    return table(METHOD_COLUMNS, shown)


SWEEP = Form("results", "runs", sweep_page, plots.draw_sweep)
METHODS = Form("methods", "methods", methods_page, plots.draw_methods)
