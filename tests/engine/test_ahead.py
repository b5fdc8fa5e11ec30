"""The GPU's mode of operation, emulated on a CPU: passes in flight, and whole steps replayed over fixed buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from draftproof.bench.internals import drafter_of
from draftproof.drafters.base import DraftRuntime, KnownTokens
from draftproof.engine.runner import ModelRunner
from draftproof.engine.shapes import BatchShape, mixed_sizes
from draftproof.runtime.graphs import often
from draftproof.runtime.transfer import IntegerRows
from tests.conformance.cases import CASES, EAGLE3, MTP, Case, mixture
from tests.helpers import one_by_one

# without users' drafters, whose passes are not recorded
OURS = {name: case for name, case in CASES.items() if not name.startswith("custom")}
OURS["chain of eagle3, mtp"] = Case({"method": "chain", "drafters": [{"model": EAGLE3}, {"model": MTP}]})
METHODS = [None, *OURS]


class NoLook(TorchDispatchMode):
    """Fails on operators that would make the host wait for a GPU: those that read values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        return func(*args, **(kwargs or {}))


class Replayed:
    """Emulates CUDA graphs: inputs are copied to fixed buffers, and results overwrite those of the first run."""

    calls_once = False
    num_warming = 0
    num_bytes = 0
    latest = 0

    def __init__(self) -> None:
        self.entries: dict[Any, tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self.num_replays = 0
        self._inside = False

    def prepare(self, key: Any, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> bool:
        static = tuple(t.clone() for t in inputs)
        self.entries[key] = (function, static, self._call(function, static))
        return True

    def holds(self, key: Any) -> int:
        return 1 + list(self.entries).index(key) if key in self.entries else 0

    def run(
        self,
        key: Any,
        function: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        *,
        when: Callable[[], int] = often,
    ) -> tuple[Tensor, ...]:
        if self._inside:
            return function(*inputs)  # type: ignore[no-any-return]
        if key not in self.entries:
            self.prepare(key, function, inputs)
        captured, static, outputs = self.entries[key]
        for held, given in zip(static, inputs, strict=True):
            held.copy_(given)
        for held, new in zip(outputs, self._call(captured, static), strict=True):
            _tensor(held).copy_(_tensor(new))
        self.num_replays += 1
        self.latest = self.holds(key)
        return outputs

    def _call(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._inside = True
        try:
            with NoLook():
                return function(*inputs)  # type: ignore[no-any-return]
        finally:
            self._inside = False


def _tensor(output: Tensor | IntegerRows) -> Tensor:
    return output.tensor if isinstance(output, IntegerRows) else output


def ahead(llm: LLM, buckets: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Replayed:
    """Make the engine run one pass ahead and replay whole steps."""
    graphs, runner = Replayed(), llm.engine.runner
    assert isinstance(runner, ModelRunner)
    runner.graphs, runner.async_depth = graphs, int(not runner.spec.host_tokens)
    runner.shapes.buckets, runner.shapes.mixed = buckets, mixed_sizes(llm.config)
    if runner.spec.kv or runner.spec.borrow:
        assert runner.drafter is not None
        cache = runner.draft_cache.beside(runner.cache, runner.spec.borrow)
        slots = runner.state.slots
        known = KnownTokens(slots.tokens_SL, slots.length_S)
        runtime = DraftRuntime(
            ops=runner.ops, backend=runner.backend, cache=cache, graphs=graphs, known=known
        )
        runner.drafter.bind(runtime)
    runner.warm_up(lambda done, total: None)
    return graphs


def build(method: str | None, **settings: Any) -> LLM:
    drafting: dict[str, Any] = {} if method is None else OURS[method].llm(3)
    return LLM(dtype="float32", **{**drafting, **settings})


SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "five at a time, chunks of 24": {"max_num_seqs": 5, "max_num_batched_tokens": 24},
    "preempted": {"num_kv_blocks": 32, "max_model_len": 448, "block_size": 16},
}


@pytest.fixture(scope="module")
def plain() -> Callable[..., list[Any]]:
    """Outputs of a method's target for the mixture, decoded plainly."""
    known: dict[str | None, list[Any]] = {}

    def get(method: str | None) -> list[Any]:
        target, wanted = OURS[method].target if method else None, mixture()
        if target not in known:
            llm = build(None, model=target, max_num_seqs=1)
            known[target] = llm.generate(wanted.prompts, wanted.params, use_tqdm=False)
        return known[target]

    return get


@pytest.mark.parametrize(
    ("method", "name"),
    [(method, name) for method in METHODS for name in SETTINGS if method == "eagle3" or name == "preempted"],
)
def test_running_ahead_changes_nothing(
    plain: Callable[..., list[Any]], method: str | None, name: str
) -> None:
    wanted, llm, expected = mixture(), build(method, **SETTINGS[name]), plain(method)
    graphs = ahead(llm)
    outputs = llm.generate(wanted.prompts, wanted.params, use_tqdm=False)
    assert not compare(expected, outputs)
    assert graphs.num_replays > 5
    assert any(key[0] == "target" and key[1] in llm.engine.runner.shapes.mixed for key in graphs.entries)
    if llm.engine.runner.async_depth:
        assert any(key[0] == "step" and key[1].processing for key in graphs.entries)
    if name == "preempted":
        assert llm.stats.num_preemptions
    if method:
        assert llm.stats.speculation.num_accepted_tokens > 20 and not llm.stats.num_drafter_faults


@pytest.mark.parametrize("method", METHODS)
def test_whole_steps_serve_a_batch_smaller_than_the_bucket(method: str | None) -> None:
    wanted, llm = mixture(), build(method)
    graphs = ahead(llm, buckets=(16,))
    params = [SamplingParams(temperature=0, max_tokens=30, logprobs=2)] * 3
    outputs = llm.generate(wanted.prompts[:3], params, use_tqdm=False)
    target = OURS[method].target if method else None
    expected = build(None, model=target, max_num_seqs=1).generate(wanted.prompts[:3], params, use_tqdm=False)
    assert not compare(expected, outputs)
    assert graphs.num_replays > 5


@pytest.mark.parametrize("most_rows", [1, 7, 64, 100])
def test_steps_with_prompts_are_filled_up_to_few_sizes_and_change_nothing(most_rows: int) -> None:
    wanted = mixture()
    plain, llm = build(None, max_num_seqs=1), build("eagle3", max_num_batched_tokens=most_rows)
    prompts = [plain.tokenizer.encode(text) for text in wanted.prompts[:6]]
    expected = plain.generate(
        [{"prompt_token_ids": ids} for ids in prompts], wanted.params[:6], use_tqdm=False
    )
    graphs, runner, filled = ahead(llm, buckets=(1,)), llm.engine.runner, list[bool]()
    assert isinstance(runner, ModelRunner)
    load = runner.state.load

    def watched(scheduled: Any, shape: BatchShape, *rest: Any) -> Tensor:
        work_4R = load(scheduled, shape, *rest)
        assert work_4R[1].sum() == shape.num_rows and work_4R[2].sum() == shape.num_sampled
        if any(s.num_rows > s.num_sampled for s in scheduled):
            filled.append(shape.num_requests > len(scheduled))
            assert shape.num_rows in runner.shapes.mixed
        return work_4R

    runner.state.load = watched  # type: ignore[method-assign]
    assert not compare(expected, one_by_one(llm, prompts, wanted.params[:6]))
    if most_rows > 1:
        assert set(filled) == {True, False} and llm.stats.speculation.num_accepted_tokens > 5
    sizes = {key[1] for key in graphs.entries if key[0] == "target"}
    assert sizes and sizes <= {*runner.shapes.mixed}
    drafter = drafter_of(llm)
    assert {key[0] for key in graphs.entries} >= {"target", ("feed", drafter), ("draft", drafter)}


def test_the_next_pass_is_under_way_before_a_pass_is_read() -> None:
    llm = build("eagle3")
    ahead(llm)
    llm.requests.add("def f(", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    engine = llm.engine
    (request,) = engine.scheduler.waiting
    seen = []
    while request.finish_reason is None:
        llm.requests.step()
        seen.append(engine.num_in_flight)
    assert set(seen[:-1]) == {1} and request.num_outputs == 12
    engine.drain()
    assert engine.scheduler.is_idle
    assert engine.scheduler.pages.num_free == engine.scheduler.pages.num_blocks - 1


def test_an_aborted_request_leaves_the_others_alone() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = build(None).generate(["def f(", "class A"], params, use_tqdm=False)
    llm = build("eagle3", num_kv_blocks=16, max_model_len=64)
    ahead(llm)
    first, second = (llm.requests.add(text, params) for text in ("class A", "def f("))
    for _ in range(4):
        llm.requests.step()
    llm.abort(first.request_id)
    third = llm.requests.add("class A", params)
    while not (second.finished and third.finished):
        llm.requests.step()
    for request, wanted in ((second, expected[0]), (third, expected[1])):
        got = llm.requests.output(request).outputs[0]
        assert got.token_ids == wanted.outputs[0].token_ids


def test_draft_does_not_swallow_what_a_stream_has_coming() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = build("eagle3")
    ahead(llm)
    expected = [t for delta in llm.stream("def f(", params) for t in delta.token_ids]
    found: list[int] = []
    for delta in llm.stream("def f(", params):
        found += delta.token_ids
        if len(found) in (2, 3, 4, 5, 6):
            with pytest.raises(ValueError, match="other requests are running"):
                llm.draft([1, 2, 3], 2, next_token=5)
    assert found == expected
    assert llm.draft([1, 2, 3], 2, next_token=5)


def test_a_drafter_that_fails_while_it_is_captured_is_not_frozen_into_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = build("eagle3")
    drafter = llm.engine.runner.drafter.drafter

    def fails(*args: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(drafter, "propose", fails)
    with pytest.raises(MemoryError, match="no room"):
        ahead(llm)
