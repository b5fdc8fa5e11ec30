"""The comparison of draft methods as files: methods.json, methods.md, and methods.png where matplotlib is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.bench import plots

Record = Mapping[str, Any]
MOST_POSITIONS = 5  # in the table; methods.json has all
WORTH_SHOWING = (
    0.1  # share of right answers: a score near 0 says nothing of a drafter, since it can hardly fall
)

COLUMNS = (
    ("method", "name", ""),
    ("K", "num_speculative_tokens", ""),
    ("tau", "tau", ".2f"),
    ("accepted at 1, 2, ...", "accepted_per_position", ""),
    ("draft ms", "draft_ms", ".2f"),
    ("verify ms", "verify_ms", ".2f"),
    ("rest ms", "rest_ms", ".2f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("speed-up", "speedup", ".2f"),
    ("right", "num_right", ""),
    ("same answers", "num_same", ""),
)


def write(folder: Path, results: Mapping[str, Any]) -> list[str]:
    """The names of the files written, over what was there. ValueError where the folder cannot be written."""
    names = ["methods.json", "methods.md"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=1, ensure_ascii=False)
        (folder / names[0]).write_text(text + "\n", encoding="utf-8")
        (folder / names[1]).write_text(markdown(results), encoding="utf-8")
        if plots.available():
            draw(folder / "methods.png", results["methods"])
            names.append("methods.png")
    except OSError as error:
        raise ValueError(f"--output-dir {folder}: cannot be written: {error}") from None
    return names


def markdown(results: Mapping[str, Any]) -> str:
    """The table, and under it what it rests on."""
    rows = results["methods"]
    lines = [
        f"# Draft methods on {results['model']}",
        "",
        *table(rows),
        "",
        conditions(results),
        "",
        identity(rows),
        "",
        *(f"Note: {note}\n" for note in results["notes"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def conditions(results: Mapping[str, Any]) -> str:
    """What was asked, and of what."""
    s, e = results["settings"], results["environment"]
    return (
        f"{s['num_prompts']} prompts, {s['batch_size']} at once, up to {s['max_tokens']} new tokens, temperature "
        f"{s['temperature']:g}, policy {s['policy']}, best of {s['repeats']}; {e['device']}, {e['dtype']}, "
        f"{e['threads']} threads, torch {e['versions']['torch']}, commit {e['commit'] or 'unknown'}."
    )


def table(rows: Sequence[Record]) -> list[str]:
    """One line a method; columns that say nothing are left out."""
    shown = [c for c in COLUMNS if any(row[c[1]] is not None for row in rows)]
    if not any(row["num_right"] >= max(1, WORTH_SHOWING * row["num_asked"]) for row in rows):
        shown = [c for c in shown if c[1] != "num_right"]
    lines = [[title for title, _, _ in shown], ["---"] * len(shown)]
    lines += [[_cell(row, key, form) for _, key, form in shown] for row in rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def identity(rows: Sequence[Record]) -> str:
    """What the comparison rests on."""
    drafting = [row for row in rows if row["num_speculative_tokens"]]
    different = [row["name"] for row in drafting if not row["identical"]]
    verdict = f"NO ({', '.join(different)})" if different else "yes"
    count, tokens, accepted = (
        sum(row[key] for row in drafting) for key in ("num_outputs", "num_tokens", "num_accepted")
    )
    return f"identical: {verdict} ({count} outputs, {tokens} tokens compared with plain; {accepted} accepted drafts)"


def _cell(row: Record, key: str, form: str) -> str:
    value = row[key]
    if key == "accepted_per_position":
        more = " ..." if len(value) > MOST_POSITIONS else ""
        return " ".join(f"{share:.2f}" for share in value[:MOST_POSITIONS]) + more
    if key == "num_right":
        return f"{value} of {row['num_asked']}"
    is_plain = not row["num_speculative_tokens"]
    if value is None or (is_plain and key in ("num_speculative_tokens", "num_same")):
        return ""
    if key == "num_same":
        return f"{value} of {row['num_outputs']}"
    return format(value, form) if form else str(value)


def draw(path: Path, rows: Sequence[Record]) -> None:
    """Speed-up, where a step's time goes, and acceptance by position, side by side. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(13, 0.34 * len(rows) + 1.6), layout="constrained", width_ratios=(3, 4, 4)
    )
    names = [row["name"] for row in rows]
    bars = left.barh(names, [row["speedup"] for row in rows], color="tab:green")
    left.bar_label(
        bars, [f"{row['speedup']:.2f}, tau {row['tau']:.2f}" for row in rows], padding=3, fontsize="small"
    )
    left.set(xlabel="speed-up over plain decoding", xlim=(0, 1.7 * max(row["speedup"] for row in rows)))
    left.axvline(1, color="grey", linewidth=1)
    offset = [0.0] * len(rows)
    for key, label in (("verify_ms", "target and verify"), ("draft_ms", "draft"), ("rest_ms", "rest")):
        widths = [row[key] or 0.0 for row in rows]
        middle.barh(names, widths, left=offset, label=label)
        offset = [a + b for a, b in zip(offset, widths, strict=True)]
    middle.set(xlabel="ms a step")
    middle.legend(fontsize="small")
    for axes in (left, middle):
        axes.invert_yaxis()
    for row in rows:
        if row["accepted_per_position"]:
            shares = row["accepted_per_position"]
            right.plot(range(1, len(shares) + 1), shares, marker=".", label=row["name"])
    right.set(xlabel="position of the draft", ylabel="share of rounds that accept it", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.grid(alpha=0.3)
    right.legend(fontsize="x-small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
