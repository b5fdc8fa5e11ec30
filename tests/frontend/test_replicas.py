"""Replicas: answers equal one engine's wherever they are computed, also if replicas die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from draftproof import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from draftproof.config import EngineConfig
from draftproof.engine.interface import Item, RequestSpec
from draftproof.engine.items import ItemInput, Places
from draftproof.frontend.async_llm import AsyncLLM
from draftproof.frontend.replicas import build, child, entry, process, routing, wire
from draftproof.frontend.replicas.entry import Replicas
from draftproof.types import Delta
from tests.conformance.cases import REPEATS, prompts
from tests.server.running import EAGLE3, ENGINE, LONG, Running, running

PROMPTS = [*prompts()[:3], REPEATS]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=0.8, max_tokens=30, n=2, logprobs=1),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, repetition_penalty=1.2, logprobs=0),
    SamplingParams(temperature=0, max_tokens=60, stop=["\n"]),
]
NUM_STREAMS = 32
STREAMED = [f"{text}{i}\n" for i in range(NUM_STREAMS // 4) for text in PROMPTS]
STREAM_PARAMS = [
    SamplingParams(temperature=(0, 0.8)[i % 2], max_tokens=64, logprobs=1, ignore_eos=True)
    for i in range(NUM_STREAMS)
]
DRAFTERS = {"plain": None, "eagle3": EAGLE3}


def replicated(**settings: Any) -> LLM:
    return LLM(**{"data_parallel_size": 2, **ENGINE, **settings})


def engine_of(llm: LLM) -> Replicas:
    assert isinstance(llm.engine, Replicas)
    return llm.engine


def kill(llm: LLM, number: int, by: signal.Signals = signal.SIGKILL) -> int:
    """Kill a replica's process; returns its process id."""
    line = engine_of(llm).replicas[number].line
    assert line is not None
    os.kill(line.process.pid, by)
    return line.process.pid


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def until(done: Callable[[], bool], llm: LLM) -> None:
    """Wait for a condition that the replicas' threads bring about."""
    pause = threading.Event()
    for _ in range(LONG * 20):
        if done():
            return
        pause.wait(0.05)
    raise AssertionError([replica.line for replica in engine_of(llm).replicas])


def facts(output: RequestOutput) -> Any:
    choices = [(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]
    return output.request_id, choices, output.prompt_logprobs


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    with LLM(**ENGINE) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def plain_streams() -> list[RequestOutput]:
    with LLM(**ENGINE) as llm:
        return llm.generate(STREAMED, STREAM_PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with replicated(speculative_config=EAGLE3) as llm:
        yield llm


def test_offline_answers_are_one_engines(plain: list[RequestOutput], two: LLM) -> None:
    outputs = two.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [facts(o) for o in outputs] == [facts(o) for o in plain]
    loads = engine_of(two).loads()
    assert all(load.stats.num_generated_tokens > 0 for load in loads)
    assert two.stats.num_prompt_tokens == sum(len(o.prompt_token_ids) * len(o.outputs) for o in outputs)
    assert two.stats.speculation.num_accepted_tokens > 0
    with LLM(**ENGINE) as one:
        assert one.fingerprint == two.fingerprint


def test_what_llm_does_with_one_engine_it_does_with_several(two: LLM) -> None:
    with LLM(**ENGINE, speculative_config=EAGLE3) as one:
        assert one.draft([5, 6, 7], 3) == two.draft([5, 6, 7], 3)
        assert two.draft([5, 6, 7], 3)
    rule = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=rule)
    rows = {"prompt_embeds": torch.ones(9, two.model_config.hidden_size)}
    with LLM(**ENGINE) as one:
        asked = (["x = ", rows], [params, SamplingParams(temperature=0, max_tokens=20)])
        expected = [o.outputs[0].token_ids for o in one.generate(*asked, use_tqdm=False)]
    assert [o.outputs[0].token_ids for o in two.generate(*asked, use_tqdm=False)] == expected
    endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for delta in two.stream("x = ", endless):
        two.abort(delta.request_id)
        last = delta
    assert last.finish_reason == "abort"
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda text: two.generate(text, endless, use_tqdm=False)[0], PROMPTS))
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 4
    assert two.reset_prefix_cache()
    until(lambda: all(load.num_free_blocks == load.num_blocks for load in engine_of(two).loads()), two)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_client_sees_a_replica_die(drafter: str, plain_streams: list[RequestOutput]) -> None:
    """32 streams, half of them sampled, and a replica killed when every stream has begun."""

    async def main() -> None:
        llm = replicated(speculative_config=DRAFTERS[drafter])
        served = AsyncLLM(llm)
        num_begun, is_killed = 0, asyncio.Event()

        async def one(prompt: str, params: SamplingParams) -> list[Delta]:
            nonlocal num_begun
            deltas: list[Delta] = []
            async for delta in served.generate(prompt, params):
                num_begun += not deltas
                deltas.append(delta)
                if num_begun == NUM_STREAMS and not is_killed.is_set():
                    is_killed.set()
                    line = engine_of(llm).replicas[0].line
                    assert line is not None and len(line.placed) > 2, "it computes nothing"
                    kill(llm, 0)
            return deltas

        asked = zip(STREAMED, STREAM_PARAMS, strict=True)
        answers = await asyncio.gather(*(one(*request) for request in asked))
        for deltas, output in zip(answers, plain_streams, strict=True):
            choice = output.outputs[0]
            assert [t for d in deltas for t in d.token_ids] == choice.token_ids
            assert [row for d in deltas for row in d.logprobs or []] == choice.logprobs
            assert all(len(d.accepted) == len(d.token_ids) for d in deltas)
            assert deltas[-1].finish_reason == choice.finish_reason == "length"
        assert any(a for deltas in answers for d in deltas for a in d.accepted) == (drafter != "plain")
        until(lambda: len(engine_of(llm)._lines()) == 2, llm)
        assert engine_of(llm).error is None
        await served.shutdown()

    asyncio.run(asyncio.wait_for(main(), LONG))


