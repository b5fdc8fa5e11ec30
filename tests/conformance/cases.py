"""What every drafter must pass: one case a registered method, the requests, and the engine settings to vary."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftproof import LLM, RequestOutput, SamplingParams, assets
from tests.made import native
from tests.made.derived import (
    compressed_fp8,
    dflash2_from_dflash,
    dspark_from_dflash,
    eagle3_of_one_state,
    eagle_from_mtp,
    flat_from_speculators,
    pard_from_model,
    peagle_from_eagle3,
    xpress_from_dflash,
)
from tests.made.gemma import gemma4_pair
from tests.made.vocabularies import reduced, trained

DATA = Path(__file__).parent.parent / "data"
EAGLE3 = str(assets.path("tiny-eagle3"))
DRAFT = str(DATA / "draft")
MTP = str(DATA / "tiny-mtp")
DFLASH = str(DATA / "tiny-dflash")
TEMPORARY = tempfile.TemporaryDirectory()  # lives as long as the process
MADE = Path(TEMPORARY.name)
EAGLE1 = str(eagle_from_mtp(Path(MTP), assets.path("tiny"), MADE / "eagle1"))
PEAGLE = str(peagle_from_eagle3(Path(EAGLE3), MADE / "peagle"))
FLAT_PEAGLE = flat_from_speculators(Path(PEAGLE), MADE / "flat", {"pard_token": 3})
FP8_PEAGLE = str(compressed_fp8(FLAT_PEAGLE, MADE / "flat_fp8", "channel"))
ONE_STATE = str(eagle3_of_one_state(Path(EAGLE3), MADE / "one_state"))
PARD = str(pard_from_model(Path(DRAFT), MADE / "pard"))
DSPARK = str(dspark_from_dflash(Path(DFLASH), MADE / "dspark"))
DFLASH2 = str(dflash2_from_dflash(Path(DFLASH), MADE / "dflash2"))
XPRESS = str(xpress_from_dflash(Path(DFLASH), MADE / "xpress"))
GEMMA4, GEMMA4_ASSISTANT, GEMMA4_CENTROIDS = map(str, gemma4_pair(assets.path("tiny"), MADE / "gemma4"))
GEMMA4_MOE, GEMMA4_MOE_ASSISTANT, _ = map(
    str, gemma4_pair(assets.path("tiny"), MADE / "gemma4_moe", experts=True)
)
TARGETS = {  # with modules of their own: latent attention, experts and two modules; ordinary attention and one
    "deepseek": str(native.deepseek(assets.path("tiny"), MADE / "deepseek")),
    "mimo": str(native.mimo(assets.path("tiny"), MADE / "mimo")),
    "gemma4": GEMMA4,  # layers that share keys, and assistants
    "gemma4_experts": GEMMA4_MOE,
}
FEWER_TOKENS = str(reduced(Path(DRAFT), MADE / "fewer", every=20))
RECORDINGS = str(DATA / "recordings.json")


@dataclass(frozen=True)
class Case:
    """How to make a drafter of a method; `max_drafts` is the K called K = max.

    `target`: folder of its own target, None: the embedded one.
    `forgets`: a finished request leaves no trace, so that the same request is drafted for in the same way again.
    `repeatable`: what is proposed depends on the request's tokens alone, not on the rounds in which they came.
    """

    config: Mapping[str, Any]
    max_drafts: int = 12
    forgets: bool = True
    repeatable: bool = True
    target: str | None = None

    def llm(self, k: int | None = 5, policy: str = "fixed") -> dict[str, Any]:
        """`LLM`'s settings: target and drafter, which is asked for `k` drafts or as many as it can."""
        k = None if k is None else min(k, self.max_drafts)
        return {
            "model": self.target,
            "speculative_config": {**self.config, "num_speculative_tokens": k, "policy": policy},
        }


def prompts() -> list[str]:
    lines = (DATA / "prompts.jsonl").read_text().splitlines()
    return [p["prompt"] for p in map(json.loads, lines) if "prompt" in p]


OTHER_TOKENS = str(trained(Path(DRAFT), MADE / "other", prompts(), 800))

