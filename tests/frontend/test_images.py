"""Prompts with images: what transformers computes, whatever is drafted, and however prompts are batched."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.bench.compare import compare
from draftproof.drafters.base import DraftSpec, Proposal, Verified
from draftproof.frontend import images
from draftproof.server import protocol
from tests.made import vision
from tests.made.vision import IMAGE, INTERLEAVED, MROPE, VIDEO, picture
from tests.slow import some

START, END = 92, 93
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=4, max_tokens=16, logprobs=1),
    SamplingParams(temperature=0, max_tokens=20, logprobs=0),
    SamplingParams(temperature=0, max_tokens=9, presence_penalty=0.5, logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, logprobs=1),
]


FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen2_5_vl": vision.qwen2_5_vl,
    "qwen3_vl": vision.qwen3_vl,
    "qwen3_vl_moe": vision.qwen3_vl_moe,
    "llava": vision.llava,
    "gemma3": vision.gemma3,
    "gemma4": vision.gemma4,
    "gemma4, causal": vision.gemma4_causal,
    "pixtral": vision.pixtral,
    "mistral3": vision.mistral3,
}


ROPES = {"qwen2_5_vl": MROPE, "qwen3_vl": INTERLEAVED}


@pytest.fixture(scope="module", params=FAMILIES)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model, its folder), of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    return FAMILIES[request.param](folder), folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Those of the family with three axes."""
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    return vision.qwen2_5_vl(folder), folder


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return drafters_for("qwen2_5_vl", tmp_path_factory.mktemp("drafters"))


def drafters_for(family: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Drafters for the model that `FAMILIES` makes. The small model is of the family where that has several axes."""
    rope, make = ROPES.get(family, MROPE), FAMILIES["qwen3_vl" if family == "qwen3_vl" else "qwen2_5_vl"]
    make(folder / "target")
    make(folder / "small", seed=8, num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    head = vision.eagle3(folder / "eagle3", rope)
    flat = vision.eagle3(folder / "flat", {"rope_type": "default", "rope_theta": 10000.0})
    return {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "suffix": {"method": "suffix"},
        "text model": {"model": vision.text_draft(folder / "text")},
        "eagle3": {"model": head},
        "eagle3, tokens": {"model": head, "image_inputs": "tokens"},
        "eagle3, one axis": {"model": flat},
        "eagle1": {"model": vision.eagle1(folder / "eagle1", rope)},
        "mtp": {"model": vision.mtp(folder / "mtp", folder / "target")},
        "dflash": {"model": vision.dflash(folder / "dflash", rope)},
        "small": {"model": str(folder / "small")},
        "small, tokens": {"model": str(folder / "small"), "image_inputs": "tokens"},
        "chain": {
            "method": "chain",
            "drafters": [{"method": "ngram"}, {"model": str(folder / "small")}, {"model": head}],
        },
    }


def prompt(images: list[Any], *texts: list[int]) -> dict[str, Any]:
    """Texts with the images between them."""
    ids = list(texts[0])
    for text in texts[1:]:
        ids += [START, IMAGE, END, *text]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 89, length).tolist()


A, B, C = picture(30, 50, 1), picture(64, 24, 2), picture(30, 50, 3)
PROMPTS = [
    prompt([A], text(9, 0), text(5, 1)),
    prompt([B, A], text(3, 2), [], text(2, 3)),
    prompt([C], [], text(40, 4) + text(6, 5) * 3),
    {"prompt_token_ids": text(30, 6)},
    prompt([A, B, C], text(1, 7), text(11, 8), text(2, 9), text(1, 10)),
]


def theirs(model: Any, folder: Path, given: dict[str, Any], answer: Sequence[int]) -> torch.Tensor:
    """transformers' logits of the rows that an answer was sampled from: the prompt's last and its own but the last."""
    ids, found = placed(model, folder, given)
    return logits_of(model, [*ids, *answer[:-1]], found)[len(ids) - 1 :]


def placed(model: Any, folder: Path, given: Mapping[str, Any]) -> tuple[list[int], Any]:
    """(a prompt's ids with one for each row of an image, what the processor makes of its images)."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = given["multi_modal_data"]["image"]
    config = model.config
    options = {}
    if config.model_type == "mistral3":
        options = {"patch_size": config.vision_config.patch_size * config.spatial_merge_size}
    found = processor(images=images, return_tensors="pt", **options)
    rows = iter(vision.rows_of_images(model, found, len(images)))
    ids = [i for token in given["prompt_token_ids"] for i in (next(rows) if token == IMAGE else [token])]
    return ids, found


def logits_of(model: Any, ids: list[int], found: Any) -> torch.Tensor:
    tokens = torch.tensor([ids])
    name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    kinds = {} if model.config.model_type in ("llava", "mistral3") else {name: (tokens == IMAGE).int()}
    kept = {key: value for key, value in found.items() if key != "num_soft_tokens_per_image"}
    model.model.rope_deltas = None
    with torch.no_grad():
        return model(input_ids=tokens, **kinds, **kept).logits[0]


def seen(llm: LLM) -> list[torch.Tensor]:
    """Logits of the sampled rows of the steps to come."""
    kept: list[torch.Tensor] = []
    target, logits = llm.engine.runner.target, llm.engine.runner.target.logits

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def __call__(self, *given: Any) -> Any:
            return target(*given)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            kept.append(logits(hidden))
            return kept[-1]

    llm.engine.runner.target = Recorder()  # type: ignore[assignment]
    return kept


def test_logits_and_greedy_ids_are_transformers(each: tuple[Any, Path]) -> None:
    model, folder = each
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), dtype="float32", enforce_eager=True, enable_prefix_caching=False) as llm:
        logits = seen(llm)
        for number in (0, 1, 2, 4):
            ids = llm.generate(PROMPTS[number], params, use_tqdm=False)[0].outputs[0].token_ids
            expected = theirs(model, folder, PROMPTS[number], ids)
            assert ids == expected.argmax(-1).tolist() and len(ids) == 8, number
            torch.testing.assert_close(torch.cat([x[-1:] for x in logits]), expected, atol=1e-4, rtol=1e-4)
            logits.clear()


