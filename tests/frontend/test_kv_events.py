"""Events of the prefix cache: a subscriber reconstructs the cache from the documented wire format, without our code."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from draftproof import LLM, SamplingParams
from draftproof.cache.events import AllCleared, BlocksRemoved, BlocksStored, block_hashes
from draftproof.cache.pages import ROOT, PageAllocator
from draftproof.config import KVEventsConfig
from draftproof.frontend.kv_events import Publisher, numbered
from tests.conformance.cases import prompts
from tests.server.running import EAGLE3, ENGINE, LONG

TOPIC = "kv-events"


# vLLM's structs, as its documentation has them (vllm/distributed/kv_events.py since its pull request 42892).
class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Router:
    """A router: subscribes, tracks the set of blocks, and requests a replay of batches that it has missed."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = TOPIC) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.subscribe(topic)
        self.replay = None if replay is None else self.context.socket(zmq.DEALER)
        if self.replay is not None:
            self.replay.connect(replay)
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.blocks: dict[bytes | int, tuple[int, ...]] = {}
        self.next, self.num_replayed, self.rank = 0, 0, None

    def close(self) -> None:
        self.context.destroy(linger=0)

    def catch_up(self) -> None:
        """Apply all batches from the next one on, from the replay socket."""
        self.ask_again()
        self.take_again()

    def ask_again(self) -> None:
        assert self.replay is not None
        self.replay.send_multipart((b"", self.next.to_bytes(8, "big")))

    def take_again(self) -> None:
        assert self.replay is not None
        while True:
            assert self.replay.poll(LONG * 1000), "no answer"
            _, number, batch = self.replay.recv_multipart()
            if number == (-1).to_bytes(8, "big", signed=True):
                assert batch == b""
                return
            self.take(int.from_bytes(number, "big"), batch)
            self.num_replayed += 1

    def take(self, number: int, batch: bytes) -> None:
        if number < self.next:
            return
        assert number == self.next, "a batch is missing"
        self.next = number + 1
        decoded = self.decoder.decode(batch)
        assert abs(decoded.ts - time.time()) < LONG
        self.rank = decoded.data_parallel_rank
        for event in decoded.events:
            self.apply(event)

    def apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case BlockStored():
                assert event.medium == "GPU" and event.lora_id is None
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                for number, own in enumerate(event.block_hashes):
                    before = (*before, *event.token_ids[number * size : (number + 1) * size])
                    assert own not in self.blocks
                    self.blocks[own] = before
            case BlockRemoved():
                for own in event.block_hashes:
                    del self.blocks[own]
            case AllBlocksCleared():
                self.blocks.clear()


def cached(llm: LLM) -> set[tuple[int, ...]]:
    """The prefixes in an engine's cache, by its own index."""
    pages = llm.core.scheduler.pages
    texts: dict[int, tuple[int, ...]] = {ROOT: ()}
    found = set()
    left = dict(pages._key_of)
    while left:
        for block, (node, content) in list(left.items()):
            if node in texts:
                whole = (*texts[node], *content[: pages.block_size])
                texts[pages._node_of[block]] = whole
                found.add(whole)
                del left[block]
    return found


@pytest.fixture
def endpoints(tmp_path: Any) -> Iterator[dict[str, str]]:
    yield {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}


def test_a_router_knows_the_cache(endpoints: dict[str, str]) -> None:
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": TOPIC, **endpoints}
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    settings = {**ENGINE, "num_kv_blocks": 24, "speculative_config": EAGLE3}
    with LLM(kv_events_config=told, **settings) as llm:
        router = Router(endpoints["endpoint"], endpoints["replay_endpoint"])
        router.catch_up()
        assert router.next == 1 and router.rank == 0 and not router.blocks
        num_removed = 0
        for text in prompts():
            before = set(router.blocks)
            llm.generate(text[:300], params, use_tqdm=False)
            router.catch_up()
            assert set(router.blocks.values()) == cached(llm)
            for own, whole in router.blocks.items():
                assert list(block_hashes(whole, 16))[-1] == own
            num_removed += len(before - set(router.blocks))
        assert router.blocks and num_removed > 0, "nothing was evicted"
        llm.reset_prefix_cache()
        router.catch_up()
        assert not router.blocks and not cached(llm)
        router.close()


def test_messages_that_are_missed_come_again(endpoints: dict[str, str]) -> None:
    publisher = Publisher(
        KVEventsConfig(enable_kv_cache_events=True, topic=TOPIC, buffer_steps=5, **endpoints), 0
    )
    router = Router(endpoints["endpoint"], endpoints["replay_endpoint"])
    sent = 0
    while not router.sub.poll(20):  # until the subscription has arrived
        publisher.publish([AllCleared()], 4)
        sent += 1
    topic, number, batch = router.sub.recv_multipart()
    assert topic == TOPIC.encode() and len(number) == 8
    router.next = int.from_bytes(number, "big")
    router.take(router.next, batch)
    publisher.publish([BlocksStored([5, 6], None, list(range(8)), [[], ["ab"]])], 4)
    publisher.publish([BlocksRemoved([6]), BlocksStored([7], 5, [9] * 4, [[]])], 4)
    for _ in range(1000):  # the publisher's thread may not have sent the last one yet
        router.catch_up()
        if 7 in router.blocks:
            break
    assert set(router.blocks) == {5, 7} and router.num_replayed > 1
    late = Router(endpoints["endpoint"], endpoints["replay_endpoint"])
    late.next = max(0, router.next - 5)
    late.catch_up()
    assert set(late.blocks) == {5, 7} and late.num_replayed <= 5
    publisher.close()
    publisher.close()
    router.close()
    late.close()


