"""Messages between an entry and its replicas: MessagePack over a socket, with types that are checked on arrival.

Requests travel as ids, numbers and bytes; decoding creates no other types of objects.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from socket import socket
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from draftproof.cache.events import CacheEvent
from draftproof.config import EngineConfig
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import Item, RequestSpec
from draftproof.engine.items import ItemInput, Places
from draftproof.grammar.matcher import Grammar
from draftproof.metrics import EngineLoad
from draftproof.types import INT32_MAX, SamplingParams

LENGTH_BYTES = 8  # size of the length before each message
MOST_TOKENS = INT32_MAX  # caps counts, which may exceed MessagePack's 64 bits; no output is that long


class Setup(msgspec.Struct, tag=True):
    """The first message to a replica: its number, the settings of its `LLM`, its threads, and its log level."""

    number: int
    settings: dict[str, Any]
    num_threads: int
    log_level: int


class WireSpec(msgspec.Struct, kw_only=True):
    """`RequestSpec` without its grammar, which the replica compiles again from the parameters."""

    token_ids: list[int]
    params: dict[str, Any]
    row_seed: int
    limit: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    bad_words_ids: list[list[int]]
    prompt_logprobs: int | None
    most_drafts: int | None
    members: tuple[int, ...]
    priority: int
    reads_prefix_cache: bool
    items: tuple[Item, ...]


class Array(msgspec.Struct):
    """A tensor."""

    dtype: str
    shape: list[int]
    data: bytes


class WireItem(msgspec.Struct):
    """`ItemInput`; `axes` and `advance` are its places."""

    kind: str
    tensors: dict[str, Array]
    num_rows: int
    content: bytes
    axes: Array | None = None
    advance: int = 0
    carries: Array | None = None


class Start(msgspec.Struct, tag=True):
    """Start a request; `key`: the entry's number for it; `resumed`: output tokens and number of prompt scores that it
    has already."""

    key: int
    spec: WireSpec
    items: list[WireItem]
    resumed: tuple[list[int], int] | None


class Abort(msgspec.Struct, tag=True):
    key: int


class Reset(msgspec.Struct, tag=True):
    """Clear the prefix cache; answered."""

    call: int


class Pause(msgspec.Struct, tag=True):
    """Stop making steps, or go on; answered."""

    call: int
    is_paused: bool


class Draft(msgspec.Struct, tag=True):
    """`EngineCore.draft`; answered."""

    call: int
    spec: WireSpec
    num_drafts: int


class Progressed(msgspec.Struct, tag=True):
    """Progress of a replica's start."""

    what: str
    done: int
    total: int


class Logged(msgspec.Struct, tag=True):
    """A log record."""

    level: int
    logger: str
    text: str


class Failed(msgspec.Struct, tag=True):
    """Why the engine cannot start; `is_users`: because of the user's settings."""

    error: str
    is_users: bool


class Hello(msgspec.Struct, tag=True):
    """The engine is ready: its facts for the entry. `files`: names, sizes and times of the model's files."""

    fingerprint: str
    files: str
    max_model_len: int
    num_drafts: int
    methods: tuple[str, ...]
    memory: dict[str, int]
    arithmetic: str
    operators: str
    device_name: str
    load: EngineLoad


class Stepped(msgspec.Struct, tag=True):
    """Output of a step; the deltas' ids are request keys. `load`: None except at intervals and before idling."""

    deltas: list[TokenDelta]
    events: list[StoredOnWire | RemovedOnWire | ClearedOnWire]
    load: EngineLoad | None


class StoredOnWire(msgspec.Struct, tag="stored"):
    hashes: list[int]


class RemovedOnWire(msgspec.Struct, tag="removed"):
    hashes: list[int]


class ClearedOnWire(msgspec.Struct, tag="cleared"):
    pass


class Answered(msgspec.Struct, tag=True):
    """The answer to a call; `error`: the message if it raised ValueError."""

    call: int
    token_ids: list[int]
    error: str | None = None


class Alive(msgspec.Struct, tag=True):
    """A heartbeat; `step_seconds`: how long the current step has been running, 0 between steps."""

    step_seconds: float


ToReplica = Setup | Start | Abort | Reset | Pause | Draft
ToEntry = Progressed | Logged | Failed | Hello | Stepped | Answered | Alive


class ClosedSocketError(ConnectionError):
    """The other end of the socket is closed."""