def test_experts_are_read_as_published_and_as_transformers_saves_them(tmp_path: Path) -> None:
    found = []
    for published in (True, False):
        vision.qwen3_vl_moe(tmp_path / str(published), published=published)
        with LLM(str(tmp_path / str(published)), dtype="float32") as llm:
            found.append(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False))
    assert not compare(*found) and not found[0][0].error


@pytest.fixture(scope="module")
def plain(made: tuple[Any, Path]) -> list[RequestOutput]:
    with LLM(str(made[1]), dtype="float32", max_num_seqs=1, enable_prefix_caching=False) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not any(o.error for o in outputs)
        return outputs


@pytest.fixture(scope="module")
def expected(each: tuple[Any, Path]) -> list[RequestOutput]:
    """Plain decoding of one prompt after the other, of each family."""
    with LLM(str(each[1]), dtype="float32", max_num_seqs=1, enable_prefix_caching=False) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not any(o.error for o in outputs)
        return outputs


SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "preempted": {"num_kv_blocks": 52, "max_model_len": 144, "block_size": 4},
    "preempted, long": {"num_kv_blocks": 100, "max_model_len": 300, "block_size": 4},  # Gemma 4's images
    "small blocks": {"block_size": 4},
}


NAMES = [
    *(
        None,
        "ngram",
        "suffix",
        "text model",
        "eagle3",
        "eagle3, tokens",
        "eagle3, one axis",
        "eagle1",
        "mtp",
        "dflash",
    ),
    *("small", "small, tokens", "chain"),
]


