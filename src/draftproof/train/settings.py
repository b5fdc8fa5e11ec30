"""Settings for training a head, validated at creation. The command line makes a flag of each field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from draftproof.schema import check_choice, check_number, check_whole, documented, reject_unknown_keys, shown

Method = Literal["eagle3", "peagle", "mtp", "dflash"]
FILE = "train.json"  # beside the head: its settings and training data


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig:
    """How the target's answers are generated: half of them greedily, the others sampled at `temperature`."""

    max_tokens: int = documented(256, "Maximum length of the target's answers, in tokens.")
    temperature: float = documented(
        0.8, "Temperature of every other answer; the others are greedy. 0: all are greedy."
    )
    data_seed: int = documented(0, "Seed of the sampled answers.")

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens, 1)
        check_number("temperature", self.temperature)
        check_whole("data_seed", self.data_seed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The head's architecture, and how it is trained.

    Training ends after `num_steps` or `max_seconds`, whichever comes first; the learning rate decays accordingly.
    Defaults: `num_layers` 2 for dflash, else 1; `intermediate_size` the target's; `draft_vocab_size` 8192, or the
    target's whole vocabulary if that is no larger. An mtp head has one layer and the whole vocabulary.
    """

    method: Method = documented("eagle3", "Kind of head: eagle3, peagle, mtp or dflash.")
    num_drafts: int = documented(5, "Drafts that the head is trained for; a dflash block is one longer.")
    num_layers: int | None = documented(None, "Layers of the head. Left out: 1, or 2 for dflash.")
    intermediate_size: int | None = documented(None, "Width of the head's MLPs. Left out: the target's.")
    draft_vocab_size: int | None = documented(
        None, "Number of tokens that the head can draft, the most frequent ones. Left out: 8192 or all."
    )
    num_steps: int = documented(2000, "Maximum number of training steps.")
    max_seconds: float | None = documented(None, "Maximum seconds of training, without data and checks.")
    tokens_per_step: int = documented(4096, "Tokens of a training step.")
    learning_rate: float = documented(1e-3, "Peak learning rate.")
    loss_decay: float = documented(
        0.8, "Weight of a draft's loss relative to that of the draft before it; for eagle3 and mtp."
    )
    state_noise: float = documented(0.0, "Noise added to the head's input states, relative to their size.")
    weight_decay: float = documented(0.01, "Weight decay of the optimizer.")
    train_seed: int = documented(0, "Seed of the head's weights and of the order of texts.")
    checkpoint_every: int = documented(200, "Steps from one checkpoint to the next.")

    def __post_init__(self) -> None:
        check_choice("method", self.method, get_args(Method))
        check_whole("num_drafts", self.num_drafts, 1, 15)
        for name in ("num_layers", "intermediate_size", "draft_vocab_size"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.method == "mtp":
            self._check_mtp()
        for name in ("num_steps", "checkpoint_every"):
            check_whole(name, getattr(self, name), 1)
        check_whole("tokens_per_step", self.tokens_per_step, 32)
        if self.max_seconds is not None:
            check_number("max_seconds", self.max_seconds, above=0)
        check_number("learning_rate", self.learning_rate, above=0)
        check_number("loss_decay", self.loss_decay, high=1, above=0)
        check_number("state_noise", self.state_noise)
        check_number("weight_decay", self.weight_decay)
        check_whole("train_seed", self.train_seed, 0)

    def _check_mtp(self) -> None:
        if self.num_layers not in (None, 1):
            raise ValueError(f"num_layers={self.num_layers}: an mtp head has one layer; leave it out")
        if self.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}: an mtp head drafts the whole vocabulary; leave it out"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """The files that one of several processes writes: every `step`-th one from `first` on."""

    first: int = 0
    step: int = 1


WHOLE = Part()


def as_record(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def check_same(path: Path, wanted: dict[str, Any]) -> bool:
    """Whether `path` exists. ValueError if it holds other values than `wanted`, since the files beside it were made
    with those."""
    if not path.is_file():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    reject_unknown_keys(str(path), found, list(wanted))
    for key, kept, asked in _differing(found, wanted):
        raise ValueError(
            f"{path}: {key}={shown(kept)}, but {shown(asked)} is asked for; name another folder, or remove this one"
        )
    return True


def _differing(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, found value, wanted value) where they differ; in dictionaries within them, of their keys."""
    for key, asked in wanted.items():
        kept = found.get(key)
        if isinstance(kept, dict) and isinstance(asked, dict):
            missing = dict.fromkeys(kept)
            yield from ((f"{key}.{name}", *both) for name, *both in _differing(kept, {**missing, **asked}))
        elif kept != asked:
            yield key, kept, asked
