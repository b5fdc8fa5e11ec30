"""`AsyncLLM`: answers equal `LLM`'s, cancelled tasks free their resources, and every request is told of the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from draftproof import LLM, Delta, SamplingParams
from draftproof.engine.core import EngineCore
from draftproof.engine.interface import DeviceFaultError
from draftproof.engine.runner import ModelRunner
from draftproof.frontend import async_llm
from draftproof.frontend.async_llm import AsyncLLM
from draftproof.types import RequestHints
from tests.conformance.cases import REPEATS, prompts
from tests.server.running import ENGINE, LONG, drafting

PROMPTS = [*prompts()[:3], REPEATS]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=1),
    SamplingParams(temperature=0.8, seed=5, max_tokens=30, n=2, logprobs=1),
    SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=60, stop=["\n"]),
]
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LONG))


async def collect(llm: AsyncLLM, *request: Any, **options: Any) -> list[Delta]:
    return [delta async for delta in llm.generate(*request, **options)]


def check_nothing_left(llm: AsyncLLM) -> None:
    pages = llm.llm.engine.scheduler.pages
    pages.check_integrity()
    assert pages.num_free == pages.num_blocks - 1
    assert not llm.llm.requests.running and llm.num_open == 0


def facts(deltas: list[Delta], index: int) -> tuple[Any, ...]:
    """The parts of an answer that must not depend on other requests."""
    own = [d for d in deltas if d.index == index]
    ids = [i for d in own for i in d.token_ids]
    logprobs = [row[i].logprob for d in own for i, row in zip(d.token_ids, d.logprobs or [], strict=False)]
    return "".join(d.text for d in own), ids, logprobs, own[-1].finish_reason, own[-1].stop_reason


def test_tasks_get_what_llm_gives() -> None:
    plain = LLM(**ENGINE).generate(PROMPTS, PARAMS, use_tqdm=False)

    async def main() -> list[list[Delta]]:
        llm = AsyncLLM(drafting())
        try:
            asked = [collect(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
            return await asyncio.gather(*asked)
        finally:
            assert llm.llm.stats.speculation.num_accepted_tokens > 0
            check_nothing_left(llm)
            await llm.shutdown()

    for deltas, output in zip(run(main()), plain, strict=True):
        for choice in output.outputs:
            logprobs = [
                row[i].logprob for i, row in zip(choice.token_ids, choice.logprobs or [], strict=False)
            ]
            expected = (choice.text, choice.token_ids, logprobs, choice.finish_reason, choice.stop_reason)
            assert facts(deltas, choice.index) == expected


def test_a_cancelled_task_leaves_nothing_behind() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting(num_kv_blocks=64))
        came = asyncio.Event()

        async def endless() -> None:
            async for _ in llm.generate("x = ", ENDLESS):
                came.set()

        tasks = [asyncio.create_task(endless()) for _ in range(3)]
        await came.wait()
        assert llm.num_open == 3
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await llm.drained()
        check_nothing_left(llm)
        assert (await collect(llm, "x = ", PARAMS[0]))[-1].finish_reason == "length"
        await llm.shutdown()

    run(main())


def test_abort_ends_an_iterator_with_what_there_is() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        texts, reasons = [], []
        async for delta in llm.generate("x = ", ENDLESS, "mine"):
            texts.append(delta.text)
            reasons.append(delta.finish_reason)
            llm.abort("mine")
        assert reasons[-1] == "abort" and len("".join(texts)) > 0
        llm.abort("nobody")
        check_nothing_left(llm)
        await llm.shutdown()

    run(main())


def test_an_id_that_is_running_is_refused() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        given = await llm.prepare("x = ", ENDLESS)
        with_id = llm.begin(given, "mine")
        assert with_id.request_id == "mine"
        with pytest.raises(ValueError, match="request_id='mine': is running already; give another"):
            llm.begin(given, "mine")
        with_id.close()
        await llm.drained()
        assert await collect(llm, "x = ", PARAMS[0], "mine")
        await llm.shutdown()

    run(main())


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_number_of_drafts_is_a_requests_own(most: int) -> None:
    async def main() -> tuple[list[list[Delta]], list[int]]:
        llm = AsyncLLM(drafting())
        asked = [
            collect(llm, REPEATS, PARAMS[0], "few", hints=RequestHints(num_speculative_tokens=most)),
            collect(llm, REPEATS, PARAMS[0], "many"),
        ]
        answers = await asyncio.gather(*asked)
        drafted = llm.llm.stats.speculation.drafted_per_position
        await llm.shutdown()
        return answers, drafted

    (few, many), _ = run(main())
    assert facts(few, 0) == facts(many, 0)
    longest = [max((sum(d.accepted) for d in deltas), default=0) for deltas in (few, many)]
    assert longest[0] <= most < longest[1]
    assert longest[0] > 0 or most == 0


def test_shutting_down_lets_requests_end() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        task = asyncio.create_task(collect(llm, "x = ", PARAMS[0]))
        while not llm.num_open:
            await asyncio.sleep(0.001)
        await llm.shutdown(LONG)
        assert (await task)[-1].finish_reason == "length"
        with pytest.raises(RuntimeError, match="the engine has been shut down"):
            await collect(llm, "x = ", PARAMS[0])
        await llm.shutdown()

    run(main())


def test_shutting_down_without_patience_answers_everybody() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        tasks = [asyncio.create_task(collect(llm, "x = ", ENDLESS)) for _ in range(4)]
        while llm.num_open < 4:
            await asyncio.sleep(0.001)
        await llm.shutdown()
        assert [(await task)[-1].finish_reason for task in tasks] == ["abort"] * 4

    run(main())


@pytest.mark.parametrize("fault", [DeviceFaultError("gone"), MemoryError("none left")])
def test_a_fault_of_the_engine_reaches_everybody(
    monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """No exception, the runner's or an unexpected one, leaves an iterator waiting."""

    async def main() -> None:
        llm = AsyncLLM(drafting())
        tasks = [asyncio.create_task(collect(llm, "x = ", ENDLESS)) for _ in range(3)]
        while llm.num_open < 3:
            await asyncio.sleep(0.001)

        def fail(*given: Any) -> Any:
            raise fault

        is_device = isinstance(fault, DeviceFaultError)
        monkeypatch.setattr(ModelRunner if is_device else EngineCore, "run" if is_device else "step", fail)
        for task in tasks:
            last = (await task)[-1]
            assert last.finish_reason == "error" and str(fault) in str(last.error)
        assert str(fault) in str(llm.error)
        with pytest.raises(RuntimeError, match=str(fault)):
            await collect(llm, "x = ", ENDLESS)
        await llm.shutdown()

    run(main())