def check(folder: Path, plain: list[RequestOutput], config: Mapping[str, Any] | None, settings: str) -> None:
    """Under some settings output is what it was without a drafter in a batch of one."""
    drafting = {} if config is None else {"speculative_config": {**config, "num_speculative_tokens": 3}}
    with LLM(str(folder), dtype="float32", **drafting, **SETTINGS[settings]) as llm:
        for _ in range(2):  # the second time, what was cached is found
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert not compare(plain, outputs)
        assert llm.stats.num_cached_tokens > 0 or settings == "preempted"
        assert (llm.stats.num_preemptions > 0) == (settings == "preempted")
        assert llm.stats.num_drafter_faults == 0
        if config is not None and settings != "chunks of 1":
            assert llm.stats.speculation.num_draft_tokens > 0
        assert llm.requests.inputs._store.num_encoded == 3, "each picture is encoded once"
        own = llm.engine.runner.items._own.values()
        assert all(store.num_encoded == 3 for store in own), "by a drafter that has an encoder, too"


SHORT = [settings for settings in SETTINGS if settings != "preempted, long"]
# Every drafter where chunks end within images, and preempted; every setting for a few drafters of different kinds.
CELLS = [
    *itertools.product(["chunks of 7", "preempted"], NAMES),
    *itertools.product(
        ["one batch", "chunks of 1", "chunks of 64", "small blocks"], [None, "eagle3", "small"]
    ),
]


@pytest.mark.parametrize(("settings", "name"), some(itertools.product(SHORT, NAMES), CELLS))
def test_output_depends_on_neither_batch_nor_drafter(
    made: tuple[Any, Path],
    plain: list[RequestOutput],
    drafters: dict[str, dict[str, Any]],
    settings: str,
    name: str | None,
) -> None:
    check(made[1], plain, None if name is None else drafters[name], settings)