def test_a_replay_is_whole_however_long_it_is(endpoints: dict[str, str]) -> None:
    """Also: `publish` goes on if the publisher's thread empties the full queue before it does."""
    number = 4000
    told = KVEventsConfig(
        enable_kv_cache_events=True, topic=TOPIC, buffer_steps=number, max_queue_size=number, **endpoints
    )
    publisher, router = Publisher(told), Router(endpoints["endpoint"], endpoints["replay_endpoint"])
    for _ in range(number):
        publisher.publish([AllCleared()] * 50, 4)
    while len(publisher._kept) < number:  # all are sent
        time.sleep(0.001)
    router.ask_again()
    assert router.replay is not None and router.replay.poll(LONG * 1000)
    publisher.publish([AllCleared()], 4)
    while publisher._kept[-1][0] < number:  # the replay was sent, and has not been read
        time.sleep(0.001)
    router.take_again()
    assert router.next == number == router.num_replayed
    router.close()
    publisher.close()
    sent: list[bytes] = []

    class Full:
        """A queue that is full at the first `put_nowait`, and empty afterwards."""

        def put_nowait(self, batch: bytes) -> None:
            sent.append(batch)
            if len(sent) == 1:
                raise queue.Full

        def get_nowait(self) -> bytes:
            raise queue.Empty

        def empty(self) -> bool:
            return False

    publisher._queue = Full()  # type: ignore[assignment]
    publisher.publish([BlocksRemoved([6])], 4)
    (event,) = router.decoder.decode(sent[1]).events
    assert len(sent) == 2 and isinstance(event, AllBlocksCleared)


def test_replicas_tell_of_their_own_caches(tmp_path: Any) -> None:
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    told = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, "topic": TOPIC}
    with LLM(
        kv_events_config=told, data_parallel_size=2, data_parallel_routing="round_robin", **ENGINE
    ) as llm:
        texts = [[number] * 33 for number in (3, 4)]
        llm.generate(texts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        for number in range(2):
            router = Router(numbered(endpoint, number), numbered(replay, number))
            router.catch_up()
            assert router.rank == number
            assert set(router.blocks.values()) == {(3 + number,) * 16, (3 + number,) * 32}
            router.close()


def test_ports_of_replicas() -> None:
    assert [numbered("tcp://*:5557", n) for n in range(3)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert numbered("inproc://cache", 1) == "inproc://cache_dp1"
    with pytest.raises(ValueError, match="must end with a port"):
        numbered("tcp://*", 1)


def test_settings_are_vllms() -> None:
    with pytest.raises(ValueError, match="publisher='kafka'"):
        LLM(kv_events_config={"enable_kv_cache_events": True, "publisher": "kafka"})
    with pytest.raises(ValueError, match=r"kv_events_config.*'buffer_step'"):
        LLM(kv_events_config={"buffer_step": 3})
    with pytest.raises(ValueError, match="kv_events_config: endpoint='tcp://nowhere:': "):
        LLM(kv_events_config={"enable_kv_cache_events": True, "endpoint": "tcp://nowhere:"})


def test_pages_with_one_hash_are_held_as_long_as_one_of_them_is() -> None:
    """With a drafter that reads ahead two pages may hold the same tokens."""
    pages = PageAllocator(8, 2, sharing=True, lookahead=1)
    pages.keep_events()
    first, second = pages.allocate(2) or ()
    node = pages.register(first, ROOT, [1, 2, 3], 0, token_ids=[1, 2, 3])
    pages.register(second, ROOT, [1, 2, 4], 0, token_ids=[1, 2, 4])
    (stored,) = pages.take_events()
    assert stored == BlocksStored(list(block_hashes([1, 2], 2)), None, [1, 2], [[]])
    (third,) = pages.allocate(1) or ()
    pages.register(third, node, [1, 2, 3, b"\1", b"\1"], 1, token_ids=[1, 2, 3, 0, 0])
    (stored,) = pages.take_events()
    assert stored.parent == next(block_hashes([1, 2], 2)) and stored.keys == [["01"]]
    pages.release([first])
    assert pages.allocate(5)
    assert pages.take_events() == []
    pages.release([second, third])
    assert pages.allocate(2)
    removed = [own for event in pages.take_events() for own in event.hashes]
    assert sorted(removed) == sorted([*stored.hashes, stored.parent])