def test_a_request_that_kills_replicas_ends_and_others_go_on(plain_streams: list[RequestOutput]) -> None:
    """Each replica that computes the request of 100 repeated ids is killed."""
    poison = [7] * 100

    def killer(llm: LLM, stop: threading.Event, deaths: list[int]) -> None:
        known: set[int] = set()
        while not stop.wait(0.002):
            for replica in engine_of(llm).replicas:
                line = replica.line
                ahead = [] if line is None else list(line.placed.values())
                if line is None or line.process.pid in known:
                    continue
                if any(p.spec.token_ids == poison for p in ahead):
                    known.add(line.process.pid)
                    deaths.append(len(ahead))
                    line.process.kill()

    llm, stop, deaths = replicated(), threading.Event(), list[int]()
    thread = threading.Thread(target=killer, args=(llm, stop, deaths))
    thread.start()
    try:
        outputs = llm.generate(
            [*STREAMED[:8], poison],
            [*STREAM_PARAMS[:8], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)],
            use_tqdm=False,
        )
    finally:
        stop.set()
        thread.join()
    *others, guilty = outputs
    assert guilty.outputs[0].finish_reason == "error"
    assert guilty.error is not None and f"replicas have died {len(deaths)} times" in guilty.error
    assert 3 <= len(deaths) <= 5 and deaths[-1] == 1
    assert [facts(o)[1] for o in others] == [facts(o)[1] for o in plain_streams[:8]]
    llm.close()


def test_a_replica_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = process.Patience(silent=3.0)
    monkeypatch.setattr("draftproof.frontend.replicas.entry.Patience", lambda: impatient)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with LLM(**ENGINE) as one:
        expected = [o.outputs[0].token_ids for o in one.generate(PROMPTS, params, use_tqdm=False)]
    with replicated() as llm:
        stopped = []
        ids: dict[str, list[int]] = {}
        for delta in llm.stream(PROMPTS, params):
            if not stopped:
                stopped.append(kill(llm, 1, signal.SIGSTOP))
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert [ids[request_id] for request_id in sorted(ids)] == expected
        until(lambda: is_gone(stopped[0]), llm)


def test_the_end_of_an_entry_is_the_end_of_its_replicas() -> None:
    llm = replicated()
    pids = [r.line.process.pid for r in engine_of(llm).replicas if r.line is not None]
    assert len(pids) == 2
    llm.close()
    assert all(is_gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="is closed"):
        llm.generate("x", use_tqdm=False)