@pytest.fixture(scope="module")
def deep(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[RequestOutput], dict[str, dict[str, Any]]]:
    """(the folder of the family with deepstack, its plain output, drafters for it)."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    drafters = drafters_for("qwen3_vl", folder)
    with LLM(str(folder / "target"), dtype="float32", max_num_seqs=1, enable_prefix_caching=False) as llm:
        return folder / "target", llm.generate(PROMPTS, PARAMS, use_tqdm=False), drafters


# What is added after layers goes through chunks, through what was cached, and to drafters that tap these layers.
DEEP_CELLS = [
    *itertools.product(["small blocks"], NAMES),
    *itertools.product(["chunks of 1", "chunks of 7", "preempted"], ["eagle3", "small"]),
]


@pytest.mark.parametrize(("settings", "name"), some(itertools.product(SHORT, NAMES), DEEP_CELLS))
def test_output_with_deepstack_depends_on_neither_batch_nor_drafter(
    deep: tuple[Path, list[RequestOutput], dict[str, dict[str, Any]]], settings: str, name: str | None
) -> None:
    folder, plain, drafters = deep
    check(folder, plain, None if name is None else drafters[name], settings)


# By the setting, a drafter that says something there; families above have every one of them.
WHOLE = ("gemma3", "gemma4")  # whose images' rows see each other
FAMILY_CELLS = [
    *itertools.product(WHOLE, ["one batch"], ["ngram", "itself"]),
    *itertools.product(WHOLE, ["chunks of 1"], ["eagle1"]),
    *itertools.product(WHOLE, ["chunks of 7"], ["eagle3, one axis", "itself"]),
    *itertools.product(WHOLE, ["chunks of 64"], ["dflash"]),
    *[("gemma3", "preempted", "itself"), ("gemma4", "preempted, long", "itself")],
    *itertools.product(FAMILIES.keys() - {*WHOLE, *ROPES}, ["chunks of 7"], ["eagle3, one axis", "dflash"]),
]
FAMILY_SETTINGS = SETTINGS.keys() - {"preempted", "preempted, long"}
FAMILY_DRAFTERS = ["ngram", "suffix", "text model", "eagle3, one axis", "eagle1", "dflash", "itself"]


@pytest.mark.parametrize(
    ("each", "settings", "name"),
    some(
        sorted({*itertools.product(FAMILIES, FAMILY_SETTINGS, FAMILY_DRAFTERS), *FAMILY_CELLS}),
        sorted(FAMILY_CELLS),
    ),
    indirect=["each"],
)
def test_output_of_each_family_depends_on_neither_batch_nor_drafter(
    each: tuple[Any, Path],
    expected: list[RequestOutput],
    drafters: dict[str, dict[str, Any]],
    settings: str,
    name: str,
) -> None:
    drafter = {"model": str(each[1])} if name == "itself" else drafters[name]
    config = {**drafter, "num_speculative_tokens": 3}
    with LLM(str(each[1]), dtype="float32", speculative_config=config, **SETTINGS[settings]) as llm:
        for _ in range(2):
            assert not compare(expected, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        for _ in range(2):  # few pages are kept where a window is all that some layers see
            assert not compare(expected[4:], llm.generate(PROMPTS[4:], PARAMS[4:], use_tqdm=False))
        is_preempted = settings.startswith("preempted")
        assert llm.stats.num_cached_tokens > 0 or is_preempted
        assert not is_preempted or llm.stats.num_preemptions > 0
        assert llm.stats.speculation.num_draft_tokens > 0 or settings == "chunks of 1"
        assert llm.stats.num_drafter_faults == 0 and llm.requests.inputs._store.num_encoded == 3


def assisted(
    model: Any, assistant: Any, folder: Path, given: dict[str, Any], answer: list[int], count: int
) -> list[int]:
    """What transformers' assistant drafts after a prompt and an answer of which the last token's row is still to come:
    its query stays where that token stands."""
    ids, found = placed(model, folder, given)
    known = torch.tensor([ids + answer])
    kept = {key: value for key, value in found.items() if key != "num_soft_tokens_per_image"}
    drafts = []
    with torch.no_grad():
        out = model.model(
            known[:, :-1],
            mm_token_type_ids=(known[:, :-1] == IMAGE).int(),
            return_shared_kv_states=True,
            **kept,
        )
        state, token = out.last_hidden_state[:, -1:], known[:, -1:]
        for _ in range(count):
            embedded = model.get_input_embeddings()(token)
            step = assistant(
                inputs_embeds=torch.cat((embedded, state), -1),
                position_ids=torch.tensor([[known.shape[1] - 1]]),
                shared_kv_states=out.shared_kv_states,
            )
            state, token = step.last_hidden_state, step.logits[:, -1:].argmax(-1)
            drafts.append(int(token))
    return drafts


ASSISTED = list(
    itertools.product(
        ["gemma4", "gemma4, causal"], [0, 16], ["one batch", "chunks of 7", "chunks of 64", "small blocks"]
    )
)
ASSISTED_CELLS = [
    *[("gemma4", 0, settings) for settings in ("one batch", "chunks of 64")],
    *[("gemma4", 16, settings) for settings in ("chunks of 7", "small blocks")],
    ("gemma4, causal", 0, "chunks of 7"),
    ("gemma4, causal", 16, "small blocks"),
]


@pytest.mark.parametrize(("family", "num_centroids", "settings"), some(ASSISTED, ASSISTED_CELLS))
def test_gemma_4s_assistant_drafts_over_images_what_transformers_drafts(
    tmp_path: Path, family: str, num_centroids: int, settings: str
) -> None:
    model = FAMILIES[family](tmp_path / "model")
    assistant = vision.gemma4_assistant(tmp_path / "assistant", num_centroids)
    config = {"model": str(tmp_path / "assistant"), "num_speculative_tokens": 3, "policy": "fixed"}
    base: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
    with LLM(str(tmp_path / "model"), max_num_seqs=1, enable_prefix_caching=False, **base) as llm:
        plain = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with LLM(str(tmp_path / "model"), speculative_config=config, **base, **SETTINGS[settings]) as llm:
        for _ in range(2):
            assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert llm.stats.speculation.num_draft_tokens > 0 and llm.stats.num_drafter_faults == 0
        inputs = llm.requests.inputs
        for number in (0, 1, 2, 4):
            given = PROMPTS[number]
            prepared = inputs.prepare(dict(given), GREEDY)
            expected = assisted(model, assistant, tmp_path / "model", given, [], 3)
            assert llm.engine.draft(inputs.spec(prepared, 0), 3) == expected, number


@pytest.mark.parametrize("chunk", some([7, 64], [7]))
@pytest.mark.parametrize("name", ["eagle3", "text model", "dflash", "small"])
def test_drafts_do_not_depend_on_how_a_prompt_was_computed(
    made: tuple[Any, Path], drafters: dict[str, dict[str, Any]], name: str, chunk: int
) -> None:
    """By law 1 a wrong embedding or position of a drafter's row shows in its drafts alone."""
    proposed = []
    for num_rows in (2048, chunk):
        config = {**drafters[name], "num_speculative_tokens": 3}
        with LLM(
            str(made[1]), dtype="float32", max_num_batched_tokens=num_rows, speculative_config=config
        ) as llm:
            request = llm.requests.add(
                PROMPTS[4], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            )
            drafts = []
            while not request.finished:
                llm.requests.step()
                for running in llm.engine.scheduler.running:
                    if running.num_outputs:
                        known, num = len(running.tokens), running.num_drafts
                        drafts.append(llm.engine.runner.known_drafts(running.slot, known, num))
            proposed.append(drafts)
    assert proposed[0] == proposed[1] and len(proposed[0]) > 3


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


