"""Heads trained by `speculators` on the engine's states: read by our engine, equal bits after an interruption, refused
for another target. Skipped without that library."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftproof import LLM, SamplingParams, assets
from draftproof.train import data, loop, run
from draftproof.train.heads import TrainedHead
from draftproof.train.settings import AnswerConfig, HeadConfig
from tests.train.library import needs_library

pytestmark = needs_library

PROMPTS = [[40 + i, 50, 60 + 2 * i, 70] for i in range(6)]
ANSWERS = AnswerConfig(max_tokens=24, temperature=0.8)
HEADS = {
    "eagle3": HeadConfig(method="eagle3", num_drafts=2, draft_vocab_size=512, intermediate_size=64),
    "peagle": HeadConfig(method="peagle", num_drafts=3, draft_vocab_size=512, intermediate_size=64),
    "mtp": HeadConfig(method="mtp", num_drafts=2, intermediate_size=64),
    "dflash": HeadConfig(
        method="dflash", num_drafts=3, num_layers=1, draft_vocab_size=512, intermediate_size=64
    ),
}
FEW = {"num_steps": 6, "tokens_per_step": 64, "checkpoint_every": 2}


def quiet(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and states, made once."""
    folder = tmp_path_factory.mktemp("data")
    training = make_training(folder / "unused", folder, "eagle3")
    _, files = run.prepare(training)
    run.make_data(training, files, LLM(**training.engine), quiet)
    return folder


def make_training(folder: Path, data: Path, method: str) -> run.Training:
    return run.Training(
        engine={"model": str(assets.path(assets.TARGET)), "dtype": "float32", "device": "cpu"},
        prompts=PROMPTS,
        folder=folder,
        data_folder=data,
        answers=ANSWERS,
        head=dataclasses.replace(HEADS[method], **FEW),
    )


def trained(training: run.Training, show: Any = quiet) -> dict[str, torch.Tensor]:
    target, files = run.prepare(training)
    run.make_head(training, target, files, show)
    return load_file(training.folder / "model.safetensors")