def test_no_replica_outlives_a_server_that_is_killed() -> None:
    command = [sys.executable, "-m", "draftproof", "serve", "--port", "0", "--data-parallel-size", "2"]
    server = subprocess.Popen(
        [*command, "--max-model-len", "256", "--dtype", "float32"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        line = next(line for line in server.stderr if line.startswith("serving at "))
        asked = {"prompt": "x = ", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{line.split()[-1]}/completions", json=asked, timeout=LONG)
        assert answer.json()["usage"]["completion_tokens"] == 5
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, text=True
        )
        pids = [int(pid) for pid in listed.stdout.split()]
        assert len(pids) == 2
    finally:
        server.kill()
        server.wait()
    pause = threading.Event()
    for _ in range(LONG * 20):
        if all(map(is_gone, pids)):
            return
        pause.wait(0.05)
    raise AssertionError(f"{pids} live on")


def test_what_is_wrong_at_the_start_is_told_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="max_model_len=100000: the model was made for"):
        LLM(data_parallel_size=2, max_model_len=100_000)
    with pytest.raises(ValueError, match="device='cuda:0,cuda:1': names 2 devices for data_parallel_size=3"):
        LLM(data_parallel_size=3, device="cuda:0,cuda:1")
    with pytest.raises(ValueError, match="data_parallel_size=0: must be"):
        LLM(data_parallel_size=0)


def test_replicas_of_other_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wire.settings_of
    given = iter(("float32", "bfloat16"))

    def mixed(config: EngineConfig, device: str) -> dict[str, Any]:
        return {**whole(config, device), "dtype": next(given)}

    monkeypatch.setattr(wire, "settings_of", mixed)
    with pytest.raises(
        ValueError, match="replica 1 would not give the bits of the others: the fingerprint is"
    ):
        LLM(data_parallel_size=2, max_model_len=256)


def test_a_server_with_replicas(plain_streams: list[RequestOutput]) -> None:
    """Each computes its share, metrics are told by replica, and clients' streams outlive one."""
    key = {"Authorization": "Bearer k"}
    with (
        running(replicated(), metrics_prefix="vllm:", api_key=["k"]) as server,
        httpx.Client(base_url=server.url, timeout=LONG, headers=key) as client,
    ):
        body = {"prompt": STREAMED[0], "temperature": 0, "max_tokens": 64, "ignore_eos": True}
        assert client.post("/pause").is_success
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(2)]
            until(lambda: server.service.llm.num_open == 2, server.service.llm.llm)
            assert client.post("/resume").is_success
            texts = [one.result().json()["choices"][0]["text"] for one in asked]
        assert texts == [plain_streams[0].outputs[0].text] * 2
        assert client.post("/reset_prefix_cache").is_success
        lines = client.get("/metrics").text.splitlines()
        generated = [one for one in lines if one.startswith("vllm:generation_tokens_total")]
        assert [line.rsplit(" ")[1] for line in generated] == ["64.0", "64.0"]
        assert ['engine="0"' in generated[0], 'engine="1"' in generated[1]] == [True, True]
        check_streams_survive(server, client)


def check_streams_survive(server: Running, client: httpx.Client) -> None:
    """What clients read while a replica is killed, byte for byte but for ids and times, is what they read before."""
    llm, has_begun = server.service.llm.llm, threading.Event()

    def read(prompt: str) -> tuple[str, str]:
        body = {"prompt": prompt, "max_tokens": 180, "seed": 3, "ignore_eos": True, "stream": True}
        text, last = "", ""
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                last = line or last
                if line.startswith("data: {"):
                    has_begun.set()
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text, last

    with ThreadPoolExecutor(16) as pool:
        before = list(pool.map(read, STREAMED[:16]))
        has_begun.clear()
        asked = [pool.submit(read, prompt) for prompt in STREAMED[:16]]
        assert has_begun.wait(LONG)
        line = engine_of(llm).replicas[0].line
        assert line is not None and line.placed, "it computes nothing"
        kill(llm, 0)
        assert [one.result() for one in asked] == before
    assert {last for _, last in before} == {"data: [DONE]"} and all(text for text, _ in before)
    until(lambda: len(engine_of(llm)._lines()) == 2, llm)


def test_what_ends_the_last_request_is_not_overlooked() -> None:
    """`is_due` sees the request as open or its last delta as queued: it waits while both change."""
    engine = Replicas.__new__(Replicas)
    engine.error, engine._is_paused, engine._lock = None, False, threading.RLock()
    engine._open = {"last": None}  # type: ignore[dict-item]
    engine._news = entry.queue.SimpleQueue()
    looked = list[bool]()
    with engine._lock:
        looking = threading.Thread(target=lambda: looked.append(engine.is_due))
        looking.start()
        engine._open.clear()
        looking.join(0.05)
        assert not looked
        engine._news.put([])
    looking.join(LONG)
    assert looked == [True]


