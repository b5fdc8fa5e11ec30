"""Laws 1 and 2 for every registered drafter: ids and logprobs equal those of plain decoding, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.attention.compiled.backend import CompiledAttention
from draftproof.bench.compare import compare
from draftproof.drafters import registry
from draftproof.drafters.chain import Record
from draftproof.engine.auto_policy import AutoPolicy
from draftproof.engine.progress import Progress
from draftproof.runtime import native
from draftproof.runtime.graphs import OFTEN, Recorded
from tests.conformance.cases import CASES, KINDS, REPEATS, TARGETS, Requests, mixture, prompts, run
from tests.slow import few, slow, some

DTYPES = ["float32", "bfloat16"]
CONFIGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "one at a time": {"max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    # The first three requests have prompts of 45, 169 and 238 tokens: with up to 7 drafts they take 4 + 11 + 16 or
    # 4 + 12 + 16 of the 32 blocks beside the null block, so all start at once; before the second has its 24 tokens
    # they need 4 + 13 + 16, whatever the drafter and the text: one is preempted.
    "preempted": {"num_kv_blocks": 33, "max_model_len": 448},
    "small blocks": {"block_size": 4, "enable_prefix_caching": False},
}


@pytest.fixture(scope="session")
def plain() -> Callable[..., list[RequestOutput]]:
    """The mixture decoded plainly, one request at a time, without chunked prompts or prefix cache."""
    known: dict[tuple[str, int, str | None], list[RequestOutput]] = {}

    def get(dtype: str, block_size: int = 16, target: str | None = None) -> list[RequestOutput]:
        key = dtype, block_size, target
        if key not in known:
            settings: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
            known[key], _ = run(mixture(), dtype=dtype, model=target, block_size=block_size, **settings)
        return known[key]

    return get


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def erratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the `auto` policy random: each request gets a random number of drafts, sometimes all get none; what is
    compared with the output is random, too."""
    die = random.Random(11)

    def choose(policy: AutoPolicy, asked: list[Progress], num_others: int, num_joining: int = 0) -> list[int]:
        if die.random() < 0.05:
            return [0] * len(asked)
        return [die.choice(policy.costs.levels) for _ in asked]

    def shadows(policy: AutoPolicy, chosen: list[int], num_others: int) -> list[int]:
        return [die.choice((0, policy.costs.levels[-1])) for _ in chosen]

    monkeypatch.setattr(AutoPolicy, "choose", choose)
    monkeypatch.setattr(AutoPolicy, "shadows", shadows)
    monkeypatch.setattr(AutoPolicy, "will_draft", lambda *given: die.random() < 0.8)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chains use the first member that has a proposal, so that the choice does not depend on earlier rounds."""
    monkeypatch.setattr(Record, "expected", lambda record, slot: 1.0)


def drafting(method: str, k: int | None = 5, policy: str = "fixed") -> dict[str, Any]:
    """Settings for `LLM` with this method's drafter."""
    return CASES[method].llm(k, policy)


def check(
    expected: list[RequestOutput], actual: list[RequestOutput], llm: LLM, *, rejects: bool = True
) -> None:
    differences = compare(expected, actual)
    assert not differences, differences[0]
    speculation, scheduler = llm.stats.speculation, llm.engine.scheduler
    assert speculation.num_draft_tokens > 0, "nothing was drafted, so nothing was tested"
    assert speculation.num_accepted_tokens > 0
    assert speculation.num_accepted_tokens < speculation.num_draft_tokens or not rejects
    assert llm.stats.num_drafter_faults == 0
    scheduler.pages.check_integrity()
    assert not scheduler.running and scheduler.pages.num_free == scheduler.pages.num_blocks - 1


def test_every_registered_method_has_a_case() -> None:
    named = {name.split("/")[0] for name in CASES}
    assert named == {*registry.METHODS, registry.CHAIN, "custom", "custom_vllm", "custom_head"}


@slow
def test_the_mixture_is_one(plain: Any) -> None:
    """The mixture really mixes: the choices of a request differ, as do greedy and sampled answers to one prompt."""
    outputs, requests = plain("float32"), mixture()
    several = [o for o, p in zip(outputs, requests.params, strict=True) if p.n > 1]
    assert several and all(o.outputs[0].token_ids != o.outputs[1].token_ids for o in several)
    repeats = [
        o.outputs[0].token_ids[:16] for o, t in zip(outputs, requests.prompts, strict=True) if t == REPEATS
    ]
    assert len({tuple(ids) for ids in repeats}) > 2


@pytest.mark.parametrize("settings", few(CONFIGS, "chunks of 7"))
@pytest.mark.parametrize(
    ("target", "dtype"),
    few([(None, "float16"), *itertools.product([None, *TARGETS], DTYPES)], (None, "bfloat16")),
)
def test_plain_decoding_does_not_depend_on_the_batch(
    plain: Any, target: str | None, settings: str, dtype: str
) -> None:
    model = None if target is None else TARGETS[target]()
    outputs, llm = run(mixture(), dtype=dtype, model=model, **CONFIGS[settings])
    assert not compare(plain(dtype, CONFIGS[settings].get("block_size", 16), model), outputs)
    assert (llm.stats.num_preemptions > 0) == (settings == "preempted")


