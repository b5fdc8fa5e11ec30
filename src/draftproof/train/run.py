"""A training run from prompts to a head: the target's answers and states, the training, and a record of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftproof import assets
from draftproof.engine.loading import memory
from draftproof.frontend.llm import LLM
from draftproof.models.config import read_config
from draftproof.models.loading import resolve
from draftproof.train import data, heads, loop, recipes
from draftproof.train.data import Bar, DataFolder, TrainingData
from draftproof.train.heads import TrainedHead
from draftproof.train.recipes import Target
from draftproof.train.record import StateReader
from draftproof.train.settings import (
    FILE,
    WHOLE,
    AnswerConfig,
    HeadConfig,
    Part,
    as_record,
    check_same,
    write_record,
)
from draftproof.types import SamplingParams

PROBE_TOKENS = 24  # length of the answers that are timed
PROBE_STEPS = 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """Upper bounds for a run: seconds of each part, tokens of all texts, bytes of their states."""

    answer_seconds: float
    read_seconds: float
    train_seconds: float
    num_tokens: int
    num_bytes: int

    def __str__(self) -> str:
        parts = (
            f"answers {_minutes(self.answer_seconds)}",
            f"states {_minutes(self.read_seconds)}",
            f"training {_minutes(self.train_seconds)}",
        )
        return (
            f"at most {self.num_tokens} tokens; hidden states: {self.num_bytes / 1e9:.2f} GB on disk; "
            f"time: {', '.join(parts)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and where files go. `engine`: keywords of `LLM`, including the target; `prompts`: token ids;
    `part`: the files of data that this process writes; `allow_missing`: train even if files of data are missing."""

    engine: dict[str, Any]
    prompts: Sequence[Sequence[int]]
    folder: Path
    data_folder: Path
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    target_name: str | None = None
    part: Part = WHOLE
    allow_missing: bool = False

    def target(self) -> Target:
        heads.check_installed()
        model = self.engine.get("model") or assets.default_model().where
        directory = resolve(model, load_format=self.engine.get("load_format", "auto"))
        config = read_config(directory, overrides=self.engine.get("hf_overrides"))
        if not recipes.is_plain(config):
            raise ValueError(
                f"{directory}: model_type={config.model_type!r}: heads are trained for Llama and Qwen"
            )
        return Target(directory, config, self.target_name or _name_of(model, directory))

    @property
    def device(self) -> torch.device:
        return memory.pick_device(self.engine.get("device", "auto"))


def prepare(training: Training) -> tuple[Target, DataFolder]:
    """Open the folders. ValueError if one holds files made with other settings or for another target."""
    target = training.target()
    taps = recipes.tapped_layers(target.model.num_layers)
    training.folder.mkdir(parents=True, exist_ok=True)
    record = {
        "target": target.record,
        "head": as_record(training.head),
        "answers": as_record(training.answers),
    }
    found = training.folder / FILE
    if found.is_file():
        kept = json.loads(found.read_text(encoding="utf-8"))
        record |= {key: value for key, value in kept.items() if key not in record}
    if not check_same(found, record):
        write_record(found, record)
    folder = data.open_folder(training.data_folder, target.record, taps, training.prompts, training.answers)
    return target, folder


def estimate(training: Training, target: Target, llm: LLM) -> Estimate:
    """Estimate the run from a few timed answers, and training steps on random data."""
    prompts, most = training.prompts, training.answers.max_tokens
    chosen = [{"prompt_token_ids": list(p)} for p in prompts[: llm.config.max_num_seqs]]
    num_prompt = sum(map(len, prompts))
    num_chosen = sum(len(p["prompt_token_ids"]) for p in chosen)
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    longer = SamplingParams(temperature=0, max_tokens=PROBE_TOKENS, ignore_eos=True, detokenize=False)
    llm.generate(chosen[:1], once, use_tqdm=False)  # warm-up
    llm.reset_prefix_cache()
    read = _timed(lambda: llm.generate(chosen, once, use_tqdm=False))
    written = _timed(lambda: llm.generate(chosen, longer, use_tqdm=False))
    read_rate = num_chosen / read
    write_rate = len(chosen) * (PROBE_TOKENS - 1) / max(written - read, 1e-9)
    num_tokens = num_prompt + len(prompts) * most
    step = _step_seconds(training, target)
    train = training.head.num_steps * step
    if training.head.max_seconds is not None:
        train = min(train, training.head.max_seconds)
    taps = recipes.tapped_layers(target.model.num_layers)
    return Estimate(
        answer_seconds=len(prompts) * most / write_rate + num_prompt / read_rate,
        read_seconds=num_tokens / read_rate,
        train_seconds=train,
        num_tokens=num_tokens,
        num_bytes=data.num_state_bytes(num_tokens, len(taps), target.model.hidden_size),
    )


def make_data(training: Training, folder: DataFolder, llm: LLM, bar: Bar) -> None:
    """Write the missing answers and states. `llm` is closed in between: two engines may not fit into memory."""
    part = training.part
    if not data.is_complete(folder, states=False, part=part):
        data.write_answers(llm, folder, training.prompts, training.answers, bar, part)
    llm.close()
    if not data.is_complete(folder, states=True, part=part):
        reader = StateReader(folder.taps, training.engine)
        data.write_states(reader, folder, bar, part)
        reader.close()


def make_head(training: Training, target: Target, folder: DataFolder, show: loop.Show) -> dict[str, float]:
    """Train, and write the head with its record. Returns the metrics on held-out texts."""
    if not (training.allow_missing or data.is_complete(folder, states=True)):
        raise ValueError(
            f"{folder.path}: answers or states are missing; run the stage 'data' first, or --allow-missing"
        )
    texts = TrainingData(folder, training.device)
    head = TrainedHead(training.head, target, texts.frequencies(target.model.vocab_size), training.device)
    reached = loop.train(head, texts, training.folder, show)
    head.save(training.folder)
    path = training.folder / FILE
    record = json.loads(path.read_text(encoding="utf-8"))
    record["trained_on"] = {
        "texts": len(texts.tokens),
        "tokens": texts.num_tokens,
        "device": str(training.device),
    }
    record["held_back"] = reached
    write_record(path, record)
    return reached


def _step_seconds(training: Training, target: Target) -> float:
    """Seconds of a training step."""
    size, device = training.head.tokens_per_step, training.device
    taps = recipes.tapped_layers(target.model.num_layers)
    head = TrainedHead(training.head, target, torch.zeros(target.model.vocab_size, dtype=torch.int64), device)
    tokens_T = torch.randint(target.model.vocab_size, (size,))
    states_TSH = torch.randn(size, len(taps), target.model.hidden_size, dtype=torch.bfloat16)

    def step() -> None:
        loss, _ = head.losses([tokens_T], [states_TSH], taps)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    return min(_timed(step) for _ in range(PROBE_STEPS))


def _timed(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _name_of(model: str | Path, directory: Path) -> str:
    """The target's name: a hub id as it is, a folder or file without its path."""
    path = Path(model).expanduser()
    return path.name if path.exists() else str(model)
