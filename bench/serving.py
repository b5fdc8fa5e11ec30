"""A server under load: whether answers still equal plain decoding, whether resources leak, and its overhead.

    PYTHONPATH=src:. python bench/serving.py soak --seconds 600
    PYTHONPATH=src:. python bench/serving.py soak --seconds 60 --drafter '{"method": "bench.serving.Faulty"}'
    PYTHONPATH=src:. python bench/serving.py chats
    PYTHONPATH=src:. python bench/serving.py idle --connections 10000
    PYTHONPATH=src:. python bench/serving.py overhead [--model MODEL] [--streams 32]
    PYTHONPATH=src:. python bench/serving.py overhead --shape 8b [--small DIR --device cpu]

`soak`: clients with requests of mixed lengths, some of which disconnect midway, at a server whose cache is too small
for them. Every finished answer must equal plain offline decoding with the same seed, and at the end no resources may be
held. `chats`: concurrent growing conversations with a long common prefix. `idle`: connections without requests.
`overhead`: the same requests offline, by `AsyncLLM` tasks and by clients of a server in another process, alternating;
with a shape, random weights and a drafter that replays their plain output at the cost of an EAGLE-3 head. Exit status 1
if an answer differs or is missing, or resources are held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.clients import Asked, Server, ask
from bench.models import NUM_DRAFTS, Shape, with_words
from draftproof import LLM, DraftSpec, EngineConfig, Proposal, SamplingParams, Verified, assets
from draftproof.bench import workload
from draftproof.cli.prompts import read_file
from draftproof.drafters import recordings
from draftproof.frontend.async_llm import AsyncLLM

EAGLE3 = {"model": str(assets.path("tiny-eagle3")), "num_speculative_tokens": 4}
MAX_MODEL_LEN = 512
CHAT_ROUTE = "/v1/chat/completions"
LONGEST_CHAT, SHARED = (
    3000,
    0.8,
)  # tokens of a conversation's last prompt, and the share that is a common prefix
MOST_GROWTH = 0.05  # maximum growth of memory in the second half of a soak of at least this many seconds:
LONG_SOAK = 300
MOST_SECONDS_LEFT = 60  # time limit until no request is running, after the last client
NAMES = ("num_preemptions_total", "drafter_faults_total", "spec_decode_num_accepted_tokens_total")


class Faulty:
    """A drafter that fails in every possible way in turn: it raises, proposes invalid ids, wrong shapes or NaN, takes
    two seconds, or proposes noise."""

    spec = DraftSpec(host_tokens=True)

    def __init__(self, config: EngineConfig) -> None:
        self._num_calls = 0

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self._num_calls += 1
        tokens_RK = torch.full((verified.num_requests, num_drafts), 7, dtype=torch.int64)
        count_R = torch.full((verified.num_requests,), num_drafts, dtype=torch.int64)
        kind = self._num_calls % 50
        if kind == 1:
            raise RuntimeError("a fault on purpose")
        if kind == 2:
            tokens_RK += 1 << 40
        if kind == 3:
            return Proposal(tokens_RK[:, :-1], count_R + 1)
        if kind == 5:
            return Proposal(tokens_RK * float("nan"), count_R)
        if self._num_calls % 500 == 4:
            time.sleep(2)
        return Proposal(tokens_RK, count_R)


def requests(rng: random.Random, prompts: Sequence[str], leaving: float) -> Asked:
    """A request of random length, greedy or sampled; with probability `leaving` its client disconnects early."""
    body: dict[str, Any] = {"prompt": rng.choice(prompts)[: rng.randrange(8, 400)]}
    body |= {"max_tokens": rng.choice((4, 16, 64, 160)), "ignore_eos": rng.random() < 0.5}
    body |= {"temperature": rng.choice((0, 0.7, 1.0)), "seed": rng.randrange(1 << 30)}
    return Asked(body, leaves_after=rng.randrange(1, 20) if rng.random() < leaving else None)


@dataclass
class Sample:
    """A server's state: resident MiB, share of KV blocks in use, requests in slots, and waiting requests."""

    memory: float
    blocks: float
    slots: float
    waiting: float


async def look(server: Server) -> Sample:
    told = await server.metrics()
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    return Sample(server.rss(), *(told[name] for name in names))


