"""An engine that says the same to everything, for tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftproof import assets
from draftproof.frontend.text import Tokenizer
from draftproof.metrics import EngineStats, SpeculationStats
from draftproof.types import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput, SamplingParams

TOKENIZER = Tokenizer(assets.path(assets.TARGET))
TEXT = " return a + b # done"


class Settings(dict[str, Any]):
    """What an engine was made with; commands may say how many drafts it asks for."""

    policy: Any = None


class FakeLLM:
    """Says TEXT to everything. `change` alters outputs of engines that draft; `drafts` are proposed a round."""

    def __init__(self, engine: dict[str, Any], change: str = "", drafts: int = 3) -> None:
        self.engine, self.tokenizer = Settings(engine), TOKENIZER
        self.drafting = "speculative_config" in engine
        self.change = change if self.drafting else ""
        self.num_speculative_tokens = self.num_drafts = drafts if self.drafting else 0
        self.seen: list[Any] = []
        self.stats = EngineStats()

    @property
    def core(self) -> Settings:
        return self.engine

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = True) -> list[RequestOutput]:
        listed = params if isinstance(params, list) else [params] * len(prompts)
        self.seen += zip(prompts, listed, strict=True)
        if self.change == "fault":
            self.stats.num_drafter_faults += 2
            self.stats.last_drafter_fault = "RuntimeError: boom"
        return [self.answer(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, listed, strict=True))]

    def answer(self, index: int, prompt: Any, params: SamplingParams) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        stats = SpeculationStats()
        if self.num_drafts:
            stats.record(self.num_drafts, self.num_drafts - 1)
        if text == "too long":
            error = "prompt has 9 tokens, max_model_len=8"
            return RequestOutput("0", text, ids, [], True, RequestMetrics(stats), error=error)
        out = TOKENIZER.encode(TEXT)[: params.max_tokens]
        if self.change == "token" and index == 1:
            out[min(2, len(out) - 1)] = 77
        shift = 1e-7 if self.change == "logprob" else 0.0
        logprobs = [{i: Logprob(-0.25 + shift, 1, "x"), 9: Logprob(-1.5, 2, "y")} for i in out]
        choice = CompletionOutput(0, TOKENIZER.decode(out), out, -0.5, logprobs, "length", None)
        return RequestOutput("0", text, ids, [choice], True, RequestMetrics(stats))

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Delta]:
        self.seen.append((prompt, params))
        ids = TOKENIZER.encode(TEXT)
        for first in range(0, len(ids), 2):
            chunk = ids[first : first + 2]
            yield Delta("0", 0, TOKENIZER.decode(chunk), chunk, [True, False][: len(chunk)])

    def draft(self, ids: list[int], k: int, next_token: int | None = None) -> list[int]:
        target = TOKENIZER.encode(TEXT)
        assert next_token == target[0]
        return [*target[1:3], 77, *target[4:]][:k]


class Engines(list[FakeLLM]):
    """The engines that a command made; what they do is set before it runs."""

    change, drafts = "", 3

    def make(self, engine: dict[str, Any]) -> FakeLLM:
        self.append(FakeLLM(engine, self.change, self.drafts))
        return self[-1]
