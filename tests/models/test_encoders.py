"""Encoders of images: an image's embeddings have the same bits whatever else is computed, and however torch is set."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftproof import LLM
from draftproof.engine.items import ItemInput
from draftproof.models.vision import ImageEncoder
from draftproof.runtime.threads import threads
from tests.frontend.test_images import FAMILIES
from tests.made.vision import picture

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def encoding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> tuple[ImageEncoder, list[Tensors]]:
    """(a family's encoder, what it reads of four images)."""
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder)
    pictures = [picture(w, h, seed) for seed, (w, h) in enumerate([(64, 24), (30, 50), (90, 90), (20, 21)])]
    with LLM(str(folder), dtype=dtype, max_model_len=256) as llm:
        inputs: list[ItemInput] = llm.requests.inputs.images.read(pictures)  # type: ignore[union-attr]
        encoder = llm.requests.inputs._store.encoders["image"]  # type: ignore[union-attr]
        assert isinstance(encoder, ImageEncoder)
        return encoder, [dict(given.tensors) for given in inputs]


def _unaligned(tensor: Tensor) -> Tensor:
    """A copy at an address that is a multiple of nothing but the size of a number."""
    size = tensor.element_size()
    room = np.zeros(tensor.numel() * size + 128, dtype=np.uint8)
    first = -room.ctypes.data % 64 + size
    there = (
        torch.from_numpy(room[first : first + tensor.numel() * size]).view(tensor.dtype).view(tensor.shape)
    )
    there.copy_(tensor)
    assert there.data_ptr() % 64 == size
    return there


def _beside_others(encoder: ImageEncoder, given: Tensors) -> Tensor:
    """While three threads multiply, with as many threads each as there are."""
    stop = threading.Event()

    def work() -> None:
        matrix = torch.randn(200, 200)
        while not stop.is_set():
            matrix @ matrix

    others = [threading.Thread(target=work) for _ in range(3)]
    for other in others:
        other.start()
    try:
        return encoder(given)
    finally:
        stop.set()
        for other in others:
            other.join()


def _with_threads(count: int) -> Callable[[ImageEncoder, Tensors], Tensor]:
    def run(encoder: ImageEncoder, given: Tensors) -> Tensor:
        with threads(count):
            return encoder(given)

    return run


def _in_autocast(encoder: ImageEncoder, given: Tensors) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return encoder(given)


def _elsewhere(encoder: ImageEncoder, given: Tensors) -> Tensor:
    return encoder({name: _unaligned(tensor) for name, tensor in given.items()})


WAYS: dict[str, Callable[[ImageEncoder, Tensors], Tensor]] = {
    **{f"{count} threads": _with_threads(count) for count in (1, 2, 3, 8)},
    "beside others": _beside_others,
    "in autocast": _in_autocast,
    "elsewhere in memory": _elsewhere,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_images_embeddings_have_the_same_bits_in_every_way(
    encoding: tuple[ImageEncoder, list[Tensors]], way: str
) -> None:
    encoder, images = encoding
    expected = [encoder(given) for given in images]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 2]):
        for number in order:
            found = WAYS[way](encoder, images[number])
            assert torch.equal(found, expected[number]), (way, number)
    assert len({tuple(e.float().flatten()[:8].tolist()) for e in expected}) == 4


def test_the_data_would_show_a_difference(encoding: tuple[ImageEncoder, list[Tensors]], dtype: str) -> None:
    """Wrong twins: without its own settings an encoder follows the caller's; bits of a sum follow its order."""
    if dtype != "float32":
        pytest.skip("autocast has nothing to change")
    encoder, images = encoding
    expected = encoder(images[0])
    given = {name: tensor for name, tensor in images[0].items() if name in encoder._inputs}
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoder._module.get_image_features(**given).pooler_output
    embeds = found if isinstance(found, Tensor) else torch.cat([x.view(-1, x.shape[-1]) for x in found])
    rows = embeds.reshape(len(expected), -1).to(expected.dtype)
    assert not torch.equal(rows, expected[:, : rows.shape[1]])  # behind which lies what is added after layers


def test_progress_of_encoding_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture once, those found too, and those that the prefix cache made unneeded at the end."""
    from draftproof.frontend import llm as module

    bars: list[tuple[str, int, list[int]]] = []

    class Bar:
        def __init__(self, total: int, what: str = "prompts", unit: str = "req") -> None:
            self.total = total
            self.steps: list[int] = []
            bars.append((what, total, self.steps))

        def update(self, count: int) -> None:
            self.steps += [count] if count else []

        def close(self) -> None:
            pass

    from tests.frontend.test_images import GREEDY, PROMPTS

    monkeypatch.setattr(module, "_bar", Bar)
    FAMILIES["llava"](tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        for _ in range(2):
            llm.generate(PROMPTS, GREEDY)
        llm.generate(PROMPTS[3], GREEDY)
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [(what, total) for what, total, _ in bars] == [("prompts", 5), ("images", 3)] * 2 + [
            ("prompts", 1)
        ]
        assert all(sum(steps) == total for _, total, steps in bars)
        assert bars[1][2] == [1, 1, 1] and not llm._items.watchers
