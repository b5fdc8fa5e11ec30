"""A server under load: whether its answers are still the plain ones, whether it keeps anything, what it costs.

    PYTHONPATH=src:. python bench/serving.py soak --seconds 600
    PYTHONPATH=src:. python bench/serving.py soak --seconds 60 --drafter '{"method": "bench.serving.Faulty"}'
    PYTHONPATH=src:. python bench/serving.py overhead [--model MODEL] [--streams 32]

`soak`: clients of mixed lengths, of which some hang up midway, at a server whose cache is too small for them. Every
answer that was finished must be the one that plain decoding gives offline to the same seed, and in the end nothing may
be held. `overhead`: the same requests offline, by `AsyncLLM`'s tasks and by a server's clients in another process, by
turns. Exit status 1 if an answer differs, is missing, or something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftproof import LLM, DraftSpec, EngineConfig, Proposal, SamplingParams, Verified, assets
from draftproof.cli.prompts import read_file
from draftproof.frontend.async_llm import AsyncLLM

ROUTE = "/v1/completions"
EAGLE3 = {"model": str(assets.path("tiny-eagle3")), "num_speculative_tokens": 4}
MAX_MODEL_LEN = 512


class Faulty:
    """A drafter that fails in every way that one can, by turns: it raises, proposes ids that there are not, numbers of
    the wrong shape, takes two seconds, or proposes noise."""

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
        if self._num_calls % 500 == 4:
            time.sleep(2)
        return Proposal(tokens_RK, count_R)


@dataclass
class Asked:
    """One request, and what became of it."""

    body: dict[str, Any]
    leaves_after: int | None = None  # events
    text: str = ""
    finish_reason: str | None = None
    gaps: list[float] = field(default_factory=list)  # seconds between events

    @property
    def params(self) -> SamplingParams:
        names = ("max_tokens", "temperature", "seed", "ignore_eos")
        return SamplingParams(**{name: self.body[name] for name in names if name in self.body})


async def ask(address: tuple[str, int], asked: Asked) -> None:
    """Stream one answer; a client of few lines, so that it costs little."""
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps(asked.body | {"stream": True}).encode()
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    num_events, before = 0, 0.0
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        asked.gaps += [now - before] if before else []
        before, num_events = now, num_events + 1
        choice = json.loads(line[6:])["choices"][0]
        asked.text += choice["text"]
        asked.finish_reason = choice["finish_reason"]
        if num_events == asked.leaves_after:
            break
    writer.close()


class Server:
    """`draftproof serve` in a process of its own."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "draftproof", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("serving at http://"):
                host, _, port = line.split()[2].removeprefix("http://").removesuffix("/v1").rpartition(":")
                self.address = (host, int(port))
                break
        else:
            raise RuntimeError("the server did not start")
        self.log = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def rss(self) -> float:
        """Resident memory, in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    async def metric(self, name: str) -> float:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"draftproof:{name}{{")
        )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(60)
        self.log.kill()
        return status


def requests(rng: random.Random, prompts: Sequence[str], leaving: float) -> Asked:
    """A request of random length, greedy or sampled; some leave before they have everything."""
    body: dict[str, Any] = {"prompt": rng.choice(prompts)[: rng.randrange(8, 400)]}
    body |= {"max_tokens": rng.choice((4, 16, 64, 160)), "ignore_eos": rng.random() < 0.5}
    body |= {"temperature": rng.choice((0, 0.7, 1.0)), "seed": rng.randrange(1 << 30)}
    return Asked(body, leaves_after=rng.randrange(1, 20) if rng.random() < leaving else None)


async def load(server: Server, given: argparse.Namespace) -> tuple[list[Asked], list[float]]:
    """(requests, memory over time): clients that ask one thing after the other until the time is over."""
    path = assets.path(assets.PROMPTS)
    prompts = [str(p.text or p.messages) for p in read_file(path)]
    everything: list[Asked] = []
    memory: list[float] = []
    end = time.perf_counter() + given.seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            asked = requests(rng, prompts, given.leaving)
            everything.append(asked)
            await ask(server.address, asked)

    async def watch() -> None:
        while True:
            memory.append(server.rss())
            await asyncio.sleep(given.seconds / 20)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(client, range(given.streams)))
    watching.cancel()
    return everything, memory


def soak(given: argparse.Namespace) -> int:
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--num-kv-blocks", str(given.num_kv_blocks)]
    drafter = {"policy": "fixed", "max_faults": 1 << 30, "time_limit": 1.0, **json.loads(given.drafter)}
    flags += ["--speculative-config", json.dumps(drafter)]
    server = Server(*flags, *(["--model", given.model] if given.model else []))

    async def run() -> tuple[list[Asked], list[float], dict[str, float]]:
        everything, memory = await load(server, given)
        while await server.metric("num_requests_running") + await server.metric("num_requests_waiting"):
            await asyncio.sleep(0.1)  # those that were left a moment ago
        names = ("num_preemptions_total", "drafter_faults_total", "spec_decode_num_accepted_tokens_total")
        told = {name: await server.metric(name) for name in (*names, "kv_cache_usage_perc")}
        return everything, memory, told

    try:
        everything, memory, told = asyncio.run(run())
    finally:
        status = server.stop()
    finished = [a for a in everything if a.leaves_after is None or a.finish_reason is not None]
    missing = [a for a in finished if a.finish_reason not in ("stop", "length")]
    checked = finished[-given.check :]
    plain = LLM(given.model, max_model_len=MAX_MODEL_LEN)
    outputs = plain.generate([a.body["prompt"] for a in checked], [a.params for a in checked], use_tqdm=False)
    different = [a for a, o in zip(checked, outputs, strict=True) if a.text != o.outputs[0].text]
    quarter = len(memory) // 4
    facts = {
        "requests": len(everything),
        "hung up": len(everything) - len(finished),
        "without an answer": len(missing),
        "compared": len(checked),
        "different": len(different),
        "memory MiB at a quarter, end": (round(memory[quarter]), round(memory[-1])),
        "exit status": status,
        **told,
    }
    print(json.dumps(facts))
    return int(bool(different or missing or status or told["kv_cache_usage_perc"] or not checked))


def overhead(given: argparse.Namespace) -> int:
    """Tokens a second offline, by tasks and by clients, with so many requests at once."""
    prompts = [f"def function_{i}(a, b):" for i in range(given.streams)]
    body = {"max_tokens": given.tokens, "temperature": 0, "ignore_eos": True}
    params = Asked(body).params
    plain = LLM(given.model, max_model_len=MAX_MODEL_LEN)
    server = Server("--max-model-len", str(MAX_MODEL_LEN), *(["--model", given.model] if given.model else []))
    rows: list[tuple[float, float, float]] = []
    gaps: list[float] = []

    async def by_tasks(llm: AsyncLLM) -> None:
        async def one(prompt: str) -> None:
            async for _ in llm.generate(prompt, params):
                pass

        await asyncio.gather(*map(one, prompts))

    async def by_clients() -> None:
        everything = [Asked({"prompt": prompt, **body}) for prompt in prompts]
        await asyncio.gather(*(ask(server.address, asked) for asked in everything))
        gaps.extend(gap for asked in everything for gap in asked.gaps[given.tokens // 4 :])

    async def turns() -> None:
        llm = AsyncLLM(LLM(given.model, max_model_len=MAX_MODEL_LEN))
        for _ in range(given.repeats):
            times = [time.perf_counter()]
            plain.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter())
            await by_tasks(llm)
            times.append(time.perf_counter())
            await by_clients()
            times.append(time.perf_counter())
            rows.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
        await llm.shutdown()

    try:
        asyncio.run(turns())
    finally:
        server.stop()
    offline, tasks, clients = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    gaps.sort()
    facts = {
        "offline tokens/s": round(given.streams * given.tokens / offline),
        "AsyncLLM, of it": round(offline / tasks, 3),
        "server, of it": round(offline / clients, 3),
        "ms between events, median": round(1e3 * gaps[len(gaps) // 2], 2),
        "p99": round(1e3 * gaps[int(0.99 * len(gaps))], 2),
    }
    print(json.dumps(facts))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("soak", "overhead"))
    parser.add_argument("--model", help="left out: the embedded one")
    parser.add_argument("--drafter", default=json.dumps(EAGLE3), help="of the soak, as JSON")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--leaving", type=float, default=0.3, help="share of clients that hang up")
    parser.add_argument("--num-kv-blocks", type=int, default=150)
    parser.add_argument("--check", type=int, default=2000, help="most answers that are compared")
    parser.add_argument("--tokens", type=int, default=128, help="of each request of `overhead`")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    return soak(given) if given.what == "soak" else overhead(given)


if __name__ == "__main__":
    sys.exit(main())
