"""Finding and reading model files: a missing, truncated or wrong file is reported once, with its name."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftproof.models.loading import read_generation_config, resolve
from draftproof.models.weights import Weights

TENSORS = {"a.weight": torch.arange(12.0).view(3, 4), "b.weight": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"part-{i}.safetensors")
    index = {"weight_map": {name: f"part-{i}.safetensors" for i, name in enumerate(TENSORS)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_tensors_are_found_by_name_in_one_file_or_many(kind: str, request: pytest.FixtureRequest) -> None:
    weights = Weights.open(request.getfixturevalue(kind))
    assert weights.names() == list(TENSORS)
    assert "a.weight" in weights
    assert "c.weight" not in weights
    for name, tensor in TENSORS.items():
        assert torch.equal(weights.get(name, tensor.shape), tensor)
    assert weights.unused() == []


def test_a_lone_file_of_another_name_is_taken_and_several_are_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "draft.safetensors")
    assert Weights.open(tmp_path).names() == list(TENSORS)
    save_file(TENSORS, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"several \(draft.safetensors, other.safetensors\)"):
        Weights.open(tmp_path)


def test_a_folder_with_pickled_weights_only_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors files: none; download"):
        Weights.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"only safetensors are read"):
        Weights.open(tmp_path)


def test_a_missing_tensor_names_its_neighbours(single: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor 'model.a.weight' is missing; similar ones there: a.weight"):
        Weights.open(single).get("model.a.weight")


def test_a_wrong_shape_names_both(single: Path) -> None:
    with pytest.raises(ValueError, match=r"'a.weight' has shape \[3, 4\].*\[4, 4\]"):
        Weights.open(single).get("a.weight", (4, 4))


def test_unused_tensors_are_listed_less_the_ignorable(single: Path) -> None:
    weights = Weights.open(single)
    weights.get("a.weight")
    assert weights.unused() == ["b.weight"]
    assert weights.unused([r"b\..*"]) == []
    with pytest.raises(ValueError, match=r"1 tensors have no place in this model, such as b.weight"):
        weights.check_used(lambda name: name.startswith("b"))


@pytest.mark.parametrize("keep", [4, 60, -8])
def test_a_file_cut_short_is_named_with_its_size(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"model.safetensors \({path.stat().st_size} bytes\).*cut short"):
        Weights.open(single)


def test_a_missing_shard_and_a_stale_index_are_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["c.weight"] = "part-0.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"part-0.safetensors: tensor 'c.weight'.*not in it"):
        Weights.open(sharded)
    (sharded / "part-1.safetensors").unlink()
    del raw["weight_map"]["c.weight"]
    index.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"names part-1.safetensors, which is not there"):
        Weights.open(sharded)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"no 'weight_map'"):
        Weights.open(sharded)


def test_a_model_is_a_folder_with_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match=r"is a file; give the folder"):
        resolve(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match=r"no such directory; check the path"):
        resolve(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"model='tiny': no such directory; .* set DRAFTPROOF_MODEL=tiny"):
        resolve("tiny")


def test_a_hub_id_that_cannot_be_had_offline_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("offline mode is on")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"'owner/name', revision='v1'.*offline mode is on.*folder's path"):
        resolve("owner/name", "v1")


def test_a_hub_id_fetches_no_code_and_no_pickles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    calls: list[tuple[str, dict[str, object]]] = []

    def fetch(name: str, **options: object) -> str:
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("owner/name", "v1") == tmp_path
    ((name, options),) = calls
    assert (name, options["revision"]) == ("owner/name", "v1")
    patterns = options["allow_patterns"]
    assert isinstance(patterns, list)

    def fetched(file: str) -> bool:
        return any(fnmatch(file, pattern) for pattern in patterns)

    assert all(map(fetched, ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model"]))
    assert not any(map(fetched, ["pytorch_model.bin", "modeling_llama.py", "tokenizer.py", "model.pth"]))


def test_generation_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path).eos_token_ids == ()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [0, 2], "temperature": 0.6, "top_k": 20, "do_sample": True}))
    defaults = read_generation_config(tmp_path)
    assert (defaults.eos_token_ids, defaults.temperature, defaults.top_k) == ((0, 2), 0.6, 20)
    assert (defaults.top_p, defaults.min_p, defaults.repetition_penalty) == (None, None, None)
    path.write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(ValueError, match=r"generation_config.json: temperature='hot'"):
        read_generation_config(tmp_path)