BATCHINGS = [("one batch", "float32"), *((c, "bfloat16") for c in CONFIGS)]
OF_EVERY_CASE = [*BATCHINGS[:2], ("chunks of 7", "bfloat16"), ("preempted", "bfloat16")]


# all ways of batching in bf16, and one in fp32 too: independence of the batch is shown above for both dtypes
@pytest.mark.parametrize(
    ("method", "settings", "dtype"),
    few(
        some(
            [(m, *batching) for m in CASES for batching in BATCHINGS],
            [(m, *batching) for m in CASES for batching in (BATCHINGS if m in KINDS else OF_EVERY_CASE)],
        ),
        *((m, "one batch", "bfloat16") for m in CASES),
    ),
)
def test_output_equals_plain_decoding(plain: Any, method: str, settings: str, dtype: str) -> None:
    outputs, llm = run(mixture(), dtype=dtype, **drafting(method), **CONFIGS[settings])
    block_size = CONFIGS[settings].get("block_size", 16)
    check(plain(dtype, block_size, CASES[method].target), outputs, llm)
    assert (llm.stats.num_preemptions > 0) == (settings == "preempted")


@slow
@pytest.mark.parametrize("settings", ["one batch", "chunks of 7", "preempted"])
@pytest.mark.parametrize("method", ["eagle3", "mtp/modules"])
def test_output_in_fp16_equals_plain_decoding(plain: Any, method: str, settings: str) -> None:
    outputs, llm = run(mixture(), dtype="float16", **drafting(method), **CONFIGS[settings])
    check(plain("float16", target=CASES[method].target), outputs, llm)


def test_fp16_runs_on_compiled_operators_alone() -> None:
    """A pass that used an operator of torch could not have been recorded."""
    if native.load() is None:
        pytest.skip("no C++ compiler")
    _, llm = run(mixture(), dtype="float16", **drafting("eagle3"))
    parts = llm.engine.runner
    assert isinstance(parts.backend, CompiledAttention) and isinstance(parts.graphs, Recorded)
    assert {key[0] for key in parts.graphs.recorded_keys()} >= {"verify", "drafting"}
    assert max(parts.graphs._table._num_met.values(), default=0) < OFTEN, (
        "what came often could not be recorded"
    )


@pytest.mark.parametrize(
    ("k", "method"),
    few(
        some(
            [(k, m) for k in (1, "max") for m in CASES],
            [(1, m) for m in KINDS] + [("max", m) for m in CASES],
        ),
        ("max", "eagle3"),
    ),
)
def test_output_does_not_depend_on_k(plain: Any, in_order: None, method: str, k: Any) -> None:
    """In a chain, the first member may draft K tokens."""
    k = CASES[method].max_drafts if k == "max" else k
    outputs, llm = run(mixture(), dtype="bfloat16", **drafting(method, k))
    check(plain("bfloat16", target=CASES[method].target), outputs, llm)
    assert len(llm.stats.speculation.drafted_per_position) == k


@slow
@pytest.mark.parametrize("method", few(some(CASES, KINDS), "eagle3"))
def test_output_does_not_depend_on_who_drafts_when(plain: Any, erratic: None, method: str) -> None:
    """With neighbours that have other numbers of drafts, requests that pause drafting, and some never shown to the
    drafter."""
    outputs, llm = run(mixture(), dtype="float32", **drafting(method, policy="adaptive"))
    check(plain("float32", target=CASES[method].target), outputs, llm)


@slow
@pytest.mark.parametrize(
    ("method", "num_threads", "dtype"),
    some(
        list(itertools.product(["eagle3", "mtp/modules", "gemma4_mtp"], [1, 2, 3], DTYPES)),
        [("eagle3", n, dtype) for n in (1, 2, 3) for dtype in DTYPES]
        + [("mtp/modules", 3, "bfloat16"), ("gemma4_mtp", 3, "bfloat16")],
    ),
)
def test_output_does_not_depend_on_threads(
    plain: Any, threads: None, method: str, num_threads: int, dtype: str
) -> None:
    torch.set_num_threads(num_threads)
    outputs, llm = run(mixture(), dtype=dtype, **drafting(method))
    check(plain(dtype, target=CASES[method].target), outputs, llm)


