"""Videos as frames: what transformers computes of them, whatever is drafted, and however prompts are batched."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from draftproof.frontend.videos import VideoReader
from tests.frontend.images.cases import GREEDY, seen, text
from tests.made import vision
from tests.made.vision import IMAGE, VIDEO, picture
from tests.slow import some

MODELS = {"qwen2_5_vl": vision.qwen2_5_vl, "qwen3_vl": vision.qwen3_vl}
START, END = 92, 93
FRAMES = [picture(30, 24, seed) for seed in range(20, 25)]  # the last group is filled up
SLOW = {"fps": 2.0, "frames_indices": [0, 2, 4, 6, 8], "total_num_frames": 10}  # one frame a second


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param](folder)
    vision.tokenizer(folder)
    return model, folder


def prompt(video: Any, *texts: list[int], image: Any = None) -> dict[str, Any]:
    """A video after the first text, an image after the second one."""
    ids, data = [*texts[0], START, VIDEO, END, *texts[1]], {"video": video}
    if image is not None:
        ids, data = [*ids, START, IMAGE, END, *texts[2]], {**data, "image": image}
    return {"prompt_token_ids": ids, "multi_modal_data": data}


PROMPTS = [
    prompt(FRAMES, text(5, 0), text(4, 1)),
    prompt((FRAMES, SLOW), text(7, 2), text(9, 3), text(3, 4), image=picture(30, 50, 1)),
    prompt([(FRAMES[:1], {}), (FRAMES[2:4], {"fps": 1})], [3, START, VIDEO, END], text(6, 6)),
]


def tensors_of(model: Any, llm: LLM, given: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """(a prompt's ids, what transformers' model reads beside them), of tensors that ours prepared."""
    inputs = llm.requests.inputs
    assert inputs.images is not None
    prepared = inputs.prepare(given, GREEDY)
    data = given["multi_modal_data"]
    videos = [
        [p for p in parts if not isinstance(p, list)]
        for parts in VideoReader(inputs.images, llm.tokenizer).read(data["video"])
    ]
    groups = [group.tensors for video in videos for group in video]
    kept: dict[str, Any] = {
        "pixel_values_videos": torch.cat([group["pixel_values"] for group in groups]),
        "video_grid_thw": torch.cat(
            [v[0].tensors["image_grid_thw"] * torch.tensor([[len(v), 1, 1]]) for v in videos]
        ),
    }
    if "image" in data:
        kept |= inputs.images.read(data["image"])[0].tensors
    if model.config.model_type == "qwen2_5_vl":
        listed = (
            data["video"]
            if isinstance(data["video"], list) and isinstance(data["video"][0], tuple)
            else [data["video"]]
        )
        sampled = [
            SLOW["fps"] * 5 / 10 if v[1] == SLOW else v[1].get("fps", 24) if isinstance(v, tuple) else 24
            for v in listed
        ]
        kept["second_per_grid_ts"] = [2 / fps for fps in sampled]

    return list(prepared.prompt_token_ids), kept


def kinds_of(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()


def theirs(model: Any, llm: LLM, given: Mapping[str, Any], answer: Sequence[int]) -> torch.Tensor:
    """transformers' logits of the rows that an answer was sampled from."""
    prompt_ids, kept = tensors_of(model, llm, given)
    tokens = torch.tensor([[*prompt_ids, *answer[:-1]]])
    kinds = kinds_of(tokens)
    model.model.rope_deltas = None
    told: dict[str, Any] = {"mm_token_type_ids": kinds}
    if model.config.model_type == "qwen2_5_vl":
        told = {"position_ids": published_positions(model, kinds[0].tolist(), kept)}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens, **told, **kept).logits[0]
    return found[len(prompt_ids) - 1 :]


def published_positions(model: Any, kinds: list[int], given: Mapping[str, Any]) -> torch.Tensor:
    """Where Qwen2.5-VL's authors say that rows stand [3, 1, T]: text goes on one further than all that is before it,
    times included (transformers #35569). transformers 5.3 and later leave times out (`get_rope_index`)."""
    grids = {1: list(given.get("image_grid_thw", ())), 2: list(given.get("video_grid_thw", ()))}
    seconds = list(given["second_per_grid_ts"])
    pace = model.config.vision_config.tokens_per_second
    pieces, start = list[torch.Tensor](), 0
    for kind, run in itertools.groupby(kinds):
        length = len(list(run))
        if kind == 0:
            pieces.append(torch.arange(start, start + length).expand(3, -1))
        else:
            interval = pace * seconds.pop(0) if kind == 2 else 1
            pieces.append(model.model.get_vision_position_ids(start, grids[kind].pop(0), 1, 2, interval))
        assert pieces[-1].shape[1] == length
        start = int(pieces[-1].max()) + 1
    return torch.cat(pieces, dim=1)[:, None]


