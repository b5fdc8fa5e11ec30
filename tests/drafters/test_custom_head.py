"""A user's function that builds a head works like a built-in method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftproof import LLM, RequestOutput, SamplingParams, assets
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter
from examples.custom_head import build

PROMPTS = ["def add(a, b):", "import numpy as np\n\n", "What is 12 * 7?"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=1)


def run(config: dict[str, Any] | None) -> list[RequestOutput]:
    drafts = {"num_speculative_tokens": 4, "policy": "fixed"}
    llm = LLM(max_num_seqs=2, speculative_config=config and config | drafts)
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_the_example_drafts_what_the_package_does_with_the_same_weights() -> None:
    plain, own = run(None), run({"method": "examples.custom_head.build"})
    package = run({"model": str(assets.path("tiny-eagle3"))})
    assert [o.outputs for o in own] == [o.outputs for o in plain]
    assert [o.metrics.speculation for o in own] == [o.metrics.speculation for o in package]
    assert sum(o.metrics.speculation.num_accepted_tokens for o in own) > 5


def reads_far_ahead(ctx: DraftContext) -> HeadDrafter:
    drafter = build(ctx)
    drafter.head.spec = replace(drafter.head.spec, lookahead=9)
    return HeadDrafter(drafter.head)


def test_places_that_a_head_asks_for_are_reserved() -> None:
    """Pages are reserved for rows of drafts that the head writes itself, beyond those of its layout."""
    config = {"method": f"{__name__}.reads_far_ahead", "num_speculative_tokens": 2}
    llm = LLM(max_num_seqs=2, speculative_config=config)
    assert llm.engine.runner.spec.lookahead == 9


def gives_nothing(ctx: DraftContext) -> None:
    assert ctx.target.config.num_layers == 8


def breaks(ctx: DraftContext) -> None:
    raise RuntimeError("no weights here")


@pytest.mark.parametrize(
    ("name", "said"),
    [("gives_nothing", "has no method propose"), ("breaks", "RuntimeError: no weights here")],
)
def test_a_function_that_builds_no_drafter_is_named(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LLM(speculative_config={"method": f"{__name__}.{name}"})


def test_a_head_that_is_lent_no_price_is_not_taken_to_stop_by_itself() -> None:
    """Its number of drafts is what is made."""
    llm = LLM(max_num_seqs=2, speculative_config={"method": "examples.custom_head.build"})
    assert not llm.core.runner.drafter_stops and not llm.core.runner.spec.estimates