def test_an_id_that_stands_for_an_image_is_never_drafted(made: tuple[Any, Path]) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}
    with LLM(str(made[1]), dtype="float32", speculative_config=config) as llm:
        inputs = llm.requests.inputs
        for middle, expected in (([11, 12], [11, 12, 5, 7]), ([11, IMAGE], [11]), ([IMAGE], [])):
            given = {
                "prompt_token_ids": [7, 8, *middle, 5, 7, 8],
                "multi_modal_data": {"image": [A] * middle.count(IMAGE)},
            }
            prepared = inputs.prepare(given, GREEDY)
            assert llm.engine.draft(inputs.spec(prepared, 0), 4) == expected
        assert llm.stats.num_drafter_faults == 0


class Wants:
    """A drafter that has an eye for pictures."""

    spec = DraftSpec()

    def __init__(self, config: Any) -> None: ...

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        wanted = torch.tensor([[5, token, 6] for token in (IMAGE, VIDEO)] * len(verified.k_R))
        return Proposal(wanted[: len(verified.k_R), :num_drafts], verified.k_R.clone())


def test_whoever_wants_to_draft_a_place_drafts_up_to_it(
    made: tuple[Any, Path], plain: list[RequestOutput]
) -> None:
    config = {"method": f"{__name__}.Wants", "num_speculative_tokens": 3}
    with LLM(str(made[1]), dtype="float32", speculative_config=config) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert not compare(plain, outputs) and llm.stats.num_drafter_faults == 0
        speculation = llm.stats.speculation
        assert speculation.drafted_per_position[0] > 30 and not any(speculation.drafted_per_position[1:])