@pytest.mark.parametrize("method", HEADS)
def test_a_killed_training_goes_on_to_the_same_head(
    method: str, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after the checkpoint of step 4, while that of step 6 is being written."""
    whole = trained(make_training(tmp_path / "whole", data_folder, method))

    class KilledError(BaseException):
        pass

    real, calls = loop.save_file, []

    def dies(tensors: Any, path: Path, **more: Any) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"the beginning of a checkpoint")
            raise KilledError
        real(tensors, path, **more)

    broken = make_training(tmp_path / "broken", data_folder, method)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(loop, "save_file", dies)
        trained(broken)
    assert not (broken.folder / "model.safetensors").exists()

    steps: list[int] = []
    resumed = trained(broken, lambda step, *_: steps.append(step))
    assert steps == [6]
    logged = [json.loads(line)["step"] for line in (broken.folder / loop.LOG).read_text().splitlines()]
    assert logged == [2, 4, 6, 6]  # step 6 is repeated
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def dies_while_writing(folder: Path, data: Path, num_threads: int) -> None:
    """Train, in a process of its own, until half of a second checkpoint is written; then kill -9."""
    torch.set_num_threads(num_threads)  # which torch's bits depend on
    real, calls = loop.save_file, []

    def save(tensors: Any, path: Path, **more: Any) -> None:
        real(tensors, path, **more)
        calls.append(path)
        if len(calls) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    loop.save_file = save
    trained(make_training(folder, data, "eagle3"))


@pytest.mark.slow
def test_a_training_that_the_system_kills_goes_on_to_the_same_head(data_folder: Path, tmp_path: Path) -> None:
    whole = trained(make_training(tmp_path / "whole", data_folder, "eagle3"))
    broken = tmp_path / "broken"
    child = multiprocessing.get_context("spawn").Process(
        target=dies_while_writing, args=(broken, data_folder, torch.get_num_threads())
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL and not (broken / "model.safetensors").exists()
    steps: list[int] = []
    resumed = trained(make_training(broken, data_folder, "eagle3"), lambda step, *_: steps.append(step))
    assert steps == [6]
    assert json.loads((broken / loop.LOG).read_text().splitlines()[0])["step"] == 2
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("method", HEADS)
def test_a_trained_head_drafts_better_and_changes_nothing(
    method: str, data_folder: Path, tmp_path: Path
) -> None:
    """Better than one trained for a single step, on the texts that it was trained on."""
    training = make_training(tmp_path, data_folder, method)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(**training.engine) as plain:
        wanted = [o.outputs[0].token_ids for o in plain.generate(prompts, params, use_tqdm=False)]
    num_accepted = {}
    for steps in (1, 60):
        head = dataclasses.replace(training.head, num_steps=steps, learning_rate=3e-3)
        made = dataclasses.replace(training, folder=tmp_path / str(steps), head=head)
        tensors = trained(made)
        own = {"peagle": ("lm_head", "verifier")}.get(method, ("embed_tokens", "lm_head", "verifier"))
        assert not [name for name in tensors if name.startswith(own)]
        drafter = {"model": str(made.folder), "num_speculative_tokens": 2, "policy": "fixed"}
        with LLM(**made.engine, speculative_config=drafter) as drafting:
            found = drafting.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in found] == wanted
        num_accepted[steps] = sum(o.metrics.speculation.num_accepted_tokens for o in found)
        record = json.loads((made.folder / "train.json").read_text())
        assert record["trained_on"]["texts"] == len(PROMPTS)
        assert record["held_back"]["steps"] == steps
    assert num_accepted[60] > num_accepted[1] + 5


def test_a_head_of_another_target_is_refused(data_folder: Path, tmp_path: Path) -> None:
    """The engine refuses to draft with it, and training refuses to continue it."""
    training = make_training(tmp_path / "head", data_folder, "eagle3")
    trained(training)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((assets.path(assets.TARGET) / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    with pytest.raises(ValueError, match="hidden_size"):
        LLM(
            model=str(other), load_format="dummy", device="cpu",
            speculative_config={"model": str(training.folder), "load_format": "auto"},
        )  # fmt: skip
    moved = dataclasses.replace(training, engine={**training.engine, "model": str(other)})
    with pytest.raises(ValueError, match=r"train.json: target\."):
        run.prepare(moved)


def test_training_needs_all_of_the_data(data_folder: Path, tmp_path: Path) -> None:
    training = make_training(tmp_path / "head", tmp_path / "data", "eagle3")
    target, files = run.prepare(training)
    shutil.copy(data_folder / "answers-00000.safetensors", tmp_path / "data")
    with pytest.raises(ValueError, match="states are missing; run the stage 'data' first"):
        run.make_head(training, target, files, quiet)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"num_layers": 2}, "num_layers=2"), ({"draft_vocab_size": 512}, "draft_vocab_size=512")],
)
def test_what_an_mtp_head_cannot_be_is_refused(given: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}: an mtp head .* leave it out"):
        HeadConfig(method="mtp", **given)  # type: ignore[arg-type]


def test_the_estimate_counts_bytes_and_time(data_folder: Path, tmp_path: Path) -> None:
    training = make_training(tmp_path / "head", data_folder, "eagle3")
    target, _ = run.prepare(training)
    with LLM(**training.engine) as llm:
        told = run.estimate(training, target, llm)
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * ANSWERS.max_tokens
    assert told.num_tokens == num_tokens
    assert told.num_bytes == num_tokens * 4 * 256 * 2  # tapped layers, hidden size, bf16
    assert told.answer_seconds > 0
    assert told.read_seconds > 0
    assert told.train_seconds > 0


def test_missing_data_is_left_out_when_it_is_allowed(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD", 4)  # 6 prompts: the second file is missing
    training = make_training(tmp_path / "head", tmp_path / "data", "eagle3")
    training = dataclasses.replace(training, allow_missing=True)
    for file in ("answers-00000.safetensors", "states-00000.safetensors"):
        (tmp_path / "data").mkdir(exist_ok=True)
        shutil.copy(data_folder / file, tmp_path / "data")
    assert trained(training)
    with pytest.raises(ValueError, match="or --allow-missing"):
        trained(dataclasses.replace(training, allow_missing=False))


def test_noise_is_for_training_alone(tmp_path: Path, data_folder: Path) -> None:
    training = make_training(tmp_path / "head", data_folder, "eagle3")
    target, files = run.prepare(training)
    texts = data.TrainingData(files, training.device)
    losses = {}
    for noise in (0.0, 0.5):
        config = dataclasses.replace(training.head, state_noise=noise)
        head = TrainedHead(config, target, texts.frequencies(8192), training.device)
        for is_training in (True, False):
            head.model.train(is_training)
            torch.manual_seed(0)
            loss, _ = head.losses(texts.tokens[:1], texts.states[:1], texts.taps)
            losses[noise, is_training] = loss.item()
    assert losses[0.5, False] == losses[0.0, False] == losses[0.0, True]
    assert losses[0.5, True] != losses[0.0, True]
