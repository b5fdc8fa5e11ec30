"""Fields of requests that change their speed only, and their effect on /metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftproof import LLM, SamplingParams
from draftproof.frontend.async_llm import AsyncLLM
from draftproof.types import RequestHints
from tests.conformance.cases import REPEATS
from tests.server.running import EAGLE3, ENGINE, LONG, Running, drafting, running

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/grafana.json"
TEXT = "/v1/completions"
CHAIN = {"method": "chain", "drafters": [{"method": "ngram"}, EAGLE3], "num_speculative_tokens": 4}
NGRAM, HEAD = "ngram", "eagle3"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(drafting(speculative_config={**CHAIN, "policy": "fixed"})) as started:
        yield started


def drafted(server: Running) -> dict[str, float]:
    """Number of tokens that each drafter of the chain has proposed so far."""
    with server.http() as http:
        text = http.get("/metrics").text
    found = re.findall(r'drafter_num_draft_tokens_total\{drafter="(.*?)".*\} (\S+)', text)
    return {drafter: float(value) for drafter, value in found}


def test_the_drafter_is_a_requests_choice_and_changes_no_text(server: Running) -> None:
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLM(**ENGINE) as plain:
        expected = plain.generate(REPEATS, params, use_tqdm=False)[0].outputs[0].text
    changes = {}
    for method in ("ngram", "eagle3", None):
        before = drafted(server)
        body = {"prompt": REPEATS, "temperature": 0, "max_tokens": 48, "speculation": {"method": method}}
        with server.http() as http:
            answer = http.post(TEXT, json=body).json()
        assert answer["choices"][0]["text"] == expected
        after = drafted(server)
        changes[method] = {name: after[name] - before[name] for name in after}
    assert changes["ngram"][NGRAM] > 0 == changes["ngram"][HEAD]
    assert changes["eagle3"][HEAD] > 0 == changes["eagle3"][NGRAM]
    assert changes[None][NGRAM] > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculation": {"method": "eagle"}}, "method='eagle': did you mean 'eagle3'?"),
        ({"speculation": {"method": 3}}, "speculation.method=3: "),
        ({"priority": "high"}, "priority='high': "),
        ({"priority": 1 << 40}, "priority=1099511627776: must be an integer from"),
    ],
)
def test_hints_that_make_no_sense_are_refused(
    server: Running, changed: dict[str, object], message: str
) -> None:
    with server.http() as http:
        response = http.post(TEXT, json={"prompt": "x", **changed})
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_an_engine_without_drafter_has_none_to_choose() -> None:
    async def main() -> None:
        llm = AsyncLLM(LLM(**ENGINE))
        with pytest.raises(ValueError, match="method='ngram': this engine has no drafter"):
            await llm.prepare("x", hints=RequestHints(method="ngram"))
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(main(), LONG))


def test_the_least_priority_is_admitted_first() -> None:
    """There is one slot; three requests wait for it."""

    async def main() -> list[str]:
        llm = AsyncLLM(LLM(max_num_seqs=1, **ENGINE))
        params, order = SamplingParams(temperature=0, max_tokens=3), []

        async def ask(name: str, priority: int) -> None:
            _ = [delta async for delta in llm.generate("x = ", params, name, RequestHints(priority=priority))]
            order.append(name)

        await llm.pause()
        asked = [asyncio.create_task(ask(f"{priority}", priority)) for priority in (5, 0, -5)]
        while llm.num_open < 3:
            await asyncio.sleep(0.001)
        await llm.resume()
        await asyncio.gather(*asked)
        await llm.shutdown()
        return order

    assert asyncio.run(asyncio.wait_for(main(), LONG)) == ["-5", "0", "5"]


def test_time_in_the_queue_is_told() -> None:
    """The second of two requests waits for as long as the first runs."""
    with running(LLM(max_num_seqs=1, **ENGINE)) as server:
        llm = server.service.llm

        async def both() -> list[float]:
            client = server.async_client()
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(llm.pause(), server.loop))
            asked = [
                asyncio.create_task(
                    client.completions.create(
                        model="tiny",
                        prompt="x",
                        max_tokens=num_tokens,
                        extra_body={"ignore_eos": True, "priority": priority},
                    )
                )
                for priority, num_tokens in ((0, 60), (1, 1))
            ]
            while llm.num_open < 2:
                await asyncio.sleep(0.001)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(llm.resume(), server.loop))
            times = [(await answer).model_extra["metrics"] for answer in asked]
            await client.close()
            return [times[0]["generation_time_ms"], *(told["queue_time_ms"] for told in times)]

        took, first, second = asyncio.run(both())
        assert second - first > took / 2 > 0
        with server.http() as http:
            text = http.get("/metrics").text
        found = re.search(r"request_queue_time_seconds_sum\{.*\} (\S+)", text)
        assert found is not None and float(found[1]) == pytest.approx((first + second) / 1000)


def test_the_times_of_a_step_add_up(server: Running) -> None:
    with server.http() as http:
        http.post(TEXT, json={"prompt": REPEATS, "temperature": 0, "max_tokens": 16})
        text = http.get("/metrics").text
    names = ("step", "target", "draft", "waiting", "host")
    values = [float(re.search(rf"draftproof:{n}_seconds_total\{{.*\}} (\S+)", text)[1]) for n in names]  # type: ignore[index]
    assert values[0] == pytest.approx(sum(values[1:])) and values[1] > 0 < values[2]


def test_the_dashboard_shows_what_there_is(server: Running) -> None:
    """The dashboard is valid JSON, and every metric that it names is exported, under either prefix."""
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = set(re.findall(r"\$\{prefix\}(\w+)", " ".join(asked)))
    assert len(named) > 20 and all("${prefix}" in expression for expression in asked)
    with server.http() as http:
        http.post(TEXT, json={"prompt": REPEATS, "temperature": 0, "max_tokens": 16})
        exported = set(re.findall(r"^draftproof:(\w+)", http.get("/metrics").text, re.MULTILINE))
    assert named <= exported
