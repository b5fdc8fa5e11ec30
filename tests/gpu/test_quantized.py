"""A drafter with fp8 weights on a GPU: outputs are unchanged, memory is saved, acceptance stays the same.

The kernel is compared with its twin in quantized_cases.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams
from tests.made.shared import DRAFT, EAGLE3, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=48)


def engine(**speculative: Any) -> LLM:
    config = {**speculative, "num_speculative_tokens": 4} if speculative else None
    return LLM(
        dtype="bfloat16", speculative_config=config, max_num_seqs=16, max_model_len=512, num_kv_blocks=1000
    )


@pytest.mark.parametrize("head", [EAGLE3, DRAFT], ids=["eagle3", "draft_model"])
def test_outputs_are_those_of_plain_decoding(cuda: torch.device, head: str) -> None:
    asked = prompts()[:8]
    expected = [o.outputs[0].token_ids for o in engine().generate(asked, GREEDY, use_tqdm=False)]
    rates: list[float] = []
    sizes: list[int] = []
    for quantization in (None, "fp8"):
        llm = engine(model=head, quantization=quantization)
        assert [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)] == expected
        stats = llm.stats.speculation
        rates.append(stats.num_accepted_tokens / stats.num_draft_tokens)
        sizes.append(llm.memory.draft_weights)
    assert rates[1] > 0.9 * rates[0] > 0
    if head == EAGLE3:  # the other head's embedding also makes its logits, so it is kept beside an fp8 copy
        assert sizes[1] < sizes[0]
