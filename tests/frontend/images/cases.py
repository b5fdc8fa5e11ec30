"""Prompts with images, the models that read them, and what transformers makes of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from draftproof import LLM, SamplingParams
from tests.made import vision
from tests.made.vision import IMAGE, INTERLEAVED, MROPE, picture

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


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 89, length).tolist()


def prompt(images: list[Any], *texts: list[int]) -> dict[str, Any]:
    """Texts with the images between them."""
    ids = list(texts[0])
    for text in texts[1:]:
        ids += [START, IMAGE, END, *text]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


A, B, C = picture(30, 50, 1), picture(64, 24, 2), picture(30, 50, 3)


PROMPTS = [
    prompt([A], text(9, 0), text(5, 1)),
    prompt([B, A], text(3, 2), [], text(2, 3)),
    prompt([C], [], text(40, 4) + text(6, 5) * 3),
    {"prompt_token_ids": text(30, 6)},
    prompt([A, B, C], text(1, 7), text(11, 8), text(2, 9), text(1, 10)),
]


BARE = {
    "prompt_token_ids": [IMAGE],
    "multi_modal_data": {"image": [A]},
}  # nothing before the answer but an image


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


def theirs(model: Any, folder: Path, given: dict[str, Any], answer: Sequence[int]) -> torch.Tensor:
    """transformers' logits of the rows that an answer was sampled from: the prompt's last and its own but the last."""
    ids, found = placed(model, folder, given)
    return logits_of(model, [*ids, *answer[:-1]], found)[len(ids) - 1 :]


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


SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "preempted": {"num_kv_blocks": 52, "max_model_len": 144, "block_size": 4},
    "preempted, long": {"num_kv_blocks": 100, "max_model_len": 300, "block_size": 4},  # Gemma 4's images
    "small blocks": {"block_size": 4},
}


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
