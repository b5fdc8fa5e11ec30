"""Prompts with images: what transformers computes, and what an image is to the engine: a content, rows, embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.bench.compare import compare
from tests.frontend.images.cases import BARE, GREEDY, PARAMS, PROMPTS, A, C, prompt, seen, text, theirs
from tests.made import vision
from tests.made.pictures import encoded
from tests.made.vision import IMAGE, picture


def test_logits_and_greedy_ids_are_transformers(each: tuple[Any, Path]) -> None:
    model, folder = each
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), dtype="float32", enforce_eager=True, enable_prefix_caching=False) as llm:
        logits = seen(llm)
        for number, given in enumerate((PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[4], BARE)):
            ids = llm.generate(given, params, use_tqdm=False)[0].outputs[0].token_ids
            expected = theirs(model, folder, given, ids)
            assert ids == expected.argmax(-1).tolist() and len(ids) == 8, number
            torch.testing.assert_close(torch.cat([x[-1:] for x in logits]), expected, atol=1e-4, rtol=1e-4)
            logits.clear()


@pytest.mark.parametrize(
    ("tower", "strategy"),
    [("clip_vision_model", "full"), ("siglip_vision_model", "full"), ("siglip_vision_model", "default")],
)
def test_rows_of_an_encoder_are_those_that_its_config_selects(
    tmp_path: Path, tower: str, strategy: str
) -> None:
    """CLIP has a row that is about the whole image, and the first one is selected or not, whatever it is."""
    model = vision.llava(tmp_path, tower, strategy)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", enforce_eager=True) as llm:
        logits = seen(llm)
        ids = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].token_ids
        expected = theirs(model, tmp_path, PROMPTS[1], ids)
        torch.testing.assert_close(torch.cat([x[-1:] for x in logits]), expected, atol=1e-4, rtol=1e-4)


def test_experts_are_read_as_published_and_as_transformers_saves_them(tmp_path: Path) -> None:
    found = []
    for published in (True, False):
        vision.qwen3_vl_moe(tmp_path / str(published), published=published)
        with LLM(str(tmp_path / str(published)), dtype="float32") as llm:
            found.append(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False))
    assert not compare(*found) and not found[0][0].error


def test_a_prefix_is_shared_by_the_content_of_its_images(made: tuple[Any, Path]) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4}
    first, same, other = (prompt([x], text(9, 0), text(9, 1)) for x in (A, A.copy(), C))
    with (
        LLM(str(made[1]), **settings) as llm,
        LLM(str(made[1]), enable_prefix_caching=False, **settings) as fresh,
    ):
        assert A.size == C.size
        expected = fresh.generate([first, other], GREEDY, use_tqdm=False)
        assert expected[0].outputs[0].token_ids != expected[1].outputs[0].token_ids
        found = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in (first, same, other, first)]
        assert not compare([expected[0], expected[0], expected[1], expected[0]], found)
        cached = [o.metrics.num_cached_tokens for o in found]
        size = len(found[0].prompt_token_ids)
        before = 8  # nine ids and one that begins an image: two whole blocks
        assert cached[0] == 0 and cached[1] == cached[3] >= size - 4 and cached[2] == before
        assert llm.requests.inputs._store.num_encoded == 2
        within = prompt([A], text(9, 0), text(3, 5))  # goes another way behind the image
        assert not compare(
            fresh.generate([within], GREEDY, use_tqdm=False), llm.generate([within], GREEDY, use_tqdm=False)
        )


def test_what_was_forgotten_is_encoded_again(made: tuple[Any, Path], plain: list[RequestOutput]) -> None:
    with LLM(str(made[1]), dtype="float32", max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        store = llm.requests.inputs._store
        store.max_bytes = 1
        assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert store.num_encoded > 3 and len(store._embeddings) == 1
        assert not store._inputs, "what nobody asks for is nobody's"


def test_an_image_may_be_given_in_many_forms(made: tuple[Any, Path], tmp_path: Path) -> None:
    data = encoded(A, "PNG")
    (tmp_path / "a.png").write_bytes(data)
    pixels = np.asarray(A)
    forms: list[Any] = [A, str(tmp_path / "a.png"), tmp_path / "a.png", data, pixels, torch.tensor(pixels)]
    forms += [pixels.transpose(2, 0, 1)]
    with LLM(str(made[1]), dtype="float32") as llm:
        expected = llm.generate(prompt([A], text(5, 0), text(5, 1)), GREEDY, use_tqdm=False)
        for form in forms:
            found = llm.generate(prompt(form, text(5, 0), text(5, 1)), GREEDY, use_tqdm=False)
            assert not compare(expected, found)
        assert llm.requests.inputs._store.num_encoded == 1


def test_prompts_without_sense_are_refused(made: tuple[Any, Path]) -> None:
    with LLM(str(made[1]), dtype="float32") as llm:
        for ids, data, words in (
            ([1, 2], {"image": [A]}, "has 0 places for images.*1 are given"),
            ([IMAGE], {}, "has 1 places for images.*0 are given"),
            ([IMAGE], {"audio": [1]}, "multi_modal_data"),
            # the last one is never looked at
            (
                [IMAGE] * 99,
                {"image": [A] * 98 + [b"none"]},
                "image ..: with it there are 10.. rows .* leave no room",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                llm.generate({"prompt_token_ids": ids, "multi_modal_data": data}, GREEDY, use_tqdm=False)


def test_a_model_of_text_reads_no_images() -> None:
    with LLM(dtype="float32") as llm, pytest.raises(ValueError, match="reads no images"):
        llm.generate(prompt([A], [1], [2]), GREEDY, use_tqdm=False)


def test_an_image_that_fails_its_encoder_costs_nobody_else(
    made: tuple[Any, Path], plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(made[1]), dtype="float32") as llm:
        store = llm.requests.inputs._store
        encoder = store.encoders["image"]

        def failing(tensors: Any) -> torch.Tensor:
            if int(tensors["image_grid_thw"][0, 1]) == 2:
                raise RuntimeError("no such picture")
            return encoder(tensors)

        store.encoders["image"] = failing
        bad = prompt([picture(60, 8, 9)], [], text(3, 0))
        outputs = llm.generate([PROMPTS[0], bad, PROMPTS[3]], [PARAMS[0], GREEDY, PARAMS[3]], use_tqdm=False)
        assert "no such picture" in str(outputs[1].error)
        assert not compare([plain[0], plain[3]], [outputs[0], outputs[2]])