class Channel:
    """One end of a socket. Any thread may send; one thread reads. `kind`: type of the messages that are read."""

    def __init__(self, end: socket, kind: Any) -> None:
        self.end = end
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._lock = threading.Lock()

    def encode(self, message: ToReplica | ToEntry) -> bytes:
        """The encoded message, with its length in front. TypeError for a value that cannot be encoded."""
        body = self._encoder.encode(message)
        return len(body).to_bytes(LENGTH_BYTES, "little") + body

    def send(self, message: ToReplica | ToEntry) -> None:
        """Send a message, blocking. ClosedSocketError if the other end is closed."""
        data = self.encode(message)
        try:
            with self._lock:
                self.end.sendall(data)
        except OSError as error:
            raise ClosedSocketError(str(error)) from None

    def read(self) -> Any:
        """The next message. ClosedSocketError at the end of the stream, TimeoutError after the socket's timeout."""
        length = int.from_bytes(self._take(LENGTH_BYTES), "little")
        return self._decoder.decode(self._take(length))

    def _take(self, number: int) -> bytearray:
        taken = bytearray(number)
        view, have = memoryview(taken), 0
        while have < number:
            try:
                came = self.end.recv_into(view[have:])
            except TimeoutError:
                raise
            except OSError as error:
                raise ClosedSocketError(str(error)) from None
            if not came:
                raise ClosedSocketError("the other end is closed")
            have += came
        return taken


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} cannot be sent to another process")


def settings_of(config: EngineConfig, device: str) -> dict[str, Any]:
    """`LLM`'s settings, for a replica on `device`."""
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    settings["device"] = device
    given = config.speculative_config
    if given is not None:
        own = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.name != "options"}
        settings["speculative_config"] = {**own, **given.options}
    if config.kv_events_config is not None:
        settings["kv_events_config"] = dataclasses.asdict(config.kv_events_config)
    return settings


def check_settings(settings: Mapping[str, Any]) -> None:
    """ValueError for settings that cannot be encoded."""
    try:
        msgspec.msgpack.encode(settings, enc_hook=_plain)
    except TypeError as error:
        raise ValueError(f"data_parallel_size: {error}; give a name, a number or text") from None


def pack_spec(spec: RequestSpec) -> WireSpec:
    names = WireSpec.__struct_fields__
    given = {name: getattr(spec, name) for name in names if name != "params"}
    params = msgspec.to_builtins(spec.params, builtin_types=(bytes,))
    params["seed"] = None  # may be any integer; `row_seed` is derived from it
    if spec.most_drafts is not None:
        given["most_drafts"] = min(spec.most_drafts, MOST_TOKENS)
    if spec.params.max_tokens is not None:
        params["max_tokens"] = min(spec.params.max_tokens, MOST_TOKENS)
    return WireSpec(**given, params=params)


def unpack_spec(wire: WireSpec, params: SamplingParams, grammar: Grammar | None) -> RequestSpec:
    names = WireSpec.__struct_fields__
    given = {name: getattr(wire, name) for name in names if name != "params"}
    return RequestSpec(**given, params=params, grammar=grammar)


def pack_item(item: ItemInput) -> WireItem:
    tensors = {name: _pack(tensor) for name, tensor in item.tensors.items()}
    wire = WireItem(item.kind, tensors, item.num_rows, item.content)
    if item.places is not None:
        wire.axes = _pack(torch.from_numpy(np.ascontiguousarray(item.places.axes_3N)))
        wire.advance = item.places.advance
    if item.carries is not None:
        wire.carries = _pack(torch.from_numpy(item.carries))
    return wire


def unpack_item(wire: WireItem) -> ItemInput:
    tensors = {name: _unpack(array) for name, array in wire.tensors.items()}
    places = None if wire.axes is None else Places(_unpack(wire.axes).numpy(), wire.advance)
    carries = None if wire.carries is None else _unpack(wire.carries).numpy()
    return ItemInput(wire.kind, tensors, wire.num_rows, wire.content, places, carries)


def _pack(tensor: Tensor) -> Array:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return Array(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data)


def _unpack(array: Array) -> Tensor:
    dtype = getattr(torch, array.dtype)
    if not array.data:
        return torch.zeros(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=torch.uint8).view(dtype).reshape(array.shape)


def pack_events(events: list[CacheEvent]) -> list[StoredOnWire | RemovedOnWire | ClearedOnWire]:
    return [_EVENTS[type(event).__name__](event) for event in events]


_EVENTS: Mapping[str, Any] = {
    "BlocksStored": lambda event: StoredOnWire(event.hashes),
    "BlocksRemoved": lambda event: RemovedOnWire(event.hashes),
    "AllCleared": lambda event: ClearedOnWire(),
}
