"""Training data in files: prompts with the target's own answers, and the target's states at all their tokens.

Files are written atomically, so an interrupted run resumes with the first that is missing.
Shapes: N texts, T tokens of all texts, S tapped layers, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.frontend.llm import LLM
from draftproof.train.record import StateReader
from draftproof.train.settings import WHOLE, AnswerConfig, Part, as_record, check_same, write_record
from draftproof.types import SamplingParams

SHARD = 1024  # prompts per file
LEAST_ANSWER = 4  # tokens; shorter answers are left out
NUMBER_BYTES = 2  # of a number of a state, in bf16
Bar = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class Texts:
    """Concatenated texts. `starts_N1`: where each begins, and the end; `num_prompt_N`: length of each prompt."""

    tokens_T: Tensor
    starts_N1: Tensor
    num_prompt_N: Tensor

    @classmethod
    def of(cls, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Texts:
        """From pairs of a prompt and its answer."""
        whole = [[*prompt, *answer] for prompt, answer in texts]
        return cls(
            torch.tensor([token for text in whole for token in text], dtype=torch.int32),
            torch.tensor([0, *map(len, whole)]).cumsum(0),
            torch.tensor([len(prompt) for prompt, _ in texts], dtype=torch.int64),
        )

    def lists(self) -> list[list[int]]:
        tokens = self.tokens_T.tolist()
        return [tokens[start:end] for start, end in pairwise(self.starts_N1.tolist())]

    def save(self, path: Path) -> None:
        _save(
            path, {"tokens_T": self.tokens_T, "starts_N1": self.starts_N1, "num_prompt_N": self.num_prompt_N}
        )

    @classmethod
    def load(cls, path: Path) -> Texts:
        return cls(**load_file(path))


@dataclass(frozen=True, slots=True)
class DataFolder:
    """The folder of a target's answers and states. `record`: the settings that they depend on."""

    path: Path
    record: dict[str, Any]
    num_prompts: int

    @property
    def num_shards(self) -> int:
        return -(-self.num_prompts // SHARD)

    def shards(self, part: Part = WHOLE) -> list[int]:
        return list(range(part.first, self.num_shards, part.step))

    @property
    def complete_shards(self) -> list[int]:
        return [s for s in self.shards() if self.answers(s).is_file() and self.states(s).is_file()]

    def answers(self, shard: int) -> Path:
        return self.path / f"answers-{shard:05d}.safetensors"

    def states(self, shard: int) -> Path:
        return self.path / f"states-{shard:05d}.safetensors"

    @property
    def taps(self) -> list[int]:
        return list(self.record["taps"])


def open_folder(
    path: Path,
    target: dict[str, Any],
    taps: Sequence[int],
    prompts: Sequence[Sequence[int]],
    config: AnswerConfig,
) -> DataFolder:
    """Open or create the folder. ValueError if its files were made with other settings."""
    text = json.dumps([list(prompt) for prompt in prompts])
    record = {
        "target": target,
        "taps": list(taps),
        "num_prompts": len(prompts),
        "prompts": hashlib.sha256(text.encode()).hexdigest(),
        "answers": as_record(config),
    }
    path.mkdir(parents=True, exist_ok=True)
    if not check_same(path / "data.json", record):
        write_record(path / "data.json", record)
    return DataFolder(path, record, len(prompts))


def params_of(number: int, config: AnswerConfig) -> SamplingParams:
    """Sampling parameters for prompt `number`: greedy for even numbers."""
    temperature = config.temperature if number % 2 else 0.0
    return SamplingParams(
        temperature=temperature,
        max_tokens=config.max_tokens,
        seed=config.data_seed * (1 << 32) + number,
        detokenize=False,
    )


def write_answers(
    llm: LLM,
    folder: DataFolder,
    prompts: Sequence[Sequence[int]],
    config: AnswerConfig,
    bar: Bar,
    part: Part = WHOLE,
) -> None:
    """Generate the target's answers to the prompts whose files are missing."""
    shards = folder.shards(part)
    for done, shard in enumerate(shards):
        bar("files of answers", done, len(shards))
        if folder.answers(shard).is_file():
            continue
        numbers = range(shard * SHARD, min(len(prompts), (shard + 1) * SHARD))
        outputs = llm.generate(
            [{"prompt_token_ids": list(prompts[n])} for n in numbers],
            [params_of(n, config) for n in numbers],
            use_tqdm=False,
        )
        pairs = [
            (prompts[n], output.outputs[0].token_ids)
            for n, output in zip(numbers, outputs, strict=True)
            if not output.error and len(output.outputs[0].token_ids) >= LEAST_ANSWER
        ]
        Texts.of(pairs).save(folder.answers(shard))
    bar("files of answers", len(shards), len(shards))


def write_states(reader: StateReader, folder: DataFolder, bar: Bar, part: Part = WHOLE) -> None:
    """Compute the target's states for the texts whose files of states are missing."""
    shards = folder.shards(part)
    for done, shard in enumerate(shards):
        bar("files of states", done, len(shards))
        if not folder.states(shard).is_file():
            texts = Texts.load(folder.answers(shard)).lists()
            _save(folder.states(shard), {"states_TSH": reader.read(texts)})
    bar("files of states", len(shards), len(shards))


def is_complete(folder: DataFolder, *, states: bool, part: Part = WHOLE) -> bool:
    name = folder.states if states else folder.answers
    return all(name(shard).is_file() for shard in folder.shards(part))


def num_state_bytes(num_tokens: int, num_taps: int, hidden_size: int) -> int:
    return num_tokens * num_taps * hidden_size * NUMBER_BYTES


class TrainingData:
    """All texts of a folder's complete shards with their states, which lie on the training device if they fit."""

    def __init__(self, folder: DataFolder, device: torch.device) -> None:
        self.taps = folder.taps
        self.tokens: list[Tensor] = []
        self.states: list[Tensor] = []
        self._shards: list[Tensor] = []
        for shard in folder.complete_shards:
            texts = Texts.load(folder.answers(shard))
            with safe_open(folder.states(shard), framework="pt") as file:
                states_TSH = file.get_tensor("states_TSH")
            if len(states_TSH) != len(texts.tokens_T):
                raise ValueError(
                    f"{folder.states(shard)}: has states of {len(states_TSH)} tokens, but the answers beside it have "
                    f"{len(texts.tokens_T)}; remove it"
                )
            states_TSH = _placed(states_TSH, device)
            tokens_T = texts.tokens_T.to(torch.int64)
            self._shards.append(tokens_T)
            ends = texts.starts_N1.tolist()
            for start, end in pairwise(ends):
                self.tokens.append(tokens_T[start:end])
                self.states.append(states_TSH[start:end])
        if not self.tokens:
            raise ValueError(f"{folder.path}: holds no answer to train on; give more prompts")

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._shards))

    def frequencies(self, vocab_size: int) -> Tensor:
        return sum(
            (torch.bincount(t, minlength=vocab_size) for t in self._shards),
            torch.zeros(vocab_size, dtype=torch.int64),
        )

    def draw(self, num_tokens: int, generator: torch.Generator, among: range) -> Iterator[int]:
        """Indices of random texts from `among`, until they have at least `num_tokens` tokens together."""
        left = num_tokens
        while left > 0:
            chosen = among[int(torch.randint(len(among), (), generator=generator))]
            left -= len(self.tokens[chosen])
            yield chosen


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device if it takes less than a quarter of the free memory there."""
    if device.type != "cuda":
        return tensor
    free, _ = torch.cuda.mem_get_info(device)
    return tensor.to(device) if tensor.nbytes < free // 4 else tensor


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file atomically."""
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial)
    partial.replace(path)