async def load(server: Server, given: argparse.Namespace) -> tuple[list[Asked], list[Sample]]:
    """(requests, samples over time) of clients that send one request after the other until the time is over."""
    prompts = [str(p.text or p.messages) for p in read_file(assets.path(assets.PROMPTS))]
    everything: list[Asked] = []
    samples: list[Sample] = []
    end = time.perf_counter() + given.seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            asked = requests(rng, prompts, given.leaving)
            everything.append(asked)
            await ask(server.address, asked)

    async def watch() -> None:
        while True:
            samples.append(await look(server))
            await asyncio.sleep(given.seconds / 20)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(client, range(given.streams)))
    watching.cancel()
    return everything, samples


async def emptied(server: Server) -> dict[str, float]:
    """The server's metrics once no request is running; RuntimeError after `MOST_SECONDS_LEFT`."""
    end = time.perf_counter() + MOST_SECONDS_LEFT
    while True:
        told = await server.metrics()
        if not told["num_requests_running"] + told["num_requests_waiting"]:
            return told
        if time.perf_counter() > end:
            raise RuntimeError(
                f"{told['num_requests_running']:g} requests hold slots, though nobody asks any more"
            )
        await asyncio.sleep(0.1)  # recently disconnected clients' requests are still ending


def soak(given: argparse.Namespace) -> int:
    drafter = {"policy": "fixed", "max_faults": 1 << 30, "time_limit": 1.0, **json.loads(given.drafter)}
    settings = {"max_model_len": MAX_MODEL_LEN, "num_kv_blocks": given.num_kv_blocks, "model": given.model}
    server = Server({**settings, "speculative_config": drafter})

    async def run() -> tuple[list[Asked], list[Sample], dict[str, float]]:
        return *await load(server, given), await emptied(server)

    try:
        everything, samples, told = asyncio.run(run())
    finally:
        status = server.stop()
    finished = [a for a in everything if a.leaves_after is None or a.finish_reason is not None]
    missing = [a for a in finished if a.finish_reason not in ("stop", "length")]
    checked = finished[-given.check :]
    plain = LLM(given.model, max_model_len=MAX_MODEL_LEN)
    outputs = plain.generate([a.body["prompt"] for a in checked], [a.params for a in checked], use_tqdm=False)
    different = [a for a, o in zip(checked, outputs, strict=True) if a.text != o.outputs[0].text]
    half = [sample.memory for sample in samples[len(samples) // 2 :]]
    facts = {
        "requests": len(everything),
        "hung up": len(everything) - len(finished),
        "without an answer": len(missing),
        "compared": len(checked),
        "different": len(different),
        "memory, MiB": [round(sample.memory) for sample in samples],
        "share of blocks in use": [round(sample.blocks, 2) for sample in samples],
        "slots in use": [round(sample.slots) for sample in samples],
        "waiting": [round(sample.waiting) for sample in samples],
        "growth in the second half": round(max(half) / half[0] - 1, 4),
        "exit status": status,
        "cache in use at the end": told["kv_cache_usage_perc"],
        "slots in use at the end": told["num_requests_running"],
        **{name: told[name] for name in NAMES},
    }
    print(json.dumps(facts))
    grows = given.seconds >= LONG_SOAK and max(half) > half[0] * (1 + MOST_GROWTH)
    is_kept = told["kv_cache_usage_perc"] > 0
    return int(bool(different or missing or status or grows or is_kept or not checked))


def chats(given: argparse.Namespace) -> int:
    """Run conversations that grow a turn at a time until their prompts have `LONGEST_CHAT` tokens."""
    plain = LLM(given.model, max_model_len=LONGEST_CHAT + 500, enable_prefix_caching=False)
    num_shared = int(SHARED * LONGEST_CHAT)
    text = " ".join(str(p.text or p.messages) for p in read_file(assets.path(assets.PROMPTS))) * 20
    ids = plain.tokenizer.encode(text)
    system = plain.tokenizer.decode(ids[:num_shared])
    settings = {"max_model_len": plain.max_model_len, "model": given.model, "speculative_config": EAGLE3}
    server = Server(settings)
    asked: list[tuple[list[dict[str, str]], Asked]] = []

    async def chat(number: int) -> None:
        messages = [{"role": "system", "content": system}]
        start = num_shared + 500 * number
        while True:
            words = plain.tokenizer.decode(ids[start : start + 50])
            messages.append({"role": "user", "content": f"Chat {number}: {words}"})
            body = {"messages": list(messages), "max_tokens": 48, "temperature": 0.7, "seed": len(asked)}
            one = Asked({**body, "stream_options": {"include_usage": True}})
            asked.append((list(messages), one))
            await ask(server.address, one, CHAT_ROUTE)
            messages.append({"role": "assistant", "content": one.text})
            start += 50
            if one.usage["prompt_tokens"] >= LONGEST_CHAT:
                return

    async def run() -> dict[str, float]:
        await asyncio.gather(*map(chat, range(given.chats)))
        return await emptied(server)

    try:
        told = asyncio.run(run())
    finally:
        status = server.stop()
    outputs = [plain.chat(m, a.params, use_tqdm=False)[0] for m, a in asked]
    different = sum(o.outputs[0].text != a.text for o, (_, a) in zip(outputs, asked, strict=True))
    num_prompt = sum(a.usage["prompt_tokens"] for _, a in asked)
    num_cached = sum(a.usage["prompt_tokens_details"]["cached_tokens"] for _, a in asked)
    first, later = ([a.gaps[0] for m, a in asked if (len(m) == 2) == is_first] for is_first in (True, False))
    facts = {
        "chats": given.chats,
        "turns": len(asked),
        "longest prompt": max(a.usage["prompt_tokens"] for _, a in asked),
        "share of prompt tokens from the cache": round(num_cached / num_prompt, 3),
        "seconds to the first event, first turns": round(statistics.median(first), 3),
        "later turns": round(statistics.median(later), 3),
        "different": different,
        "cache in use at the end": told["kv_cache_usage_perc"],
        "exit status": status,
    }
    print(json.dumps(facts))
    return int(bool(different or status or told["kv_cache_usage_perc"]))


def idle(given: argparse.Namespace) -> int:
    """Open idle connections, and measure requests next to them."""
    server = Server({"model": given.model, "max_model_len": MAX_MODEL_LEN})

    async def one() -> float:
        start = time.perf_counter()
        asked = Asked({"prompt": "def f(", "max_tokens": 16, "temperature": 0, "ignore_eos": True})
        await ask(server.address, asked)
        assert asked.finish_reason == "length", asked
        return time.perf_counter() - start

    async def run() -> dict[str, float]:
        await one()
        told = {"seconds of a request, alone": await one(), "memory before, MiB": server.rss()}
        start = time.perf_counter()
        writers = []
        for _ in range(given.connections // 100):
            opened = await asyncio.gather(*(asyncio.open_connection(*server.address) for _ in range(100)))
            writers += [writer for _, writer in opened]
        told["seconds to open them"] = time.perf_counter() - start
        times = [await one() for _ in range(10)]
        told |= {"seconds of a request, among them": max(times), "memory, MiB": server.rss()}
        for writer in writers:
            writer.close()
        return told

    try:
        told = asyncio.run(run())
    finally:
        status = server.stop()
    facts = {"connections": given.connections, **told, "exit status": status}
    print(json.dumps({name: round(value, 3) for name, value in facts.items()}))
    return status


class Setup:
    """Setup of `overhead`: engine settings for this process and the server, and the prompts."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.settings: dict[str, Any] = {"model": given.model, "max_model_len": MAX_MODEL_LEN}
        self.prompts: list[Any] = [f"def function_{i}(a, b):" for i in range(given.streams)]
        self.params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
        if given.shape:
            self._take_shape(given)

    def _take_shape(self, given: argparse.Namespace) -> None:
        folder = Path(tempfile.mkdtemp())
        shape = Shape(given.shape, given.device, given.small)
        target = shape.target()
        self.settings |= {**target, "model": str(with_words(Path(target["model"]), folder))}
        self.settings |= {"max_num_seqs": given.streams, "enable_prefix_caching": False}
        with LLM(**self.share(0)) as plain:
            ids = workload.random_prompts(given.streams, 128, 0.2, plain.model_config.vocab_size, seed=0)
            self.prompts = [{"prompt_token_ids": one} for one in ids]
            outputs = plain.generate(self.prompts, self.params, use_tqdm=False)
        recordings.save(folder / "recordings.json", outputs)
        replay = {"recordings": str(folder / "recordings.json"), "acceptance": given.acceptance}
        head = {"model": shape.drafter()["model"]}
        own = {"num_speculative_tokens": NUM_DRAFTS, "policy": "fixed", "drafters": [head]}
        self.settings["speculative_config"] = {"method": "replay", **replay, **own}

    def share(self, number: int) -> dict[str, Any]:
        """Settings of engine number 0, 1 or 2, in order of creation: on a GPU each has a third of the memory."""
        return {**self.settings, "gpu_memory_utilization": 0.3 * (number + 1)}

    def body(self, prompt: Any) -> dict[str, Any]:
        asked = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        names = ("max_tokens", "temperature", "ignore_eos")
        told = {name: getattr(self.params, name) for name in names}
        return {"prompt": asked, **told, "return_token_ids": True}


def overhead(given: argparse.Namespace) -> int:
    """Compare tokens per second offline, by tasks and by clients, with --streams requests at once."""
    setup = Setup(given)
    made = [time.perf_counter()]
    offline = LLM(**setup.share(0))
    made.append(time.perf_counter())
    tasks = AsyncLLM(LLM(**setup.share(1)))
    made.append(time.perf_counter())
    server = Server(setup.share(2))
    made.append(time.perf_counter())
    rows: list[tuple[float, float, float]] = []
    asked: list[Asked] = []
    expected = offline.generate(setup.prompts, setup.params, use_tqdm=False)

    async def by_tasks() -> None:
        async def one(prompt: Any) -> None:
            async for _ in tasks.generate(prompt, setup.params):
                pass

        await asyncio.gather(*map(one, setup.prompts))

    async def by_clients() -> None:
        everything = [Asked(setup.body(prompt)) for prompt in setup.prompts]
        await asyncio.gather(*(ask(server.address, one) for one in everything))
        asked.extend(everything)

    async def turns() -> None:
        for _ in range(1 + given.repeats):
            times = [time.perf_counter()]
            offline.generate(setup.prompts, setup.params, use_tqdm=False)
            times.append(time.perf_counter())
            await by_tasks()
            times.append(time.perf_counter())
            await by_clients()
            times.append(time.perf_counter())
            rows.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
        await tasks.shutdown()

    try:
        asyncio.run(turns())
    finally:
        server.stop()
    offline.close()
    wanted = [o.outputs[0].token_ids for o in expected] * (1 + given.repeats)
    different = sum(a.token_ids != ids for a, ids in zip(asked, wanted, strict=True))
    # without the first turn (warm-up), each request's first quarter (prefill of others) and last event (no token)
    gaps = sorted(gap for a in asked[given.streams :] for gap in a.gaps[len(a.gaps) // 4 : -1])
    seconds = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
    each = [sorted(row[0] / row[2] for row in rows[1:])]
    facts = {
        "offline tokens/s": round(given.streams * given.tokens / seconds[0]),
        "AsyncLLM, of it": round(seconds[0] / seconds[1], 3),
        "server, of it": round(seconds[0] / seconds[2], 3),
        "turn by turn": [round(ratio, 3) for ratio in each[0]],
        **between_events(gaps),
        "seconds to start each": [round(end - start, 1) for start, end in pairwise(made)],
        "different": different,
    }
    print(json.dumps(facts))
    return int(bool(different))


def between_events(gaps: Sequence[float]) -> dict[str, float]:
    """Statistics of the sorted seconds between events."""
    middle, high = gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))]
    return {
        "ms between events, median": round(1e3 * middle, 2),
        "p99": round(1e3 * high, 2),
        "p99 of the median": round(high / middle, 2),
    }


COMMANDS = {"soak": soak, "chats": chats, "idle": idle, "overhead": overhead}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", default=str(assets.path(assets.TARGET)))
    parser.add_argument("--drafter", default=json.dumps(EAGLE3), help="of the soak, as JSON")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--leaving", type=float, default=0.3, help="share of clients that hang up")
    parser.add_argument("--num-kv-blocks", type=int, default=150)
    parser.add_argument("--check", type=int, default=2000, help="most answers that are compared")
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=128, help="of each request of `overhead`")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shape", help="of `overhead`: random weights of this shape, replayed drafts")
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="share of replayed drafts that are right"
    )
    parser.add_argument(
        "--small", type=Path, help="a folder to make a small model of that shape in: a smoke test"
    )
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    return COMMANDS[given.what](given)


if __name__ == "__main__":
    sys.exit(main())
