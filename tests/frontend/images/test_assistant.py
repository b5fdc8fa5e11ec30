"""Gemma 4's assistant over images: what transformers drafts with it, and answers that it leaves alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, RequestOutput
from draftproof.bench.compare import compare
from tests.frontend.images.cases import FAMILIES, GREEDY, PARAMS, PROMPTS, SETTINGS, placed
from tests.made import vision
from tests.made.vision import IMAGE
from tests.slow import some


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


BASE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}


@pytest.fixture(scope="module")
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, list[RequestOutput]]:
    """(transformers' model of a family, its folder, what it answers by itself)."""
    folder = tmp_path_factory.mktemp("model")
    model = FAMILIES[request.param](folder)
    with LLM(str(folder), max_num_seqs=1, enable_prefix_caching=False, **BASE) as llm:
        return model, folder, llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("target", "num_centroids", "settings"), some(ASSISTED, ASSISTED_CELLS), indirect=["target"]
)
def test_gemma_4s_assistant_drafts_over_images_what_transformers_drafts(
    target: tuple[Any, Path, list[RequestOutput]], tmp_path: Path, num_centroids: int, settings: str
) -> None:
    model, folder, plain = target
    assistant = vision.gemma4_assistant(tmp_path / "assistant", num_centroids)
    config = {"model": str(tmp_path / "assistant"), "num_speculative_tokens": 3, "policy": "fixed"}
    with LLM(str(folder), speculative_config=config, **BASE, **SETTINGS[settings]) as llm:
        for _ in range(2):
            assert not compare(plain, llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert llm.stats.speculation.num_draft_tokens > 0 and llm.stats.num_drafter_faults == 0
        inputs = llm.requests.inputs
        for number in (0, 1, 2, 4):
            given = PROMPTS[number]
            prepared = inputs.prepare(dict(given), GREEDY)
            expected = assisted(model, assistant, folder, given, [], 3)
            assert llm.engine.draft(inputs.spec(prepared, 0), 3) == expected, number
