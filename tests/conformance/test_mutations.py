"""The equality tests have power: they detect engines that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.attention.base import FunctionBackend
from draftproof.bench.compare import Difference, compare
from draftproof.matmul.linear import PackedLinear
from draftproof.sampling import verifier
from draftproof.sampling.verifier import VerifyResult, VerifyRows, drafts_of, row_index, verify_result
from tests.conformance.cases import EAGLE3, REPEATS, Requests, prompts, run
from tests.slow import slow

REQUESTS = Requests(
    [*prompts()[:5], REPEATS],
    [SamplingParams(temperature=t, seed=9, max_tokens=32, logprobs=1) for t in (0, 0.8, 0, 0.8, 0, 0)],
)
HEAD = {"model": EAGLE3, "num_speculative_tokens": 4, "policy": "fixed"}


def differences(**settings: Any) -> list[Difference]:
    """Differences between speculative output of the engine as patched now and plain output from before the patch."""
    outputs, llm = run(REQUESTS, speculative_config=HEAD, **settings)
    assert llm.stats.speculation.num_accepted_tokens > 0
    return compare(PLAIN[settings.get("dtype", "bfloat16")], outputs)


PLAIN: dict[str, list[RequestOutput]] = {}


@pytest.fixture(scope="module", autouse=True)
def plain_before_anything_is_spoilt() -> None:
    for dtype in ("float32", "bfloat16"):
        PLAIN[dtype], _ = run(REQUESTS, dtype=dtype, max_num_seqs=1, enable_prefix_caching=False)


def test_the_unspoilt_engine_shows_none() -> None:
    assert not differences(dtype="float32") and not differences(dtype="bfloat16")


def accept(sampled_M: Tensor, rows: VerifyRows, tokens_SL: Tensor, same_RK: Tensor) -> VerifyResult:
    """The exact rule, but with another notion of which drafts are accepted."""
    at_W = torch.arange(rows.width)
    sampled_RW = sampled_M[row_index(rows, at_W, len(sampled_M))]
    live_RK = same_RK & (at_W[:-1] < rows.draft_count_R[:, None])
    accepted_R = live_RK.long().cumprod(1).sum(1)
    drafts_RW = torch.nn.functional.pad(drafts_of(rows, at_W[:-1], tokens_SL).long(), (0, 1))
    tokens_RW = torch.where(at_W < accepted_R[:, None], drafts_RW, sampled_RW)
    return verify_result(tokens_RW, accepted_R, rows, at_W)


def spoil(monkeypatch: pytest.MonkeyPatch, taken: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Patch the verifier: taken(drafts_RK, sampled_RK, logits_RKV) decides which drafts are accepted."""
    original = verifier.ExactVerifier.verify

    def wrong(
        self: Any,
        logits_MV: Tensor,
        slots_M: Tensor,
        positions_M: Tensor,
        tokens_SL: Tensor,
        rows: VerifyRows,
        *,
        has_processing: bool,
    ) -> VerifyResult:
        if rows.width == 1 or not len(logits_MV):
            given = (logits_MV, slots_M, positions_M, tokens_SL, rows)
            return original(self, *given, has_processing=has_processing)
        sampled_M = self.sampler.sample(
            logits_MV, slots_M, positions_M, tokens_SL, has_processing=has_processing
        )
        at_W = torch.arange(rows.width)
        drafts_RK = drafts_of(rows, at_W[:-1], tokens_SL).long()
        index_RK = row_index(rows, at_W, len(sampled_M))[:, :-1]
        return accept(sampled_M, rows, tokens_SL, taken(drafts_RK, sampled_M[index_RK], logits_MV[index_RK]))

    monkeypatch.setattr(verifier.ExactVerifier, "verify", wrong)


def test_one_draft_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(drafts_RK: Tensor, sampled_RK: Tensor, logits_RKV: Tensor) -> Tensor:
        run_RK = (drafts_RK == sampled_RK).long().cumprod(1)
        return torch.nn.functional.pad(run_RK, (1, -1), value=1).bool()

    spoil(monkeypatch, one_more)
    assert differences(dtype="float32")


def test_favouring_the_draft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is accepted if the target finds it likely enough: "typical acceptance"."""

    def likely(drafts_RK: Tensor, sampled_RK: Tensor, logits_RKV: Tensor) -> Tensor:
        chance_RK = logits_RKV.softmax(-1).gather(2, drafts_RK[..., None])[..., 0]
        return (chance_RK > 0.3) | (drafts_RK == sampled_RK)

    spoil(monkeypatch, likely)
    assert any(d.what == "token" for d in differences(dtype="float32"))


def test_the_right_rule_put_in_the_same_way_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda drafts_RK, sampled_RK, _: drafts_RK == sampled_RK)
    assert not differences(dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_that_splits_its_sum_by_the_number_of_rows_is_seen(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    original = PackedLinear.__call__

    def wrong(self: PackedLinear, x_TK: Tensor) -> Tensor:
        if len(x_TK) < 4:
            return original(self, x_TK)
        left = x_TK.clone()
        left[:, x_TK.shape[1] // 2 :] = 0
        return original(self, left) + original(self, x_TK - left)

    monkeypatch.setattr(PackedLinear, "__call__", wrong)
    assert differences(dtype=dtype)


@slow
def test_an_attention_whose_chunks_follow_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are summed in two parts, split at a place that depends on the number of rows: equal except for rounding."""
    llm = LLM(dtype="float32", speculative_config=HEAD, attention_backend="reference")
    parts = llm.engine.runner

    def chunked(
        q_THD: Tensor,
        k: Tensor,
        v: Tensor,
        table_SB: Tensor,
        slots_T: Tensor,
        context_lens_T: Tensor,
        window: int,
        scale: float,
    ) -> Tensor:
        group = q_THD.shape[1] // k.shape[1]
        rows = []
        for q_HD, slot, end in zip(q_THD, slots_T.tolist(), context_lens_T.tolist(), strict=True):
            keys, values = (
                c[table_SB[slot].long()].transpose(0, 1).flatten(1, 2)[:, :end].repeat_interleave(group, 0)
                for c in (k, v)
            )
            weight_HP = ((q_HD[:, None] * keys).sum(-1) * scale).softmax(-1)
            cut = end * len(q_THD) // (len(q_THD) + 1)
            parts_HD = [
                (weight_HP[:, piece, None] * values[:, piece]).sum(1)
                for piece in (slice(cut), slice(cut, None))
            ]
            rows.append((parts_HD[0] + parts_HD[1]).flatten())
        return torch.stack(rows)

    backend = FunctionBackend(chunked)
    object.__setattr__(parts, "backend", backend)
    outputs = llm.generate(REQUESTS.prompts[:2], REQUESTS.params[:2], use_tqdm=False)
    plain = LLM(dtype="float32", max_num_seqs=1)
    object.__setattr__(plain.engine.runner, "backend", backend)
    assert compare(plain.generate(REQUESTS.prompts[:2], REQUESTS.params[:2], use_tqdm=False), outputs)