def test_embeddings_of_a_drafter_are_its_own_or_its_targets(
    made: tuple[Any, Path], drafters: dict[str, dict[str, Any]]
) -> None:
    config = {**drafters["text model"], "image_inputs": "embeddings"}
    with pytest.raises(ValueError, match=r"image_inputs=.embeddings.: .* makes them by itself"):
        LLM(str(made[1]), dtype="float32", speculative_config=config)
    with (
        LLM(str(made[1]), dtype="float32") as plain,
        LLM(str(made[1]), dtype="float32", speculative_config=drafters["small"]) as llm,
    ):
        assert llm.memory.encoder > plain.memory.encoder > 0 and llm.memory.items == 2 * plain.memory.items
        given = {"prompt_embeds": torch.randn(9, vision.HIDDEN)}  # which the small model cannot read
        both = [engine.generate(given, GREEDY, use_tqdm=False) for engine in (plain, llm)]
        assert not compare(*both) and llm.stats.num_drafter_faults == 0


def test_a_drafter_whose_encoder_fails_costs_nothing_but_its_drafts(
    made: tuple[Any, Path], plain: list[RequestOutput], drafters: dict[str, dict[str, Any]]
) -> None:
    with LLM(
        str(made[1]), dtype="float32", speculative_config={**drafters["small"], "num_speculative_tokens": 3}
    ) as llm:
        (store,) = llm.engine.runner.items._own.values()
        encode, num_left = store.encoders["image"], iter(range(1))

        def failing(tensors: Any) -> torch.Tensor:
            if next(num_left, None) is None:
                return encode(tensors)
            raise RuntimeError("no such picture")

        store.encoders["image"] = failing
        assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert llm.stats.num_drafter_faults == 1 and llm.requests.inputs._store.num_encoded == 3


def test_embeddings_that_a_drafter_cannot_be_fed_are_refused(
    made: tuple[Any, Path], drafters: dict[str, dict[str, Any]]
) -> None:
    config = {**drafters["dflash"], "image_inputs": "embeddings"}
    with pytest.raises(ValueError, match="method='dflash' is fed none"):
        LLM(str(made[1]), dtype="float32", speculative_config=config)


def test_a_draft_model_with_another_tokenizer_reads_the_words_around_images(
    chatting: tuple[Path, Path], drafters: dict[str, dict[str, Any]]
) -> None:
    draft = Path(drafters["text model"]["model"])
    vision.tokenizer(draft)
    config = {"model": str(draft), "token_map": "text", "num_speculative_tokens": 3}
    with LLM(str(chatting[0]), dtype="float32") as llm:
        plain = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with LLM(str(chatting[0]), dtype="float32", speculative_config=config) as llm:
        assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert llm.stats.speculation.num_draft_tokens > 0 and llm.stats.num_drafter_faults == 0


def test_a_small_model_whose_encoder_reads_otherwise_is_fed_ids(
    made: tuple[Any, Path], plain: list[RequestOutput], tmp_path: Path
) -> None:
    vision.qwen3_vl(tmp_path / "other", num_hidden_layers=1)
    config = {"model": str(tmp_path / "other"), "num_speculative_tokens": 3}
    with LLM(str(made[1]), dtype="float32", speculative_config=config) as llm:
        assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert not llm.engine.runner.items._own and llm.stats.num_drafter_faults == 0
    config["image_inputs"] = "embeddings"
    with pytest.raises(ValueError, match="does not read what the target's image processor gives"):
        LLM(str(made[1]), dtype="float32", speculative_config=config)


