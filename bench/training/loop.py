"""The training loop: Muon for matrices, AdamW for norms, learning rate decay by wall clock. Steps depend on the
machine's speed, so two runs do not end with the same bits; texts and their order depend only on the seed.

A killed run resumes from its last checkpoint, with the texts in a new order.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.training.answers import Text, up_to
from bench.training.head import Head, drafts
from bench.training.loss import Loss, weighted
from bench.training.settings import Settings
from bench.training.target import Target
from draftproof.train.loop import CHECKPOINT, LOG

WARM_UP = 150  # steps
LEAST_RATE = 0.01  # minimum learning rate, as a share of the highest
POOL = 8192  # texts sorted by length at a time
CHECKED_AT_ONCE = 48  # texts
SYNC_EVERY = (
    20  # steps between device syncs: the host must not run far ahead, as the schedule follows the clock
)


@dataclass
class Learner:
    """A head in training. `step`, `seconds`: totals over all runs."""

    target: Target
    head: Head
    settings: Settings
    loss: Loss
    optimizers: list[torch.optim.Optimizer] = field(init=False)
    step: int = 0
    seconds: float = 0.0
    tokens_read: int = 0

    def __post_init__(self) -> None:
        matrices = [t for t in self.head.weights.values() if t.ndim == 2]
        norms = [t for t in self.head.weights.values() if t.ndim == 1]
        s = self.settings
        self.optimizers = [
            torch.optim.Muon(
                matrices,
                lr=s.learning_rate,
                weight_decay=s.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(norms, lr=s.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
        ]

    def learn(self, texts: Sequence[Text]) -> list[Tensor]:
        """Run one step; returns the loss of each draft."""
        s = self.settings
        rate = s.learning_rate * share_of_rate(s, self.step, self.seconds)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        losses: list[Tensor] = []
        total = torch.zeros(())
        for number, draft in enumerate(drafts(self.target, self.head, texts, s, noise=s.state_noise)):
            weight_NL = draft.is_text_NL * torch.where(draft.is_answer_NL, 1.0, s.prompt_weight)
            total = weight_NL.sum() if number == 0 else total
            weight_M = (weight_NL * s.loss_decay**number / total).flatten()
            logits_MC, p_MC = draft.logits_NLC.flatten(0, 1), draft.p_NLC.flatten(0, 1)
            losses.append(weighted(self.loss, logits_MC, p_MC, weight_M))
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.head.weights.values(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens_read += sum(len(text.tokens_T) for text in texts)
        return losses

    def save(self, path: Path) -> None:
        tensors = {}
        for name, weight in self.head.weights.items():
            tensors[f"weight/{name}"] = weight.detach().contiguous()
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(weight, {}).items():
                    tensors[f"{key}/{name}"] = value
        counts = {"step": self.step, "seconds": self.seconds, "tokens_read": self.tokens_read}
        partial = path.with_name(path.name + ".partial")
        save_file(tensors, partial, metadata={"counts": json.dumps(counts)})
        partial.replace(path)

    def load(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            counts: dict[str, Any] = json.loads(file.metadata()["counts"])
        self.step, self.seconds, self.tokens_read = counts["step"], counts["seconds"], counts["tokens_read"]
        tensors = load_file(path)
        muon, adamw = self.optimizers
        for name, weight in self.head.weights.items():
            weight.data.copy_(tensors.pop(f"weight/{name}"))
            state = (muon if weight.ndim == 2 else adamw).state[weight]
            for key in [key for key in tensors if key.partition("/")[2] == name]:
                value = tensors.pop(key)
                state[key.partition("/")[0]] = (
                    value.to(weight.device) if value.ndim else value
                )  # step counts stay on the CPU


def share_of_rate(settings: Settings, step: int, seconds: float) -> float:
    """The learning rate as a share of the highest: linear warm-up, flat, then cosine decay by the clock."""
    done = (seconds / settings.max_seconds - settings.flat_share) / (1 - settings.flat_share)
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
    return min(1.0, (step + 1) / WARM_UP) * max(LEAST_RATE, fall)


def batches(texts: Sequence[Text], size: int, rng: random.Random) -> Iterator[list[Text]]:
    """Endless batches of texts of similar length, at most `size` tokens with padding."""
    while True:
        order = list(texts)
        rng.shuffle(order)
        for start in range(0, len(order), POOL):
            made: list[list[Text]] = [[]]
            for text in sorted(order[start : start + POOL], key=lambda text: len(text.tokens_T)):
                longest = up_to(len(text.tokens_T), 16)
                if made[-1] and longest * (len(made[-1]) + 1) > size:
                    made.append([])
                made[-1].append(text)
            rng.shuffle(made)
            yield from made


def train(learner: Learner, texts: Sequence[Text], held: Sequence[Text], folder: Path) -> dict[str, Any]:
    """Train until the time is over; returns tokens per round as estimated on held-out texts."""
    s = learner.settings
    if (folder / CHECKPOINT).is_file():
        learner.load(folder / CHECKPOINT)
    else:
        _log(folder, {"step": 0, "held_back": check(learner, held)})
    torch.manual_seed(s.seed + learner.step)
    source = batches(texts, s.tokens_per_step, random.Random(s.seed + learner.step))
    start = time.perf_counter() - learner.seconds
    shown = saved = learner.seconds
    while learner.seconds < s.max_seconds:
        losses = learner.learn(next(source))
        if learner.step % SYNC_EVERY == 0:
            _wait(learner.target.device)
        learner.seconds = time.perf_counter() - start
        if learner.seconds - shown > s.show_every:
            shown = learner.seconds
            _log(folder, _shown(learner, losses))
        if learner.seconds - saved > s.save_every:
            saved = learner.seconds
            _log(folder, {"step": learner.step, "held_back": check(learner, held)})
            _keep(learner, folder)
            learner.seconds = time.perf_counter() - start
    _wait(learner.target.device)
    _keep(learner, folder)
    found = check(learner, held)
    _log(folder, {"step": learner.step, "held_back": found})
    return found


def _keep(learner: Learner, folder: Path) -> None:
    learner.head.save(folder)
    learner.save(folder / CHECKPOINT)


@torch.no_grad()
def check(learner: Learner, held: Sequence[Text]) -> dict[str, Any]:
    """Estimated tokens per round, draft by draft: on greedy texts the share of drafts that are right with all before
    them, on texts sampled at 0.8 the overlap of both distributions."""
    found = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        texts = [text for text in held if text.temperature == temperature]
        if not texts:
            continue
        sums = torch.zeros(learner.settings.num_drafts, device=learner.target.device)
        count = 0.0
        for start in range(0, len(texts), CHECKED_AT_ONCE):
            some = texts[start : start + CHECKED_AT_ONCE]
            made = drafts(
                learner.target, learner.head, some, learner.settings, temperature=temperature or 1.0
            )
            so_far = torch.ones(())
            for number, draft in enumerate(made):
                if temperature:
                    q_NLC = (draft.logits_NLC.float() / temperature).softmax(-1)
                    right = torch.minimum(q_NLC, draft.p_NLC.float()).sum(-1)
                else:
                    right = (learner.head.ids_C[draft.logits_NLC.argmax(-1)] == draft.best_NL).float()
                if number == 0:
                    so_far = (draft.is_text_NL & draft.is_answer_NL).float()
                    count += float(so_far.sum())
                so_far = so_far * right * draft.is_text_NL
                sums[number] += so_far.sum()
        shares = (sums / max(count, 1.0)).tolist()
        found[name] = {"tau": round(1 + sum(shares), 3), "shares": [round(share, 3) for share in shares]}
    return found


def _shown(learner: Learner, losses: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "step": learner.step,
        "seconds": round(learner.seconds, 1),
        "tokens_read": learner.tokens_read,
        "losses": [round(float(loss.detach()), 3) for loss in losses],
    }


def _log(folder: Path, line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