@pytest.mark.parametrize("method", few(some(CASES, KINDS), "eagle3"))
def test_a_prefix_hit_changes_nothing(in_order: None, method: str) -> None:
    """The second call finds its prompts in the cache; the drafter must propose what it did the first time."""
    texts = [p * 2 for p in prompts()[:4]]
    params = [SamplingParams(temperature=t, seed=8, max_tokens=24, logprobs=1) for t in (0, 0.8, 0, 0.8)]
    requests = Requests(texts, params)
    target = CASES[method].target
    expected, _ = run(requests, dtype="bfloat16", model=target, enable_prefix_caching=False)
    first, llm = run(requests, dtype="bfloat16", **drafting(method))
    check(expected, first, llm)
    assert llm.stats.num_cached_tokens == 0
    accepted = llm.stats.speculation.num_accepted_tokens
    second = llm.generate(requests.prompts, requests.params, use_tqdm=False)
    check(expected, second, llm)
    assert llm.stats.num_cached_tokens > 0
    if CASES[method].forgets:
        assert llm.stats.speculation.num_accepted_tokens == 2 * accepted


@pytest.mark.parametrize("method", few(some(CASES, KINDS), "eagle3"))
def test_an_answer_may_be_continued_from_the_cache(method: str) -> None:
    """A chat's next turn: prompt and answer come from the cache, including pages written while drafting."""
    llm = LLM(dtype="bfloat16", **drafting(method))
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, logprobs=1)
    first = llm.generate(REPEATS, params, use_tqdm=False)[0]
    turn = first.prompt_token_ids + first.outputs[0].token_ids + [203, 203]
    outputs = llm.generate([turn], params, use_tqdm=False)
    fresh = LLM(CASES[method].target, dtype="bfloat16", enable_prefix_caching=False)
    plain = fresh.generate([turn], params, use_tqdm=False)
    check(plain, outputs, llm, rejects=False)
    assert outputs[0].metrics.num_cached_tokens >= 64


@pytest.mark.parametrize("method", few(some(CASES, KINDS), "eagle3"))
def test_stopping_at_every_position_of_a_round(method: str) -> None:
    plain = LLM(CASES[method].target, dtype="float32")
    text = plain.generate(REPEATS, SamplingParams(temperature=0, max_tokens=14), use_tqdm=False)[0].outputs[0]
    params = [SamplingParams(temperature=0, max_tokens=n, logprobs=0) for n in range(1, 14)]
    params += [SamplingParams(temperature=0, max_tokens=14, stop_token_ids=[t]) for t in set(text.token_ids)]
    requests = Requests([REPEATS] * len(params), params)
    expected = plain.generate(requests.prompts, params, use_tqdm=False)
    outputs, llm = run(requests, dtype="float32", **drafting(method))
    check(expected, outputs, llm)


@pytest.mark.parametrize("method", few(some(CASES, KINDS), "eagle3"))
def test_the_edge_of_max_model_len(method: str) -> None:
    """Prompts that leave room for 1 to 8 tokens, fewer than K: drafts are never written or counted past the end."""
    ids = LLM(dtype="float32").tokenizer.encode(REPEATS * 3)[:60]
    listed: list[Any] = [ids[: 48 - n] for n in range(1, 9)]
    params = [SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, logprobs=0)] * len(listed)
    requests = Requests(listed, params)
    expected, _ = run(requests, dtype="float32", model=CASES[method].target, max_model_len=48)
    assert [len(o.outputs[0].token_ids) for o in expected] == list(range(1, 9))
    config = drafting(method, CASES[method].max_drafts)
    outputs, llm = run(requests, dtype="float32", max_model_len=48, **config)
    check(expected, outputs, llm)


@pytest.mark.parametrize("method", few([m for m, case in CASES.items() if case.repeatable], "eagle3"))
def test_drafts_from_kept_state_equal_drafts_from_scratch(in_order: None, method: str) -> None:
    """Proposals in the middle of a generation, after neighbours, chunks, rejections and a cached prefix, equal those
    after a fresh prefill of the same tokens."""
    settings: dict[str, Any] = {"dtype": "float32", **drafting(method)}
    llm = LLM(**settings, max_num_batched_tokens=16)
    first, second = prompts()[:2]
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    queue, state = llm.requests, llm.engine.runner.state
    proposed: list[tuple[list[int], list[int]]] = []
    requests = [queue.add(llm.tokenizer.encode(text), long) for text in (first, second)]
    while not all(r.finished for r in requests):
        # a third request, which finds the first one's pages
        if len(requests) == 2 and len(requests[1].choices[0].token_ids) > 8:
            requests.append(queue.add(requests[0].given.prompt_token_ids, long))
        queue.step()
        for running in llm.engine.scheduler.running:
            known, num = len(running.tokens), running.num_drafts
            if running.num_outputs and known + 5 < running.spec.limit:  # the end of a request cuts its drafts
                drafts = state.slots.tokens_SL[running.slot, known : known + num].tolist()
                proposed.append((list(running.tokens), drafts))
        if any(r.finished for r in requests) and not CASES[method].forgets:
            break
    assert len(proposed) >= 20 and llm.stats.num_cached_tokens > 0 and any(drafts for _, drafts in proposed)
    scratch, k = LLM(**settings), min(5, CASES[method].max_drafts)
    for known_tokens, drafts in proposed[:: len(proposed) // 20]:
        assert scratch.draft(known_tokens[:-1], k, next_token=known_tokens[-1]) == drafts
