"""The training loop. A step depends only on the settings and its number (with `max_seconds` also on the clock), so an
interrupted run resumes with the same bits from its last checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.train.data import TrainingData
from draftproof.train.heads import TrainedHead
from draftproof.train.settings import HeadConfig, as_record

CHECKPOINT = "checkpoint.safetensors"
LOG = "log.jsonl"
WARM_UP = 100  # steps, or a tenth of all if that is less
LEAST_RATE = 0.03  # relative to the peak learning rate
HELD_SHARE = 50  # one text in 50 is held out
HELD_STEPS = 4
STATES = ("exp_avg", "exp_avg_sq")  # AdamW's state per parameter
Show = Callable[[int, int, dict[str, float]], None]  # (steps done, maximum steps, metrics)


def train(head: TrainedHead, data: TrainingData, folder: Path, show: Show) -> dict[str, float]:
    """Train until steps or seconds are spent, from the last checkpoint if there is one; returns metrics on the held-out
    texts."""
    config = head.config
    optimizer = torch.optim.AdamW(
        list(head.parameters.values()),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(0.9, 0.95),
    )
    step, before = _resume(folder / CHECKPOINT, head, optimizer)
    num_held = max(1, len(data.tokens) // HELD_SHARE) if len(data.tokens) > 1 else 0
    learnt = range(len(data.tokens) - num_held)
    start = time.perf_counter() - before
    while step < config.num_steps:
        seconds = time.perf_counter() - start
        if config.max_seconds is not None and seconds >= config.max_seconds:
            break
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * rate(config, step, seconds)
        loss, metrics = _losses(head, data, step, learnt)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters.values(), 1.0)
        optimizer.step()
        step += 1
        if step % config.checkpoint_every == 0:
            _log(folder / LOG, step, time.perf_counter() - start, metrics)
            _save(folder / CHECKPOINT, head, optimizer, step, time.perf_counter() - start)
        if step % 20 == 0 or step == config.num_steps:
            show(step, config.num_steps, means(metrics))
    _save(folder / CHECKPOINT, head, optimizer, step, time.perf_counter() - start)
    held = range(len(learnt), len(data.tokens)) or learnt
    return {"steps": float(step), **_held_out(head, data, held)}


def rate(config: HeadConfig, step: int, seconds: float) -> float:
    """Learning rate relative to its peak: linear warm-up, then cosine decay with the share of steps or seconds spent,
    whichever is larger."""
    spent = step / config.num_steps
    if config.max_seconds is not None:
        spent = max(spent, seconds / config.max_seconds)
    warm = min(WARM_UP, max(1, config.num_steps // 10))
    return min(1.0, (step + 1) / warm) * max(LEAST_RATE, 0.5 * (1 + math.cos(math.pi * min(1.0, spent))))


def means(metrics: dict[str, Any], num_steps: int = 1) -> dict[str, float]:
    """Means of the library's metrics: sums divided by their totals; a metric without total, by `num_steps`."""
    from draftproof.train.library import normalize_counted_metrics

    return normalize_counted_metrics({k: float(v) for k, v in metrics.items()}, num_steps)


def _losses(head: TrainedHead, data: TrainingData, step: int, among: range) -> tuple[Tensor, dict[str, Any]]:
    seed = (head.config.train_seed << 32) + step
    torch.manual_seed(seed)  # dflash draws its anchors from torch's own generator
    drawn = list(data.draw(head.config.tokens_per_step, torch.Generator().manual_seed(seed), among))
    return head.losses([data.tokens[i] for i in drawn], [data.states[i] for i in drawn], data.taps)


@torch.no_grad()
def _held_out(head: TrainedHead, data: TrainingData, held: range) -> dict[str, float]:
    sums: dict[str, Any] = {}
    head.model.eval()
    for i in range(HELD_STEPS):
        _, metrics = _losses(head, data, -1 - i, held)
        sums = {k: float(v) + sums.get(k, 0.0) for k, v in metrics.items()}
    head.model.train()
    return means(sums, HELD_STEPS)


def _save(path: Path, head: TrainedHead, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
    tensors = {}
    for name, parameter in head.parameters.items():
        tensors[f"weight/{name}"] = parameter.detach()
        for key in STATES:
            tensors[f"{key}/{name}"] = optimizer.state[parameter][key]
    partial = path.with_name(path.name + ".partial")
    about = {"step": str(step), "seconds": repr(seconds), "head": json.dumps(as_record(head.config))}
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, partial, metadata=about)
    partial.replace(path)


def _resume(path: Path, head: TrainedHead, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Load a checkpoint, if there is one: (its step, the seconds spent so far)."""
    if not path.is_file():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    step = int(about["step"])
    tensors = load_file(path, device=str(head.device))
    with torch.no_grad():
        for name, parameter in head.parameters.items():
            parameter.copy_(tensors[f"weight/{name}"])
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                **{key: tensors[f"{key}/{name}"] for key in STATES},
            }
    return step, float(about["seconds"])


def _log(path: Path, step: int, seconds: float, metrics: dict[str, Any]) -> None:
    line = json.dumps({"step": step, "seconds": round(seconds, 1), **means(metrics)})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