def test_a_fault_that_leaves_the_engine_in_pieces_reaches_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that were closed meanwhile, and aborts that fail, do not keep others from being told."""

    def fail(*given: Any) -> Any:
        raise MemoryError("none left")

    async def main() -> None:
        llm = AsyncLLM(drafting())
        await llm.pause()
        given = await llm.prepare("x = ", ENDLESS)
        left, *streams = [llm.begin(given) for _ in range(4)]
        lost = streams.pop()
        await llm._in_engine(lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "step", fail)
            patch.setattr(EngineCore, "abort", fail)
            del llm.llm.requests.running[lost.request_id]
            left.close()  # its abort raises in the engine's thread
            for stream in streams:
                last = [delta async for delta in stream][-1]
                assert last.finish_reason == "error" and "none left" in str(last.error)
            assert [delta.finish_reason async for delta in lost] == ["abort"]
        assert "none left" in str(llm.error)
        await llm.shutdown()

    run(main())


def test_a_paused_engine_takes_requests_and_makes_no_steps() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        await llm.pause()
        stream = llm.begin(await llm.prepare("x = ", PARAMS[0]))
        before = llm.llm.stats.num_steps
        pauses = stream.with_pauses(0.01)
        assert await anext(pauses) is None
        assert llm.llm.stats.num_steps == before
        await llm.resume()
        assert len([delta async for delta in pauses if delta is not None]) > 1
        await llm.reset_prefix_cache()
        await llm.shutdown()

    run(main())


def test_whoever_stops_waiting_for_an_order_harms_nobody() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        is_left = threading.Event()
        busy = asyncio.create_task(llm._in_engine(is_left.wait))
        order = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0.001)
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
        is_left.set()
        await busy
        assert (await collect(llm, "x = ", PARAMS[0]))[-1].finish_reason == "length"
        await llm.shutdown()

    run(main())


def test_a_fault_between_two_steps_reaches_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further step is made that could deliver it."""

    def fail(engine: EngineCore) -> None:
        engine._guarded(raise_fault)

    def raise_fault() -> None:
        raise DeviceFaultError("gone")

    async def main() -> None:
        llm = AsyncLLM(drafting())
        await llm.pause()
        task = asyncio.create_task(collect(llm, "x = ", ENDLESS))
        while not llm.num_open:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(EngineCore, "drain", fail)
        await llm.reset_prefix_cache()
        assert (await task)[-1].error == "the engine has ended: gone"
        await llm.shutdown()

    run(main())


def test_what_cannot_be_served_raises_before_anything_runs() -> None:
    async def main() -> None:
        llm = AsyncLLM(drafting())
        for prompt, params in (("x", SamplingParams(allowed_token_ids=[-1])), ([10**9], None), ([], None)):
            with pytest.raises(ValueError, match=r"prompt|allowed_token_ids"):
                await collect(llm, prompt, params)
        with pytest.raises(ValueError, match="num_speculative_tokens=-1"):
            await collect(llm, "x", None, hints=RequestHints(num_speculative_tokens=-1))
        check_nothing_left(llm)
        await llm.shutdown()

    run(main())


class Timers:
    """A loop that only records the scheduled calls and their times."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, call: Any) -> None:
        self.asked.append((seconds, call))


def test_silence_is_timed_from_the_last_news_and_not_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, woken, over = 100.0, [], asyncio.Event()
    monkeypatch.setattr(async_llm.time, "perf_counter", lambda: now)
    timers = Timers()
    stream = SimpleNamespace(loop=timers, last=90.0, over=over, wake=lambda: woken.append(now))
    async_llm._Alarm(stream, 15.0)  # type: ignore[arg-type]
    looks = ((115.0, 110.0, 10.0), (125.0, 110.0, 15.0), (130.0, 110.0, 10.0), (140.0, 139.0, 14.0))
    for time_then, last, rest in looks:
        now, stream.last = time_then, last
        timers.asked[-1][1]()
        assert timers.asked[-1][0] == rest
    assert woken == [125.0]
    over.set()
    timers.asked[-1][1]()
    assert len(timers.asked) == 5, "nothing holds on to a stream that is over"