def test_what_was_forgotten_is_encoded_again(made: tuple[Any, Path], plain: list[RequestOutput]) -> None:
    with LLM(str(made[1]), dtype="float32", max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        store = llm.requests.inputs._store
        store.max_bytes = 1
        assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert store.num_encoded > 3 and len(store._embeddings) == 1
        assert not store._inputs, "what nobody asks for is nobody's"


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


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


def _truncated(tmp: Path) -> Any:
    return encoded(picture(200, 200, 0), "PNG")[:900]


def _bomb(tmp: Path) -> Any:
    """A small file that claims 30000 x 30000 pixels."""
    data = bytearray(encoded(Image.new("L", (8, 8)), "PNG"))
    data[16:24] = (30000).to_bytes(4, "big") * 2
    import zlib

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def _animated(tmp: Path) -> Any:
    return encoded(A, "GIF", save_all=True, append_images=[C])


def _mistyped(tmp: Path) -> Any:
    """A TIFF that says where its pixels are in letters, at which Pillow raises a TypeError."""
    data = encoded(A, "TIFF")
    tag, number, letters = (
        (0x0111).to_bytes(2, "little"),
        (4).to_bytes(2, "little"),
        (2).to_bytes(2, "little"),
    )
    assert data.count(tag + number) == 1
    return data.replace(tag + number, tag + letters)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bomb": (_bomb, "900000000 pixels"),
    "truncated": (_truncated, "cannot be read"),
    "thin": (lambda tmp: Image.new("RGB", (1, 100000)), "more than 200 times"),
    "mode": (lambda tmp: Image.new("F", (8, 8)), "mode 'F'"),
    "animated": (_animated, "animated, with 2 frames"),
    "text": (lambda tmp: b"no image", "is no PNG, JPEG"),
    "missing": (lambda tmp: tmp / "none.png", "cannot be read"),
    "number": (lambda tmp: 5, "must be a PIL image"),
    "floats": (lambda tmp: np.zeros((8, 8, 3)), "must be uint8"),
    "empty": (lambda tmp: np.zeros((0, 8, 3), dtype=np.uint8), "has 8 x 0 pixels; give one with some"),
    "16 bits": (lambda tmp: encoded(Image.new("I;16", (8, 8)), "PNG"), "mode 'I;16'"),
    "letters": (_mistyped, "cannot be read: TypeError"),
    "program": (lambda tmp: encoded(A, "EPS"), "is no PNG, JPEG"),
}


def _turned(kind: str) -> bytes:
    """A photo whose camera was held upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(A, kind, exif=exif)


def test_files_are_seen_as_transformers_sees_them() -> None:
    clear = Image.merge("RGBA", (*A.split(), C.split()[0]))
    palette = A.quantize(16)
    files = {
        **{"turned JPEG": _turned("JPEG"), "turned PNG": _turned("PNG"), "turned WebP": _turned("WEBP")},
        **{"CMYK": encoded(A.convert("CMYK"), "JPEG"), "still GIF": encoded(palette, "GIF")},
        **{"clear": encoded(clear, "PNG"), "black and white": encoded(A.convert("1"), "PNG")},
        **{"clear palette": encoded(palette, "PNG", transparency=3), "BMP": encoded(A, "BMP")},
        "photo with a preview": encoded(A, "MPO", save_all=True, append_images=[C.resize((15, 25))]),
    }
    for name, data in files.items():
        theirs = transformers.image_utils.load_image(base64.b64encode(data).decode())
        assert np.array_equal(np.asarray(images._picture(data, "image 0")), np.asarray(theirs)), name
    assert images._picture(files["turned JPEG"], "image 0").size == A.size[::-1]


def test_hostile_images_get_one_error_each_and_the_others_go_on(
    made: tuple[Any, Path], plain: list[RequestOutput], tmp_path: Path
) -> None:
    hostile = {kind: (make(tmp_path), words) for kind, (make, words) in HOSTILE.items()}
    bad = [prompt([A, image], [], [], text(3, 0)) for image, _ in hostile.values()]
    given = [PROMPTS[0], *bad, PROMPTS[1]]
    with LLM(str(made[1]), dtype="float32") as llm:
        params = [PARAMS[0], *[PARAMS[0]] * len(bad), PARAMS[1]]
        first, *refused, last = llm.generate(given, params, use_tqdm=False)
        assert not compare(plain[:2], [first, last])
        for output, (kind, (_, words)) in zip(refused, hostile.items(), strict=True):
            assert output.error is not None, kind
            assert output.error.startswith("image 1") and words in output.error, kind
        for each in bad:
            with pytest.raises(ValueError, match="image 1"):
                llm.generate(each, GREEDY, use_tqdm=False)


def test_prompts_without_sense_are_refused(made: tuple[Any, Path]) -> None:
    with LLM(str(made[1]), dtype="float32") as llm:
        for ids, data, words in (
            ([1, 2], {"image": [A]}, "has 0 places for images.*1 are given"),
            ([IMAGE], {}, "has 1 places for images.*0 are given"),
            ([IMAGE], {"audio": [1]}, "multi_modal_data"),
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


def url_of(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image, "PNG")).decode()


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def chatting(made: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a model with a chat template, a folder of pictures that messages may name)."""
    folder = tmp_path_factory.mktemp("chat")
    for file in made[1].iterdir():
        (folder / file.name).symlink_to(file)
    vision.tokenizer(folder)
    pictures = tmp_path_factory.mktemp("pictures")
    (pictures / "a b.png").write_bytes(encoded(A, "PNG"))
    return folder, pictures


