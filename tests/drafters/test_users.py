"""What the engine guarantees to a user's drafter class."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from draftproof import LLM, DraftSpec, Proposal, SamplingParams, Taps, Verified


class Watcher:
    """Proposes nothing, and counts the rows that it sees."""

    spec = DraftSpec(taps=Taps(final=True))
    rows: ClassVar[list[int]] = []

    def __init__(self, config: object) -> None:
        self.rows.clear()

    def bind(self, runtime: Any) -> None:
        assert runtime.known is None, "tokens of the engine's own are not lent"

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.rows.append(int(verified.live_R.sum()))
        return Proposal(torch.zeros(verified.num_requests, num_drafts).long(), torch.zeros_like(verified.k_R))


@pytest.mark.parametrize("num_drafts", [4, "auto"])
def test_it_is_called_after_every_pass(num_drafts: int | str) -> None:
    """It is called even if no drafts are wanted, since it may exist to observe the target's states."""
    config = {"method": f"{__name__}.Watcher", "num_speculative_tokens": num_drafts}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(max_num_batched_tokens=32, max_model_len=256, speculative_config=config) as llm:
        llm.generate([{"prompt_token_ids": list(range(5, 105))}], params, use_tqdm=False)
    assert sum(Watcher.rows) == 119