def test_a_grammar_that_a_replica_cannot_compile_ends_its_request() -> None:
    def fail(params: SamplingParams) -> Any:
        raise ValueError("no room")

    sent: list[Any] = []
    replica = child.Replica(SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    replica.llm = SimpleNamespace(requests=SimpleNamespace(inputs=SimpleNamespace(grammar=fail)))  # type: ignore[assignment]
    params = SamplingParams(structured_outputs={"regex": "a+"})  # type: ignore[arg-type]
    spec = wire.pack_spec(RequestSpec(token_ids=[1], params=params, row_seed=1, limit=9, eos_ids=frozenset()))
    for key in (3, 4):
        replica._start(wire.Start(key, spec, [], None))
    replica._compiling.discard(4)  # aborted
    for _ in range(2):
        replica._actions.get(timeout=LONG)()
    (told,) = sent
    assert [(d.id, d.finish_reason, d.error) for d in told.deltas] == [("3", "error", "no room")]


# Messages and routing.


def test_a_spec_and_its_items_arrive_as_they_were() -> None:
    item = ItemInput.of("image", {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3)}, 4)
    places = Places(torch.arange(12).view(3, 4).numpy(), 9)
    carries = np.array([True, True, False, True])
    item = ItemInput(item.kind, item.tensors, item.num_rows, item.content, places, carries)
    params = SamplingParams(stop=["a"], logit_bias={5: 1.5}, structured_outputs={"regex": "a+"})
    spec = RequestSpec(
        token_ids=[1, 2, 3],
        params=params,
        row_seed=-(1 << 62),
        limit=9,
        eos_ids=frozenset({1}),
        bad_words_ids=[[1, 2]],
        members=(0, 2),
        items=(Item(item.content, 0, 2, is_whole=True),),
    )
    sent = wire.Start(3, wire.pack_spec(spec), [wire.pack_item(item)], ([4, 5], 1))
    encoder, decoder = wire.msgspec.msgpack.Encoder(), wire.msgspec.msgpack.Decoder(wire.ToReplica)
    came = decoder.decode(encoder.encode(sent))
    assert wire.unpack_spec(came.spec, SamplingParams(**came.spec.params), None) == spec
    vast = SamplingParams(seed=1 << 70, max_tokens=10**30, min_tokens=5)
    came = decoder.decode(
        encoder.encode(
            wire.Start(4, wire.pack_spec(replace(spec, params=vast, most_drafts=1 << 70)), [], None)
        )
    )
    assert (
        SamplingParams(**came.spec.params).max_tokens == (1 << 31) - 1 and came.spec.row_seed == spec.row_seed
    )
    came = decoder.decode(encoder.encode(sent))
    back = wire.unpack_item(came.items[0])
    assert torch.equal(back.tensors["a"], item.tensors["a"]) and back.content == item.content
    assert back.places is not None and (back.places.axes_3N == places.axes_3N).all()
    assert back.places.advance == 9
    assert back.carries is not None and back.carries.tolist() == carries.tolist() and back.num_carried == 3
    assert wire.unpack_item(wire.pack_item(ItemInput.of("image", item.tensors, 4))).carries is None
    assert set(wire.WireItem.__struct_fields__) == {f.name for f in fields(ItemInput)} - {"places"} | {
        "axes",
        "advance",
    }
    assert set(wire.WireSpec.__struct_fields__) == {f.name for f in fields(RequestSpec)} - {"grammar"}


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        LLM(data_parallel_size=2, speculative_config={"method": "ngram", "prompt_lookup_min": object()})


def test_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(number: int, device: str) -> list[str]:
        return build.devices(EngineConfig(data_parallel_size=number, device=device))

    assert listed(2, "auto") == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert listed(3, "auto") == ["cuda:0", "cuda:1", "cuda:2"]
    assert listed(2, "cuda:2,cuda:0") == ["cuda:2", "cuda:0"]
    with pytest.raises(ValueError, match="cuda:3 is not here"):
        listed(4, "cuda")


def test_rules_of_routing() -> None:
    def candidates(*facts: tuple[int, int, int, int]) -> list[routing.Candidate]:
        return [routing.Candidate(i, *fact) for i, fact in enumerate(facts)]

    # num_uncached, num_waiting, num_outputs, num_placed
    seen_by_the_busier = candidates((200, 0, 1, 1), (8, 0, 3, 9))
    assert [routing.choose(rule, seen_by_the_busier) for rule in routing.RULES] == [1, 0, 0]
    seen_by_the_far_busier = candidates((200, 0, 1, 1), (8, 0, 9, 9))
    assert routing.choose("prefix", seen_by_the_far_busier) == 0
    equal = candidates((50, 0, 2, 4), (50, 0, 2, 3))
    assert [routing.choose(rule, equal) for rule in routing.RULES] == [1, 1, 1]


def num_cached(rule: str) -> int:
    """Number of cached tokens in 24 requests: four conversations of six turns each, interleaved."""
    with replicated(data_parallel_routing=rule) as llm:
        texts = [[16 * i + 8 for i in range(1, 40)] for _ in range(3)]
        texts = [[100 + number, *text] for number, text in enumerate(texts)]
        outputs = []
        for _ in range(6):
            asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            for number, text in enumerate(list(texts)):
                output = llm.generate([text], asked, use_tqdm=False)[0]
                outputs.append(output)
                texts[number] = [*text, *output.outputs[0].token_ids, 7]
        assert llm.stats.num_cached_tokens == sum(o.metrics.num_cached_tokens for o in outputs)
        return llm.stats.num_cached_tokens


def test_prefixes_are_found_where_they_are() -> None:
    by_prefix, by_turns = num_cached("prefix"), num_cached("round_robin")
    print(f"cached tokens: {by_prefix} by prefix, {by_turns} round robin")
    assert by_prefix > 1.2 * by_turns
