"""Cost of requests with penalties, token lists or a grammar: decoding steps with and without them, alternating.

    python bench/processing.py [--device cuda] [--model MODEL] [--batch 16] [--drafter '{"model": "..."}']

Prints the median time of a step for each batch: no request asks for logits processing, one does, all do. And tokens per
second, which with a drafter also depend on the text: answers that follow a grammar differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from draftproof import LLM, SamplingParams
from draftproof.cli.verify import failures

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "is_open": {"type": "boolean"}},
    "required": ["name", "age", "is_open"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": ITEM, "minItems": 500}  # an answer of any length
ONE_THAT_ASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.05},
    "lists": {"logit_bias": {5: -1.0}, "bad_words": [" never said"], "min_tokens": 8},
    "grammar": {"structured_outputs": {"json": ENDLESS}},
}


def arms(batch: int, num_tokens: int) -> dict[str, list[SamplingParams]]:
    """The parameters of each request, by arm (experimental condition)."""
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
    plain = [SamplingParams(**common)] * batch
    found = {"nobody": plain}
    for name, asked in list(ONE_THAT_ASKS.items())[1:]:
        found[f"one: {name}"] = [SamplingParams(**common, **asked), *plain[1:]]
        found[f"all: {name}"] = [SamplingParams(**common, **asked)] * batch
    return found


def speed(llm: LLM, prompts: list[dict[str, list[int]]], params: list[SamplingParams]) -> tuple[float, float]:
    """(milliseconds per step, tokens per second), including the prompts, which are short."""
    steps, start = llm.stats.num_steps, time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, num_steps = time.perf_counter() - start, llm.stats.num_steps - steps
    if wrong := failures(outputs):
        raise SystemExit(wrong[0])
    return 1e3 * seconds / num_steps, sum(len(o.outputs[0].token_ids) for o in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--arm", default="", help="only arms of this name, and nobody")
    parser.add_argument("--enforce-eager", action="store_true", help="no graphs, for comparison")
    parser.add_argument("--drafter", type=json.loads, help="a speculative_config as JSON")
    given = parser.parse_args()
    drafting = {"policy": "fixed", **given.drafter} if given.drafter else None
    with LLM(
        given.model,
        device=given.device,
        dtype=given.dtype,
        load_format=given.load_format,
        max_num_seqs=given.batch,
        max_model_len=512,
        enable_prefix_caching=False,
        enforce_eager=given.enforce_eager,
        speculative_config=drafting,
    ) as llm:
        prompts = [{"prompt_token_ids": [7 + i, 9, 11 + i, 13]} for i in range(given.batch)]
        asked = arms(given.batch, given.tokens)
        found: dict[str, list[tuple[float, float]]] = {
            name: [] for name in asked if name == "nobody" or given.arm in name
        }
        for number in range(given.repeats + 2):
            for name in found:
                measured = speed(llm, prompts, asked[name])
                if number >= 2:  # the first two are warm-up: graphs are captured
                    found[name].append(measured)
    nobody_ms, nobody_speed = map(statistics.median, zip(*found["nobody"], strict=True))
    for name, measurements in found.items():
        times, speeds = zip(*measurements, strict=True)
        median, tokens = statistics.median(times), statistics.median(speeds)
        print(
            f"{name:16} {median:8.3f} ms a step ({min(times):.3f} to {max(times):.3f}), {median / nobody_ms:.2f}; "
            f"{tokens:7.0f} tokens/s, {tokens / nobody_speed:.2f}"
        )


if __name__ == "__main__":
    main()
