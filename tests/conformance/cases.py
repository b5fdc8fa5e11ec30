"""What every drafter is tested with: a case per registered method, the requests, and the engine settings to vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftproof import LLM, RequestOutput, SamplingParams
from tests.made import shared
from tests.made.shared import DATA, DFLASH, DRAFT, EAGLE3, MTP, prompts

RECORDINGS = str(DATA / "recordings.json")
TARGETS: dict[str, Callable[[], str]] = {  # with MTP modules, and with layers that share keys
    "deepseek": shared.deepseek,
    "mimo": shared.mimo,
    "gemma4": shared.gemma4,
    "gemma4_experts": shared.gemma4_experts,
}


@dataclass(frozen=True)
class Case:
    """How to make a drafter of a method; `max_drafts` is the K called K = max.

    `settings`: of speculative_config; a function stands for the value that it returns, and is called when needed.
    `own_target`: returns the folder of its target, None: the embedded one.
    `forgets`: a finished request leaves no trace, so an equal one later gets the same drafts.
    `repeatable`: drafts depend on the request's tokens alone, not on the rounds in which they came.
    """

    settings: Mapping[str, Any]
    max_drafts: int = 12
    forgets: bool = True
    repeatable: bool = True
    own_target: Callable[[], str] | None = None

    @property
    def config(self) -> dict[str, Any]:
        return {key: value() if callable(value) else value for key, value in self.settings.items()}

    @property
    def target(self) -> str | None:
        return None if self.own_target is None else self.own_target()

    def llm(self, k: int | None = 5, policy: str = "fixed") -> dict[str, Any]:
        """Settings for `LLM`: the target, and the drafter with K = `k`, at most `max_drafts`; None: its own default."""
        k = None if k is None else min(k, self.max_drafts)
        return {
            "model": self.target,
            "speculative_config": {**self.config, "num_speculative_tokens": k, "policy": policy},
        }


# a method may have several cases, told apart by what follows the slash
CASES: dict[str, Case] = {
    "ngram": Case({"method": "ngram", "prompt_lookup_min": 1}),
    "draft_model": Case({"model": DRAFT}),
    "draft_model/table": Case({"model": shared.fewer_tokens}),
    "draft_model/text": Case({"model": shared.other_tokens}),
    "eagle3": Case({"model": EAGLE3}),
    "eagle3/one_state": Case({"model": shared.one_state}),
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
    "eagle": Case({"model": shared.eagle1}),
    "mtp": Case({"model": MTP}),
    "mtp/target": Case({"method": "mtp"}, own_target=shared.mimo),
    "mtp/modules": Case({"method": "mtp"}, max_drafts=2, own_target=shared.deepseek),
    "gemma4_mtp": Case({"model": shared.gemma4_assistant}, own_target=shared.gemma4),
    "gemma4_mtp/experts": Case({"model": shared.gemma4_experts_assistant}, own_target=shared.gemma4_experts),
    "gemma4_mtp/centroids": Case({"model": shared.gemma4_centroids}, own_target=shared.gemma4),
    "peagle": Case({"model": shared.peagle}),
    "peagle/flat_fp8": Case({"model": shared.flat_fp8_peagle}),
    "pard": Case({"model": shared.pard}),
    "dflash": Case({"model": DFLASH}, max_drafts=7),
    "dspark": Case({"model": shared.dspark, "confidence_threshold": 0.3}, max_drafts=7),
    "dflash2": Case({"model": shared.dflash2}, max_drafts=7),
    "xpress": Case({"model": shared.xpress}, max_drafts=7),
    "suffix": Case({"method": "suffix"}, forgets=False),
    # beside a head, since on its own it drafts only for requests with a grammar: test_grammar.py
    "ff": Case({"method": "chain", "drafters": [{"method": "ff"}, {"model": EAGLE3}]}, max_drafts=5),
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

# One case for each way to draft: on the host, by a language model (with another vocabulary, too), by a head with keys
# of its own, by MTP modules, by borrowed keys, by blocks, by a chain, by forced text, by a user's code. Tests of the
# engine use these where all cases would show the same.
KINDS = (
    "ngram",
    "suffix",
    "draft_model",
    "draft_model/text",
    "eagle3",
    "chain",
    "mtp/modules",
    "gemma4_mtp",
    "dflash",
    "ff",
    "replay",
    "custom",
)


REPEATS = "a = [1, 2, 3, 4]\nb = [1, 2, 3, 4]\nc = [1, 2, 3, 4]\nd = ["


@dataclass(frozen=True)
class Requests:
    """Prompts and their parameters."""

    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)


def mixture() -> Requests:
    """Requests of all kinds: greedy and sampled, with every kind of processing, stop rule and logprobs."""
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
    """Generate with a new engine: (outputs, the engine)."""
    llm = LLM(**settings)
    return llm.generate(requests.prompts, requests.params, use_tqdm=False), llm