def test_logits_and_greedy_ids_are_transformers(made: tuple[Any, Path]) -> None:
    model, folder = made
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), dtype="float32", enforce_eager=True, enable_prefix_caching=False) as llm:
        logits = seen(llm)
        for number, given in enumerate(PROMPTS):
            ids = llm.generate(given, params, use_tqdm=False)[0].outputs[0].token_ids
            expected = theirs(model, llm, given, ids)
            assert ids == expected.argmax(-1).tolist() and len(ids) == 6, number
            torch.testing.assert_close(torch.cat([x[-1:] for x in logits]), expected, atol=1e-4, rtol=1e-4)
            logits.clear()


def test_generate_of_transformers_agrees_where_no_time_lies_beyond_a_side(made: tuple[Any, Path]) -> None:
    """What a user of both sees. Where a time does, its positions of a prompt and of an answer are two conventions."""
    model, folder = made
    given = prompt((FRAMES, {"fps": 12.0}), text(5, 0), text(4, 1))  # a group a position, but for the first
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), dtype="float32") as llm:
        found = llm.generate(given, params, use_tqdm=False)[0].outputs[0].token_ids
        ids, kept = tensors_of(model, llm, given)
    tokens = torch.tensor([ids])
    model.model.rope_deltas = None
    answer = model.generate(
        tokens, mm_token_type_ids=kinds_of(tokens), max_new_tokens=8, do_sample=False, **kept
    )
    assert answer[0, len(ids) :].tolist() == found


@pytest.mark.parametrize("chunk", some([1, 7, 64], [1, 7]))
def test_output_depends_on_neither_chunks_nor_drafter(made: tuple[Any, Path], chunk: int) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4}
    with LLM(str(made[1]), enable_prefix_caching=False, **settings) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert not any(o.error for o in plain)
    for drafting in ({"method": "ngram", "prompt_lookup_min": 1}, {"model": str(made[1])}):
        config = {**drafting, "num_speculative_tokens": 3}
        rows = {"max_num_batched_tokens": chunk, "max_num_seqs": 1 if chunk == 1 else 3}
        with LLM(str(made[1]), speculative_config=config, **settings, **rows) as llm:
            for _ in range(2):
                assert not compare(plain, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
            speculation = llm.stats.speculation
            assert llm.stats.num_cached_tokens > 0 and llm.stats.num_drafter_faults == 0
            if "model" in drafting and chunk > 1:  # the target itself, greedily
                assert speculation.num_accepted_tokens == speculation.num_draft_tokens > 20


def test_videos_that_begin_alike_share_what_is_alike(made: tuple[Any, Path]) -> None:
    """Frames at other times stand elsewhere, or behind other words."""
    first, same = prompt((FRAMES, SLOW), text(5, 0), [1, 2]), prompt((FRAMES[:], SLOW), text(5, 0), [3, 4])
    faster = prompt((FRAMES, {**SLOW, "fps": 4.0}), text(5, 0), [1, 2])
    longer = prompt((FRAMES[:2] + FRAMES[:3], SLOW), text(5, 0), [1, 2])
    with (
        LLM(str(made[1]), dtype="float32", block_size=4) as llm,
        LLM(str(made[1]), dtype="float32", enable_prefix_caching=False) as fresh,
    ):
        given = [first, same, faster, longer]
        found = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in given]
        assert not compare(fresh.generate(given, GREEDY, use_tqdm=False), found)
        none, all_, other, begun = (o.metrics.num_cached_tokens for o in found)
        assert none == 0 and begun < all_ and all_ >= len(found[0].prompt_token_ids) - 8
        # the test's tokenizer has no words for times
        assert other < all_ or made[0].config.model_type == "qwen3_vl"
        assert begun >= 12, "the words before and the first group"
        texts = {tuple(o.outputs[0].token_ids) for o in found}
        assert len(texts) > 1


