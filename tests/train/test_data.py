"""Answers are the engine's; a data folder is resumed where it stopped, and belongs to one target and its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof import LLM, assets
from draftproof.train import data
from draftproof.train.data import Texts
from draftproof.train.record import StateReader
from draftproof.train.settings import AnswerConfig, Part

TAPS = [2, 4, 6, 8]
CONFIG = AnswerConfig(max_tokens=8, temperature=0.9)
PROMPTS = [[10 + i, 20, 30 + i] for i in range(5)]
TARGET = {"name": "tiny", "vocab_size": 8192}


@pytest.fixture(scope="module")
def engine() -> dict[str, str]:
    return {"model": str(assets.path(assets.TARGET)), "dtype": "float32"}


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


def written(folder: data.DataFolder, engine: dict[str, str]) -> list[Texts]:
    with LLM(**engine) as llm:
        data.write_answers(llm, folder, PROMPTS, CONFIG, quiet)
    return [Texts.load(folder.answers(shard)) for shard in range(folder.num_shards)]


def test_answers_follow_their_prompts_greedy_and_sampled(
    tmp_path: Path, engine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD", 2)
    folder = data.open_folder(tmp_path, TARGET, TAPS, PROMPTS, CONFIG)
    texts = [text for shard in written(folder, engine) for text in shard.lists()]
    with LLM(**engine) as llm:
        for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
            params = data.params_of(number, CONFIG)
            assert params.temperature == (CONFIG.temperature if number % 2 else 0)
            answer = (
                llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids
            )
            assert text == [*prompt, *answer]


def test_a_folder_that_was_left_is_finished(
    tmp_path: Path, engine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD", 2)
    folder = data.open_folder(tmp_path, TARGET, TAPS, PROMPTS, CONFIG)
    first = written(folder, engine)
    kept = folder.answers(0).stat().st_mtime_ns
    folder.answers(2).unlink()
    (tmp_path / "answers-00002.safetensors.partial").write_bytes(b"cut")
    assert not data.is_complete(folder, states=False)

    again = written(data.open_folder(tmp_path, TARGET, TAPS, PROMPTS, CONFIG), engine)
    assert folder.answers(0).stat().st_mtime_ns == kept
    assert all(torch.equal(a.tokens_T, b.tokens_T) for a, b in zip(first, again, strict=True))

    reader = StateReader(TAPS, engine)
    data.write_states(reader, folder, quiet)
    reader.close()
    read = data.TrainingData(folder, torch.device("cpu"))
    assert [len(t) for t in read.tokens] == [len(s) for s in read.states]
    sizes = sum(folder.states(shard).stat().st_size for shard in range(folder.num_shards))
    counted = data.num_state_bytes(read.num_tokens, len(TAPS), 256)
    assert counted <= sizes < counted + 1000


def test_several_processes_write_a_folder_together(
    tmp_path: Path, engine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process writes its part; complete parts can be read before all are."""
    monkeypatch.setattr(data, "SHARD", 2)
    alone = data.open_folder(tmp_path / "alone", TARGET, TAPS, PROMPTS, CONFIG)
    wanted = written(alone, engine)
    shared = data.open_folder(tmp_path / "shared", TARGET, TAPS, PROMPTS, CONFIG)
    reader = StateReader(TAPS, engine)
    for part, num_files in ((Part(1, 2), 1), (Part(0, 2), 3)):
        with LLM(**engine) as llm:
            data.write_answers(llm, shared, PROMPTS, CONFIG, quiet, part)
        assert not data.is_complete(shared, states=True, part=part)
        assert len(shared.complete_shards) < num_files
        data.write_states(reader, shared, quiet, part)
        assert data.is_complete(shared, states=True, part=part)
        assert len(shared.complete_shards) == num_files
        read = data.TrainingData(shared, torch.device("cpu"))
        assert len(read.tokens) == sum(len(wanted[shard].lists()) for shard in shared.complete_shards)
    reader.close()
    for shard, texts in enumerate(wanted):
        assert torch.equal(Texts.load(shared.answers(shard)).tokens_T, texts.tokens_T)


@pytest.mark.parametrize(
    ("target", "prompts", "named"),
    [
        ({**TARGET, "vocab_size": 5}, PROMPTS, "target.vocab_size"),
        (TARGET, [*PROMPTS[:-1], [1, 2]], "prompts"),
    ],
)
def test_a_folder_of_another_target_or_other_prompts_is_refused(
    tmp_path: Path, target: dict[str, object], prompts: list[list[int]], named: str
) -> None:
    data.open_folder(tmp_path, TARGET, TAPS, PROMPTS, CONFIG)
    with pytest.raises(ValueError, match=f"data.json: {named}="):
        data.open_folder(tmp_path, target, TAPS, prompts, CONFIG)