# a method may have several: what comes after the slash tells them apart
CASES: dict[str, Case] = {
    "ngram": Case({"method": "ngram", "prompt_lookup_min": 1}),
    "draft_model": Case({"model": DRAFT}),
    "draft_model/table": Case({"model": FEWER_TOKENS}),
    "draft_model/text": Case({"model": OTHER_TOKENS}),
    "eagle3": Case({"model": EAGLE3}),
    "eagle3/one_state": Case({"model": ONE_STATE}),
    "eagle3/fp8": Case({"model": EAGLE3, "quantization": "fp8"}),
    "chain": Case(
        {
            "method": "chain",
            "drafters": [
                {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
                {"model": EAGLE3},
                {"model": DRAFT},
            ],
        }
    ),
    "eagle": Case({"model": EAGLE1}),
    "mtp": Case({"model": MTP}),
    "mtp/native": Case({"method": "mtp"}, target=TARGETS["mimo"]),
    "mtp/modules": Case({"method": "mtp"}, max_drafts=2, target=TARGETS["deepseek"]),
    "gemma4_mtp": Case({"model": GEMMA4_ASSISTANT}, target=GEMMA4),
    "gemma4_mtp/experts": Case({"model": GEMMA4_MOE_ASSISTANT}, target=GEMMA4_MOE),
    "gemma4_mtp/centroids": Case({"model": GEMMA4_CENTROIDS}, target=GEMMA4),
    "peagle": Case({"model": PEAGLE}),
    "peagle/flat_fp8": Case({"model": FP8_PEAGLE}),
    "pard": Case({"model": PARD}),
    "dflash": Case({"model": DFLASH}, max_drafts=7),
    "dspark": Case({"model": DSPARK, "confidence_threshold": 0.3}, max_drafts=7),
    "dflash2": Case({"model": DFLASH2}, max_drafts=7),
    "xpress": Case({"model": XPRESS}, max_drafts=7),
    "suffix": Case({"method": "suffix"}, forgets=False),
    "replay": Case(
        {
            "method": "replay",
            "recordings": RECORDINGS,
            "acceptance": [0.9, 0.8, 0.7],
            "drafters": [{"model": EAGLE3}],
        },
        repeatable=False,
    ),
    "custom": Case({"method": "tests.conformance.custom.Moody"}, forgets=False, repeatable=False),
    "custom_vllm": Case({"method": "custom_class", "model": "tests.conformance.vllm_style.NgramProposer"}),
    "custom_head": Case({"method": "examples.custom_head.build"}),
}


REPEATS = "a = [1, 2, 3, 4]\nb = [1, 2, 3, 4]\nc = [1, 2, 3, 4]\nd = ["


@dataclass(frozen=True)
class Requests:
    """A mixture of everything a request can ask for."""

    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)


def mixture() -> Requests:
    """Greedy and sampled, with every kind of processing, stopping and score."""
    p = SamplingParams
    wanted = [
        p(temperature=0, max_tokens=40, logprobs=3),
        p(temperature=0, max_tokens=24, prompt_logprobs=1, logprobs=0),
        p(temperature=0.8, max_tokens=32, seed=1, logprobs=2),
        p(temperature=1.2, max_tokens=24, top_p=0.9, top_k=40, min_p=0.02, seed=2, logprobs=1),
        p(temperature=0.7, max_tokens=24, logprobs=0),
        p(temperature=0.6, max_tokens=16, seed=3, n=2, logprobs=1),
        p(temperature=0, max_tokens=32, repetition_penalty=1.3, presence_penalty=0.4, logprobs=1),
        p(temperature=0.5, max_tokens=24, frequency_penalty=0.8, seed=4, logprobs=1),
        p(
            temperature=0,
            max_tokens=24,
            logit_bias={198: 2.5, 10: -5.0},
            bad_words=["self", "import"],
            logprobs=1,
        ),
        p(temperature=0, max_tokens=48, stop=["\n\n", "):"], logprobs=1),
        p(temperature=0, max_tokens=24, min_tokens=12, stop_token_ids=[203, 198], logprobs=1),
        p(temperature=0, max_tokens=1, logprobs=1),
        p(temperature=0, max_tokens=2, logprobs=1),
        p(temperature=0.9, max_tokens=3, seed=5, logprobs=1),
        p(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1),
        p(temperature=0.9, max_tokens=12, seed=6, allowed_token_ids=list(range(200, 700)), logprobs=1),
    ]
    texts = prompts()
    chosen = [texts[i % len(texts)] if i % 4 else REPEATS for i in range(len(wanted))]
    return Requests(chosen, wanted)


def run(requests: Requests, **settings: Any) -> tuple[list[RequestOutput], LLM]:
    """One engine, one generate call."""
    llm = LLM(**settings)
    return llm.generate(requests.prompts, requests.params, use_tqdm=False), llm
