"""Plans of a speculative_config: each chain member's K, settings for all members together, settings without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, Proposal, SamplingParams, Verified
from draftproof.attention.reference import REFERENCE
from draftproof.cache.pool import PagedCache
from draftproof.drafters.base import Drafter, DraftRuntime, DraftSpec
from draftproof.drafters.chain import ChainDrafter, Record
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.kernels.ops import TORCH
from draftproof.runtime.graphs import EAGER
from tests.conformance.cases import CASES, REPEATS
from tests.made.shared import DRAFT, EAGLE3

SUFFIX = {"method": "suffix"}
NGRAM = {"method": "ngram"}


def engine(drafters: list[dict[str, Any]], **config: Any) -> LLM:
    speculative = {"method": "chain", "drafters": drafters, "policy": "fixed", **config}
    return LLM(dtype="float32", speculative_config=speculative, max_model_len=256)


class Counting:
    """Forwards a network's calls and counts them."""

    def __init__(self, head: Any) -> None:
        self._head, self.num_calls = head, 0

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        return self._head(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def test_a_member_drafts_no_more_than_its_own_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """It proposes no more drafts, nor unrolls its head further. Patched so that the first member counts as the best."""
    monkeypatch.setattr(Record, "expected", lambda record, slot: 1.0)
    llm = engine([{"model": EAGLE3, "num_speculative_tokens": 2}, SUFFIX])
    assert llm.num_speculative_tokens == 16
    sandbox = llm.engine.runner.drafter
    assert isinstance(sandbox, ChainDrafter)
    head = sandbox._drafters[0].drafter
    assert isinstance(head, HeadDrafter)
    counting = Counting(head.head)
    head.unroll._head = counting  # type: ignore[attr-defined]
    assert len(llm.draft(llm.tokenizer.encode(REPEATS), 16)) == 2
    llm.generate(REPEATS, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    stats = llm.stats.speculation
    assert stats.num_accepted_tokens > 0 and llm.stats.num_drafter_faults == 0
    assert 0 < stats.num_draft_tokens <= 2 * stats.num_rounds
    assert counting.num_calls <= 2 * (llm.stats.num_steps + 4)


@pytest.mark.parametrize(
    ("drafters", "config", "k"),
    [
        ([NGRAM], {}, 4),
        ([NGRAM, SUFFIX], {}, 16),
        ([NGRAM, {"model": DRAFT}], {}, 5),
        ([{**NGRAM, "num_speculative_tokens": 7}, {"model": DRAFT}], {}, 7),
        ([{**NGRAM, "num_speculative_tokens": 7}, SUFFIX], {"num_speculative_tokens": 3}, 3),
        ([{**NGRAM, "num_speculative_tokens": 2}], {"num_speculative_tokens": 9}, 2),
        ([{"method": "chain", "drafters": [SUFFIX], "num_speculative_tokens": 6}, NGRAM], {}, 6),
    ],
)
def test_a_chains_k_is_its_members_largest_but_no_more_than_was_asked(
    drafters: list[dict[str, Any]], config: dict[str, Any], k: int
) -> None:
    assert engine(drafters, **config).num_speculative_tokens == k


@pytest.mark.parametrize("name", ["eagle3", "mtp", "peagle"])
def test_a_members_own_k_gives_the_first_of_its_drafts(name: str) -> None:
    head = CASES[name].config["model"]
    alone = LLM(dtype="float32", speculative_config={"model": head, "num_speculative_tokens": 3})
    chain = engine([{"model": head, "num_speculative_tokens": 3}, SUFFIX])
    tokens = chain.tokenizer.encode(REPEATS)
    assert chain.draft(tokens, 16) == alone.draft(tokens, 3) != []


class Eager(Drafter):
    """Proposes six tokens, however many are asked for."""

    spec = DraftSpec()

    def __init__(self, first: int) -> None:
        self.first, self.asked = first, list[int]()

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.asked.append(num_drafts)
        tokens_RK = self.first + torch.arange(6).expand(verified.num_requests, 6)
        return Proposal(tokens_RK, torch.full_like(verified.k_R, 6))


def test_what_a_member_proposes_beyond_its_k_is_cut() -> None:
    first, second = Eager(10), Eager(20)
    k_R = torch.tensor([0, 1, 5])
    none = torch.zeros(0)
    verified = Verified(
        tokens_T=none,
        positions_T=none,
        query_start_loc_R1=none,
        slots_R=torch.arange(3),
        live_R=torch.ones(3),
        next_R=k_R,
        k_R=k_R,
        taps=(),
        draw=None,  # type: ignore[arg-type]
        history=lambda r: none,
    )
    members = [DrafterSandbox(d, vocab_size=100, max_faults=1, time_limit=None) for d in (first, second)]
    chain = ChainDrafter(members, [2, 9], vocab_size=100)
    cache = PagedCache([], torch.zeros(3, 1, dtype=torch.int32))
    chain.bind(DraftRuntime(ops=TORCH, backend=REFERENCE, cache=cache, graphs=EAGER))
    proposal = chain.propose(verified, 5)
    assert (first.asked, second.asked) == ([2], [5])
    assert proposal.count_R.tolist() == [0, 1, 2]
    assert proposal.tokens_RK[1:].tolist() == [[10, 11, 0, 0, 0]] * 2


@pytest.mark.parametrize(("key", "value"), [("policy", "fixed"), ("max_faults", 1), ("time_limit", 0.1)])
@pytest.mark.parametrize("method", ["chain", "replay"])
def test_what_holds_for_the_engine_is_refused_in_a_member(method: str, key: str, value: Any) -> None:
    config = {"method": method, "drafters": [{**NGRAM, key: value}]}
    with pytest.raises(
        ValueError, match=rf"drafters\[\d\]: {key}={value!r}: .*beside 'drafters', not in one of them"
    ):
        LLM(speculative_config=config)


HEAD = {"model": EAGLE3}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**HEAD, "quantization": "awq"}, "quantization='awq'.*must be one of fp8, or left out"),
        ({**HEAD, "quantization": "FP8"}, "quantization='FP8'.*fp8"),
        ({**HEAD, "quantization": True}, "quantization=True.*must be one of"),
        (
            {"method": "chain", "drafters": [{**NGRAM, "quantization": "fp8"}]},
            "method='ngram' has no checkpoint",
        ),
        (
            {**NGRAM, "quantization": "fp8"},
            "quantization='fp8': method='ngram' has no checkpoint.*leave it out",
        ),
        (
            {"method": "tests.conformance.custom.Moody", "quantization": "fp8"},
            "method='tests.conformance.custom.Moody' has no checkpoint",
        ),
        (
            {"method": "chain", "drafters": [HEAD], "quantization": "fp8"},
            "method='chain'.*or give it to those of its drafters",
        ),
        (
            {"method": "replay", "recordings": "r.json", "drafters": [HEAD], "quantization": "fp8"},
            "method='replay'.*or give it to those of its drafters",
        ),
    ],
)
def test_fp8_weights_are_refused_where_there_are_none(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(speculative_config=config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": {**NGRAM, "model": "/nope"}}, "method='ngram'.*model='/nope'"),
        ({"speculative_config": {**SUFFIX, **HEAD}}, f"method='suffix'.*model='{EAGLE3}'"),
        ({"speculative_config": {"method": "chain", "drafters": [NGRAM], **HEAD}}, "method='chain'.*model="),
        (
            {"speculative_config": {"method": "replay", "drafters": [NGRAM], **HEAD}},
            "method='replay'.*model=",
        ),
        ({**HEAD, "speculative_config": NGRAM}, f"model='{EAGLE3}' is a draft head for 'eagle3'.*'ngram'"),
        ({**HEAD, "speculative_config": {"method": "chain", "drafters": [NGRAM]}}, "draft head for.*'chain'"),
    ],
)
def test_a_checkpoint_that_would_not_be_used_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**settings)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
        ("", "AttributeError: module .* has no attribute 'Mine'"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_users_module_that_cannot_be_imported_is_refused_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, cause: str, inside: bool
) -> None:
    name = f"users_module_{abs(hash((code, inside)))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config: dict[str, Any] = {"method": f"{name}.Mine"}
    with pytest.raises(ValueError, match=rf"method='{name}.Mine': cannot be imported \({cause}"):
        LLM(speculative_config={"method": "chain", "drafters": [config]} if inside else config)
