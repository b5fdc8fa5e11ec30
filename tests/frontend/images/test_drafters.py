"""What drafters are given of images, and what they may not draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.bench.compare import compare
from draftproof.drafters.base import DraftSpec, Proposal, Verified
from tests.frontend.images.cases import GREEDY, PARAMS, PROMPTS, A
from tests.made import vision
from tests.made.vision import IMAGE, VIDEO
from tests.slow import some


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


def test_a_dense_model_reads_the_images_of_one_with_experts(tmp_path: Path) -> None:
    vision.qwen3_vl_moe(tmp_path / "target")
    vision.qwen3_vl(tmp_path / "small", num_hidden_layers=1)
    config = {"model": str(tmp_path / "small"), "num_speculative_tokens": 3, "image_inputs": "embeddings"}
    with LLM(str(tmp_path / "target"), dtype="float32", speculative_config=config) as llm:
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
        (store,) = llm.engine.runner.items._own.values()
        assert store.num_encoded == 2 and llm.stats.num_drafter_faults == 0
        assert llm.stats.speculation.num_draft_tokens > 0


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
