"""Image encoders: an image's embeddings have the same bits whatever else is computed, and with any torch settings."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftproof import LLM
from draftproof.engine.encoders import CertifiedEncoder, name_of
from draftproof.engine.items import ItemStore
from draftproof.engine.loading import build
from draftproof.frontend.images import ImageReader
from draftproof.models.config import read_vision
from draftproof.models.image_encoder import ImageEncoder
from draftproof.models.weights import Weights
from draftproof.runtime.threads import threads
from tests.frontend.images.cases import FAMILIES, GREEDY, PROMPTS
from tests.made.vision import HIDDEN, picture

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def encoding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> tuple[ImageEncoder, list[Tensors]]:
    """(a family's encoder, its inputs for four images)."""
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder)
    pictures = [picture(w, h, seed) for seed, (w, h) in enumerate([(64, 24), (30, 50), (90, 90), (20, 21)])]
    vision, device = read_vision(folder), torch.device("cpu")
    assert vision is not None
    encoder = ImageEncoder(vision, Weights.open(folder), device, getattr(torch, dtype))
    inputs = ImageReader(vision, ItemStore(HIDDEN, device, torch.float32, 1), 1024).read(pictures)
    return encoder, [dict(given.tensors) for given in inputs]


def _unaligned(tensor: Tensor) -> Tensor:
    """A copy whose address is aligned to the element size only."""
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
    """Embeddings computed while three threads multiply matrices, each with all of torch's threads."""
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


def test_an_images_embeddings_have_the_same_bits_in_every_way(
    encoding: tuple[ImageEncoder, list[Tensors]],
) -> None:
    encoder, images = encoding
    expected = [encoder(given) for given in images]
    assert len({tuple(e.float().flatten()[:8].tolist()) for e in expected}) == 4
    orders = itertools.cycle(([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 2, 3]))
    for (name, way), order in zip(WAYS.items(), orders, strict=False):
        for number in order:
            assert torch.equal(way(encoder, images[number]), expected[number]), (name, number)


def test_the_data_would_show_a_difference(encoding: tuple[ImageEncoder, list[Tensors]], dtype: str) -> None:
    """Wrong twins: without its own settings an encoder follows the caller's; a sum's bits depend on its order."""
    if dtype != "float32":
        pytest.skip("autocast has nothing to change")
    encoder, images = encoding
    expected = encoder(images[0])
    given = {name: tensor for name, tensor in images[0].items() if name in encoder._inputs}
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoder._module.get_image_features(**given).pooler_output
    embeds = found if isinstance(found, Tensor) else torch.cat([x.view(-1, x.shape[-1]) for x in found])
    rows = embeds.reshape(len(expected), -1).to(expected.dtype)
    assert not torch.equal(rows, expected[:, : rows.shape[1]])  # the later columns are added after layers


class Counting:
    """An encoder that records the number of threads of its calls; `follows`: its bits depend on that number."""

    def __init__(self, follows: bool) -> None:
        self.counts: list[int] = []
        self._follows = follows

    def __call__(self, tensors: Tensors) -> Tensor:
        self.counts.append(torch.get_num_threads())
        made = tensors["pixel_values"].clone()
        made[-1, -1] += 1e-6 * self.counts[-1] * self._follows
        return made


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_image_shows_whether_bits_follow_threads(tmp_path: Path, count: int) -> None:
    given = {"pixel_values": torch.rand(4, 8)}
    with threads(count):
        for _ in range(2):  # a refusal is not stored
            encoder = Counting(follows=True)
            certified = CertifiedEncoder(encoder, "one", cache_dir=tmp_path)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="exact=False"):
                    certified(given)
            assert encoder.counts == [count, 2 if count == 1 else 1] * 2
        encoder = Counting(follows=False)
        certified = CertifiedEncoder(encoder, "one", cache_dir=tmp_path)
        assert all(torch.equal(certified(given), given["pixel_values"]) for _ in range(2))
        assert encoder.counts == [count, 2 if count == 1 else 1, count]
        known, other = Counting(follows=False), Counting(follows=False)
        CertifiedEncoder(known, "one", cache_dir=tmp_path)(given)
        CertifiedEncoder(other, "another", cache_dir=tmp_path)(given)
        assert len(known.counts) == 1 and len(other.counts) == 2


def test_embeddings_that_follow_threads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "name_of", lambda *given: str(tmp_path))  # never certified before
    FAMILIES["llava"](tmp_path / "model")
    encode = ImageEncoder.__call__

    def following(self: ImageEncoder, tensors: Tensors) -> Tensor:
        return encode(self, tensors) * (1 + 0.01 * torch.get_num_threads())

    monkeypatch.setattr(ImageEncoder, "__call__", following)
    for exact in (True, False):
        with LLM(str(tmp_path / "model"), dtype="float32", exact=exact, num_kv_blocks=64) as llm:
            image, text = llm.generate([PROMPTS[0], PROMPTS[3]], GREEDY, use_tqdm=False)
            assert ("exact=False" in str(image.error)) == exact and text.error is None


def test_a_certificate_is_of_an_encoder_and_its_dtype(tmp_path: Path) -> None:
    found = []
    for family in ("llava", "pixtral"):
        FAMILIES[family](tmp_path / family)
        vision = read_vision(tmp_path / family)
        assert vision is not None
        found += [name_of(vision, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert len(set(found)) == 4


def test_progress_of_encoding_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image counts once: also cached ones, and, at the end, those that the prefix cache made unnecessary."""
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