def test_messages_hold_images(chatting: tuple[Path, Path]) -> None:
    folder, pictures = chatting
    words = {"type": "text", "text": "w5 w6 w7"}
    forms = [
        image_url(url_of(A)),
        image_url((pictures / "a b.png").as_uri()),
        image_url(str(pictures / "a b.png")),
        {"type": "input_image", "image_url": url_of(A)},
        {"type": "image", "image": A},
    ]
    with LLM(str(folder), dtype="float32", allowed_local_media_path=str(pictures)) as llm:
        given = {"prompt_token_ids": [IMAGE, 5, 6, 7], "multi_modal_data": {"image": A}}
        expected = llm.generate(given, GREEDY, use_tqdm=False)
        for form in forms:
            found = llm.chat(message(form, words), GREEDY, use_tqdm=False)
            assert not compare(expected, found)
            assert found[0].prompt_token_ids == expected[0].prompt_token_ids
        assert llm.requests.inputs._store.num_encoded == 1
        body = protocol.ChatBody(model="m", messages=message(image_url(url_of(A)), words))
        assert body.num_chars < 200 < len(url_of(A)), "an image is no text"
        (prompted,) = body.prompts(llm)
        assert not compare(expected, llm.generate(prompted, GREEDY, use_tqdm=False))
        texts = [[{"role": "user", "content": "w5 w6"}], message(words, image_url(url_of(C)))]
        assert [o.error for o in llm.chat(texts, GREEDY, use_tqdm=False)] == [None, None]


NOT_NAMED: list[tuple[dict[str, Any], str]] = [
    (image_url("http://127.0.0.1/a.png"), "nothing is fetched"),
    (image_url("https://example.com/a.png"), "nothing is fetched"),
    (image_url("file:///etc/hostname"), "not inside allowed_local_media_path"),
    (image_url("../../etc/hostname"), "not inside allowed_local_media_path"),
    (image_url("data:image/png;base64,!!"), "no base64"),
    (image_url("data:image/png,abc"), "in base64"),
    ({"type": "image_url"}, "must be"),
    ({"type": "audio_url", "audio_url": {"url": "data:"}}, "messages.0.: content.0."),
]


def test_messages_name_no_other_files(chatting: tuple[Path, Path]) -> None:
    folder, pictures = chatting
    with LLM(str(folder), dtype="float32", allowed_local_media_path=str(pictures)) as llm:
        for part, words in NOT_NAMED:
            with pytest.raises(ValueError, match=words):
                llm.chat(message(part, {"type": "text", "text": "w1"}), GREEDY, use_tqdm=False)
        (pictures / "out").symlink_to("/etc/hostname")
        with pytest.raises(ValueError, match="not inside"):
            llm.chat(message(image_url(str(pictures / "out"))), GREEDY, use_tqdm=False)
    with LLM(str(folder), dtype="float32") as llm, pytest.raises(ValueError, match="=None"):
        llm.chat(message(image_url(str(pictures / "a b.png"))), GREEDY, use_tqdm=False)
