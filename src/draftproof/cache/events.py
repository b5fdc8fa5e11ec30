"""Events that tell routers which blocks a prefix cache holds, identified by hashes that all processes share.

A block's hash covers all tokens up to its end, so equal prefixes have equal hashes in every process. It does not cover
a drafter's lookahead tokens, so several pages may share one hash; the hash is held as long as any of them is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

Content = int | bytes  # a row's token, or the content hash of the item it belongs to


@dataclass(slots=True)
class BlocksStored:
    """Consecutive blocks after `parent` (None: they start a text). `keys`: for each block, the content hashes of the
    items in it, which identify its rows in addition to their ids.
    """

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    keys: list[list[str]] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks whose contents were evicted."""

    hashes: list[int]


@dataclass(slots=True)
class AllCleared:
    """All blocks were cleared."""


CacheEvent = BlocksStored | BlocksRemoved | AllCleared


def block_hashes(contents: Sequence[Content], block_size: int) -> Iterator[int]:
    """The hashes of a text's full blocks, in order."""
    parent: int | None = None
    for start in range(0, len(contents) - block_size + 1, block_size):
        parent = _hash(parent, contents[start : start + block_size])
        yield parent


def _hash(parent: int | None, contents: Sequence[Content]) -> int:
    digest = hashlib.blake2b(b"" if parent is None else parent.to_bytes(8, "little"), digest_size=8)
    try:
        digest.update(array("q", cast("Sequence[int]", contents)))
    except TypeError:  # contents include items
        digest.update(repr(list(contents)).encode())
    return int.from_bytes(digest.digest(), "little")


class EventLog:
    """Events of one cache since the last `take`. Pages are identified by their ids in the chain."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hash_of: dict[int, int] = {}
        self._held: Counter[int] = Counter()
        self._events: list[CacheEvent] = []

    def take(self) -> list[CacheEvent]:
        taken, self._events = self._events, []
        return taken

    def stored(
        self, node: int, parent: int, contents: Sequence[Content], token_ids: Sequence[int], page: int
    ) -> None:
        """Page number `page` of a text became findable as `node` after `parent`."""
        size = self._block_size
        start, before = page * size, None
        if page:  # the parent page may have been evicted meanwhile
            before = self._hash_of.get(parent)
            if before is None:
                *_, before = block_hashes(contents[:start], size)
        rows = contents[start : start + size]
        own = self._hash_of[node] = _hash(before, rows)
        self._held[own] += 1
        if self._held[own] > 1:
            return
        keys = list(dict.fromkeys(row.hex() for row in rows if isinstance(row, bytes)))
        ids = list(token_ids[start : start + size])
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.hashes[-1] == before:
            last.hashes.append(own)
            last.token_ids += ids
            last.keys.append(keys)
        else:
            self._events.append(BlocksStored([own], before, ids, [keys]))

    def removed(self, node: int) -> None:
        """The page can no longer be found."""
        own = self._hash_of.pop(node)
        self._held[own] -= 1
        if self._held[own]:
            return
        del self._held[own]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.hashes.append(own)
        else:
            self._events.append(BlocksRemoved([own]))

    def cleared(self) -> None:
        self._hash_of.clear()
        self._held.clear()
        self._events.append(AllCleared())
