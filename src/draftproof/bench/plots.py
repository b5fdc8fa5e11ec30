"""A benchmark's plots as PNG files. Needs matplotlib, from `pip install draftproof[bench]`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.bench.figures import title
from draftproof.metrics import Prediction

Record = Mapping[str, Any]
PARTS = ("verify", "draft", "host")


def available() -> bool:
    """Whether matplotlib can be imported."""
    return importlib.util.find_spec("matplotlib") is not None


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_sweep(folder: Path, runs: Sequence[Record]) -> list[str]:
    """Draw the plots; returns the names of the files. A plot without data is not written; an older one is removed."""
    pyplot = _pyplot()
    plots: dict[str, Callable[[Any, Sequence[Record]], bool]] = {
        "speedup.png": _speedup,
        "acceptance.png": _acceptance,
        "time_split.png": _time_split,
        "roofline.png": _roofline,
    }
    written = []
    for name, plot in plots.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        if plot(axes, runs):
            figure.savefig(folder / name, dpi=130)
            written.append(name)
        else:
            (folder / name).unlink(missing_ok=True)
        pyplot.close(figure)
    return written


def draw_predictions(file: Path, predictions: Sequence[Prediction]) -> None:
    """Draw the predicted speed-up over the number of requests, with the number of drafts at each point."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot([p.num_requests for p in predictions], [p.speedup for p in predictions], marker="o")
    for p in predictions:
        axes.annotate(f"K={p.num_drafts}", (p.num_requests, p.speedup), (0, 6), textcoords="offset points")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="requests at once", ylabel="speed-up, predicted", ylim=(0, None))
    axes.set_xscale("log", base=2)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _by_batch(axes: Any, runs: Sequence[Record], key: str) -> bool:
    """Draw `key` over the batch sizes, a line per variant (and rate)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        if run.get(key) is not None:
            lines.setdefault(title(run), []).append((run["batch_size"], run[key]))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    batches = sorted({run["batch_size"] for run in runs})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.set_xlabel("batch size")
    axes.grid(alpha=0.3)
    if lines:
        axes.legend()
    return bool(lines)


def _speedup(axes: Any, runs: Sequence[Record]) -> bool:
    found = _by_batch(axes, [run for run in runs if run["num_speculative_tokens"]], "speedup")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_ylim(bottom=0)
    return found


def _roofline(axes: Any, runs: Sequence[Record]) -> bool:
    found = _by_batch(axes, runs, "roofline_share")
    axes.set_ylabel("share of the roofline, decoding steps")
    axes.set_ylim(0, 1)
    return found


def _acceptance(axes: Any, runs: Sequence[Record]) -> bool:
    drafting = [run for run in runs if run.get("spec_decode_per_position_acceptance_rates")]
    for run in drafting:
        shares = run["spec_decode_per_position_acceptance_rates"]
        label = f"{_title_in_cell(run)} (tau {run['spec_decode_acceptance_length']:.2f})"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("share of proposed drafts accepted")
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if drafting:
        axes.legend(fontsize="small")
    return bool(drafting)


def draw_acceptance(path: Path, rows: Sequence[Record]) -> None:
    """Draw acceptance by position, a line per domain and temperature."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        shares = row["accepted_per_position"]
        label = f"{row['domain']}, T = {row['temperature']} (tau {row['tau']:.2f})"
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.set_xlabel("position of the draft")
    axes.set_ylabel("share of rounds that accepted it")
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _time_split(axes: Any, runs: Sequence[Record]) -> bool:
    known = [run for run in runs if run["time_split"]]
    left = [0.0] * len(known)
    for part in PARTS:
        widths = [run["time_split"][part] for run in known]
        label = "target and verify" if part == "verify" else part
        axes.barh([_title_in_cell(run) for run in known], widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("share of a step")
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    if known:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS), frameon=False)
    return bool(known)


def _title_in_cell(run: Record) -> str:
    return f"{title(run)}, batch {run['batch_size']}"


def draw_methods(folder: Path, rows: Sequence[Record]) -> list[str]:
    """Draw speed-up, parts of a step's time, and acceptance by position, side by side; returns the file's name."""
    pyplot = _pyplot()
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
    figure.savefig(folder / "methods.png", dpi=130)
    pyplot.close(figure)
    return ["methods.png"]