class Words:
    """A tokenizer that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.asked.append(text)
        return [7, len(self.asked)]


def test_groups_hold_their_frames_in_order(made: tuple[Any, Path]) -> None:
    with LLM(str(made[1]), dtype="float32") as llm:
        images = llm.requests.inputs.images
        assert images is not None
        words = Words()
        (parts,) = VideoReader(images, words).read([(FRAMES, SLOW)])  # type: ignore[arg-type]
        groups = [p for p in parts if not isinstance(p, list)]
        assert len(groups) == 3
        for number, group in enumerate(groups):
            grid = group.tensors["image_grid_thw"][0].tolist()
            pair = [
                FRAMES[min(2 * number + i, 4)].resize((4 * grid[2], 4 * grid[1]), resample=3)
                for i in range(2)
            ]
            pixels = np.stack([np.asarray(frame, dtype=np.float32) for frame in pair]) / 255
            mean, std = (
                np.array(x, dtype=np.float32)
                for x in (images.processor.image_mean, images.processor.image_std)
            )
            pixels = ((pixels - mean) / std).transpose(3, 0, 1, 2)  # channel, frame, height, width
            patches = [
                pixels[:, :, 8 * i + 4 * a : 8 * i + 4 * a + 4, 8 * j + 4 * b : 8 * j + 4 * b + 4].reshape(-1)
                for i in range(grid[1] // 2)
                for j in range(grid[2] // 2)
                for a in range(2)
                for b in range(2)
            ]
            np.testing.assert_allclose(group.tensors["pixel_values"], np.stack(patches), atol=1e-5)
        if made[0].config.model_type == "qwen3_vl":
            assert words.asked == ["<0.5 seconds>", "<2.5 seconds>", "<4.0 seconds>"]
            assert [p for p in parts if isinstance(p, list)][:2] == [[7, 1, START], [END]]
        else:
            assert words.asked == [] and [int(g.places.axes_3N[0, 0]) for g in groups if g.places] == [
                0,
                8,
                16,
            ]


def jpeg(number: int) -> str:
    out = io.BytesIO()
    FRAMES[number].save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def test_forms_of_a_video(made: tuple[Any, Path]) -> None:
    frames = FRAMES[:4]
    array = np.stack([np.asarray(frame) for frame in frames])
    url = "data:video/jpeg;base64," + ",".join(map(jpeg, range(4)))
    with LLM(str(made[1]), dtype="float32") as llm:
        expected = llm.generate(prompt(frames, [5], [6, 7]), GREEDY, use_tqdm=False)
        forms = [array, torch.tensor(array), [frames], [array], (array, {}), [np.asarray(f) for f in frames]]
        for form in forms:
            assert not compare(expected, llm.generate(prompt(form, [5], [6, 7]), GREEDY, use_tqdm=False))
        num_encoded = llm.requests.inputs._store.num_encoded
        assert num_encoded == 2, "each group once"
        words = {"type": "text", "text": " w6 w7"}
        parts = [{"type": "video", "video": frames}, {"type": "video_url", "video_url": {"url": url}}]
        found = [
            llm.chat([{"role": "user", "content": [part, words]}], GREEDY, use_tqdm=False)[0]
            for part in parts
        ]
        assert not compare(found[:1], found[1:]) and not found[0].error
        assert llm.requests.inputs._store.num_encoded == num_encoded
        for url, said in (
            ("http://x/a.mp4", "not decoded"),
            ("data:video/jpeg;base64," + "," * 800, "has 801 frames"),
        ):
            part = {"type": "video_url", "video_url": {"url": url}}
            with pytest.raises(ValueError, match=said):
                llm.chat([{"role": "user", "content": [part]}])


def test_frames_of_messages_name_no_other_files(made: tuple[Any, Path], tmp_path: Path) -> None:
    for number, frame in enumerate(FRAMES[:2]):
        frame.save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(2)]
    words = {"type": "text", "text": " w6 w7"}

    def chats(frames: list[Any]) -> list[Any]:
        forms = (frames, (frames, {"fps": 3.0}), [frames])
        return [[{"role": "user", "content": [{"type": "video", "video": form}, words]}] for form in forms]

    with LLM(str(made[1]), dtype="float32") as llm:
        for chat in chats(paths):
            with pytest.raises(ValueError, match=r"messages.0.: content.0.: .*not inside"):
                llm.chat(chat, GREEDY, use_tqdm=False)
        expected = [llm.chat(chat, GREEDY, use_tqdm=False)[0] for chat in chats(FRAMES[:2])[:2]]
    with LLM(str(made[1]), dtype="float32", allowed_local_media_path=str(tmp_path)) as llm:
        found = [llm.chat(chat, GREEDY, use_tqdm=False)[0] for chat in chats(paths)[:2]]
        assert not compare(expected, found) and not any(output.error for output in found)


SENSELESS: list[tuple[Any, str]] = [
    (FRAMES[:1] * 800, "video 0: has 800 frames"),
    ([FRAMES[0], picture(8, 8, 1)], "video 0: has frames of 2 sizes"),
    ([FRAMES[0], b"none"], "video 0: frame 1"),
    (np.zeros((2, 8, 8, 3)), "video 0: frame 0.*must be uint8"),
    (5, "video 0=5: must be its frames"),
    ((FRAMES, {"fsp": 3}), "fsp"),
    ((FRAMES, {"fps": 0}), "fps"),
    ((FRAMES, {"fps": 1e-300}), "frames a second"),
    ((FRAMES, {"frames_indices": [1]}), "frames_indices: are 1"),
    ((FRAMES, {"frames_indices": [10**400] * 5}), "must be numbers of frames"),
    ((FRAMES, {"total_num_frames": -5, "fps": 2}), "total_num_frames=-5"),
    ((FRAMES, {"total_num_frames": "5"}), "total_num_frames='5'"),
    ([FRAMES, FRAMES], "has 1 places for videos.*2 are given"),
]
# What the family refuses whose times are positions and whose bounds are a frame's: three groups, 16000 positions from
# one to the next; and more rows than a prompt has room for, which nobody makes pixels of.
PACED: list[tuple[Any, str]] = [
    ((FRAMES, {"fps": 0.001}), "stands at position 16"),
    (FRAMES[:1] * 700, "video 0: with it there are .* rows .* max_model_len=1024"),
]


def test_videos_without_sense_get_one_error_each(made: tuple[Any, Path]) -> None:
    paced = made[0].config.model_type == "qwen2_5_vl"
    senseless = [*SENSELESS, *(PACED if paced else [])]
    bad, good = [prompt(video, [5], [6]) for video, _ in senseless], prompt(FRAMES, [5], [6, 7])
    with LLM(str(made[1]), dtype="float32") as llm:
        *refused, last = llm.generate([*bad, good], GREEDY, use_tqdm=False)
        assert all(output.error is not None for output in refused) and last.error is None
        for video, (_, words) in zip(bad, senseless, strict=True):
            with pytest.raises(ValueError, match=words):
                llm.generate(video, GREEDY, use_tqdm=False)


def test_an_answer_ends_where_positions_end(made: tuple[Any, Path]) -> None:
    """After a video whose times reach further than its rows."""
    apart = {**SLOW, "fps": 0.05}  # three groups, 320 positions from one to the next
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    with (
        LLM(str(made[1]), dtype="float32", max_model_len=700) as plain,
        LLM(str(made[1]), dtype="float32", max_model_len=700, speculative_config=config) as llm,
    ):
        given = prompt((FRAMES, apart), text(5, 0), text(3, 1))
        found = plain.generate(given, params, use_tqdm=False)
        assert not compare(found, llm.generate(given, params, use_tqdm=False))
        num_left = 700 - len(found[0].prompt_token_ids)
        if (
            made[0].config.model_type == "qwen2_5_vl"
        ):  # five words, a mark, the last group, a mark, three words
            num_left = 700 - (6 + 2 * 320 + 1 + 1 + 3)
        assert (
            len(found[0].outputs[0].token_ids) == num_left and found[0].outputs[0].finish_reason == "length"
        )


def test_a_family_without_videos_says_so(tmp_path: Path) -> None:
    vision.llava(tmp_path / "llava")
    with (
        LLM(str(tmp_path / "llava"), dtype="float32") as llm,
        pytest.raises(ValueError, match="sees no videos"),
    ):
        llm.generate(
            {"prompt_token_ids": [1, 2], "multi_modal_data": {"video": FRAMES}}, GREEDY, use_tqdm=False
        )
