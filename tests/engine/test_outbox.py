"""What a pass did to its sequences must not depend on how many tokens came home at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof import SamplingParams
from draftproof.engine.outbox import Flight, deliver
from draftproof.engine.scheduler import Plan, Work
from draftproof.engine.scores import Scorer
from draftproof.engine.sequence import Sequence
from draftproof.frontend.text import StopChecker
from draftproof.kernels.transfer import download

NONE = -1  # what the verifier emits where a row of logits holds no number


class Brackets:
    """A detokenizer: token 5 is "<5>"."""

    def push(self, token_id: int) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class FirstColumn:
    """A sampler whose logprob of a token is the row's first logit."""

    def logprobs(self, logits_MV: Tensor, tokens_M: Tensor, num: int) -> tuple[Tensor, ...]:
        first_M = logits_MV[:, 0]
        return first_M, tokens_M, tokens_M[:, None], first_M[:, None]


def after(rounds: list[list[int]], **params: Any) -> tuple[Any, ...]:
    """The sequence's output when its tokens come in these rounds."""
    given = SamplingParams(temperature=0, max_tokens=8, logprobs=1, **params)
    checker = StopChecker(given, eos_ids=(), max_tokens=8, detokenizer=Brackets())  # type: ignore[arg-type]
    s = Sequence(
        request_id="r",
        index=0,
        arrival=0,
        tokens=[1, 2, 3],
        num_prompt=2,
        params=given,
        row_seed=0,
        limit=10,
        stop_ids=frozenset(),
        checker=checker,
        slot=0,
    )
    scorer = Scorer(None, FirstColumn())  # type: ignore[arg-type]
    for tokens in rounds:
        if s.finish_reason is None:
            width = len(tokens)
            s.num_pending += width
            columns = [width, width - 1, 0, 0]  # emitted, drafted, proposed, broken
            plan = Plan([Work(s, 0, width, width)])
            result_RX = torch.tensor([[*tokens, *columns]])
            logits_MV = torch.tensor(tokens, dtype=torch.float32)[:, None].expand(-1, 3)
            outputs = scorer.outputs(plan, result_RX, logits_MV)
            deliver(Flight(plan, download([result_RX]), outputs, scorer.prompts(plan, torch.zeros(width, 1))))
    return s.tokens, s.checker.text, s.finish_reason, [row.logprob for row in s.logprobs]


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": [6]}, {"stop": [">"]}, {"min_tokens": 3}], ids=str)
@pytest.mark.parametrize("tokens", [[NONE], [5, NONE], [5, 6, NONE], [6, NONE], [5, 6, 7]], ids=str)
def test_accepted_drafts_before_a_row_without_a_number_count_as_in_plain_decoding(
    tokens: list[int], params: dict[str, Any]
) -> None:
    at_once, one_by_one = after([tokens], **params), after([[t] for t in tokens], **params)
    assert at_once == one_by_one
    assert at_once[2] in (None, "stop", "error") and len(at_once[3]) == len(at_once[0]) - 3
