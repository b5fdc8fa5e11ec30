"""Models that read images, shared by the files of tests that ask them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, RequestOutput
from tests.frontend.images.cases import FAMILIES, PARAMS, PROMPTS, A, drafters_for
from tests.made import vision
from tests.made.pictures import encoded


@pytest.fixture(scope="module", params=FAMILIES)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model, its folder), of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    return FAMILIES[request.param](folder), folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Those of the family with three axes."""
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    return vision.qwen2_5_vl(folder), folder


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return drafters_for("qwen2_5_vl", tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="session")
def plain(made: tuple[Any, Path]) -> list[RequestOutput]:
    with LLM(str(made[1]), dtype="float32", max_num_seqs=1, enable_prefix_caching=False) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not any(o.error for o in outputs)
        return outputs


@pytest.fixture(scope="session")
def chatting(made: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a model with a chat template, a folder of pictures that messages may name)."""
    folder = tmp_path_factory.mktemp("chat")
    for file in made[1].iterdir():
        (folder / file.name).symlink_to(file)
    vision.tokenizer(folder)
    pictures = tmp_path_factory.mktemp("pictures")
    (pictures / "a b.png").write_bytes(encoded(A, "PNG"))
    return folder, pictures
