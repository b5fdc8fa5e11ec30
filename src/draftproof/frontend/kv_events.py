"""Events of the prefix cache over ZMQ, in vLLM's format, for routers that send a request to where its prefix is cached.

A message has three parts: topic, sequence number (8 bytes, big endian), and a batch: an array [time, events, replica
number], in which events are maps with a "type", as in vLLM since its pull request 42892. A DEALER or REQ that sends a
sequence number to the replay socket gets the stored batches from that number on, and then the number -1.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from draftproof.cache import events as cache
from draftproof.config import KVEventsConfig

log = logging.getLogger(__name__)
LAST = -1  # the sequence number that ends a replay
MEDIUM = "GPU"  # vLLM's word for the cache that an engine computes from
KIND = "full_attention"
LINGER = 1000  # milliseconds to send published batches when closing
LOOK = 100  # milliseconds between two polls of the replay socket


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of the events of cache blocks."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
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
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Publisher:
    """Sends batches and stores the last ones for replay, in its own thread. The engine never waits for subscribers:
    while `max_queue_size` batches wait, further ones are dropped, and an `AllBlocksCleared` tells subscribers to
    discard what they know."""

    def __init__(self, config: KVEventsConfig, replica: int = 0) -> None:
        """replica: number for ports and batches. ValueError if an endpoint cannot be bound."""
        self._replica = replica
        self._numbers = itertools.count()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._queue: queue.Queue[bytes | None] = queue.Queue(config.max_queue_size)
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.set_hwm(config.hwm)
        self._out.setsockopt(zmq.LINGER, LINGER)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            _attach(self._out, "endpoint", numbered(config.endpoint, replica), may_connect=True)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.LINGER, LINGER)
                self._replay.set_hwm(config.buffer_steps + 1)  # else parts of a replay would be dropped
                where = numbered(config.replay_endpoint, replica)
                _attach(self._replay, "replay_endpoint", where, may_connect=False)
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="draftproof-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[cache.CacheEvent], block_size: int) -> None:
        """Queue a batch of the events, if there are any. Never waits."""
        if not events:
            return
        told: list[Any] = [_told(event, block_size) for event in events]
        try:
            self._queue.put_nowait(self._encode(told))
        except queue.Full:
            log.error("kv_events_config: max_queue_size batches wait; subscribers are told to begin anew")
            with contextlib.suppress(queue.Empty):  # the sending thread takes batches, too
                while True:
                    self._queue.get_nowait()
            self._queue.put_nowait(self._encode([AllBlocksCleared()]))

    def close(self) -> None:
        """Send queued batches, and end. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _encode(self, told: list[Any]) -> bytes:
        return self._encoder.encode(KVEventBatch(time.time(), told, self._replica))

    # In its own thread.

    def _run(self) -> None:
        try:
            while self._send():
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
        except Exception:
            log.exception("kv_events_config: nothing more is published")
        finally:
            self._context.destroy(linger=LINGER)

    def _send(self) -> bool:
        """Send a batch, waiting briefly if there is none; False at the end."""
        try:
            batch = self._queue.get(timeout=LOOK / 1000 if self._replay is not None else None)
        except queue.Empty:
            return True
        if batch is None:
            return False
        number = next(self._numbers)
        self._kept.append((number, batch))
        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        return True

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer a subscriber's request for a replay."""
        asked = replay.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != 8:
            log.warning("kv_events_config: a replay was asked for in another form: %d parts", len(asked))
            return
        client, first = asked[0], int.from_bytes(asked[2], "big")
        for number, batch in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
        replay.send_multipart((client, b"", LAST.to_bytes(8, "big", signed=True), b""))


def numbered(endpoint: str, replica: int) -> str:
    """The endpoint of one replica: its port, or its name, with the replica's number. Example: tcp://*:5557 is
    tcp://*:5559 for replica 2. ValueError for one without a port."""
    if not replica:
        return endpoint
    kind, _, place = endpoint.partition("://")
    if kind != "tcp":
        return f"{endpoint}_dp{replica}"
    host, _, port = place.rpartition(":")
    if not port.isdecimal():
        raise ValueError(
            f"kv_events_config: endpoint={endpoint!r}: must end with a port, such as tcp://*:5557"
        )
    return f"{kind}://{host}:{int(port) + replica}"


def _attach(end: zmq.Socket[bytes], name: str, endpoint: str, *, may_connect: bool) -> None:
    """Bind; like vLLM, connect instead if the endpoint names another host and `may_connect`."""
    binds = (
        not may_connect or endpoint.startswith(("ipc://", "inproc://")) or "*" in endpoint or "::" in endpoint
    )
    try:
        (end.bind if binds else end.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"kv_events_config: {name}={endpoint!r}: {error.strerror}") from None


def _told(event: cache.CacheEvent, block_size: int) -> KVCacheEvent:
    match event:
        case cache.BlocksStored(hashes, parent, token_ids, keys):
            extra = [tuple(own) or None for own in keys]
            return BlockStored(
                hashes, parent, token_ids, block_size, None, MEDIUM, None, extra, 0, kv_cache_spec_kind=KIND
            )
        case cache.BlocksRemoved(hashes):
            return BlockRemoved(hashes, MEDIUM, 0)
        case cache.AllCleared():
            return AllBlocksCleared()
