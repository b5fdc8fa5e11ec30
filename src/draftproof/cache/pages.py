"""Block allocation, prefix sharing and eviction. Host only, no tensors.

A block is memory, identified by its number; a page is the `block_size` tokens of a text that a block holds.

A full page is identified by its key (id of the previous page, its tokens). Dictionaries compare the whole chain
exactly, so different prefixes are never confused. With `lookahead=n` (a drafter whose row at position p also reads
tokens up to p + n), a page's key covers n tokens after the page as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.cache.blocks import BlockPool
from draftproof.cache.events import CacheEvent, Content, EventLog

PageKey = tuple[int, tuple[Content, ...]]
ROOT = 0  # id of the empty prefix


@dataclass(slots=True)
class PrefixMatch:
    """Pages of a prefix found in the cache, with their ids. `draft_hole`: position of the first page without the
    drafter's keys and values; None if all pages have them.
    """

    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    draft_hole: int | None = None

    @property
    def node(self) -> int:
        """The id of the last page, ROOT if there is none."""
        return self.nodes[-1] if self.nodes else ROOT


class PageAllocator:
    """Allocates blocks 1..num_blocks-1 (block 0 is the pool's scratch) and indexes the contents of full ones."""

    def __init__(self, num_blocks: int, block_size: int, *, sharing: bool, lookahead: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks, self._is_known, self._forget)
        self._sharing = sharing
        self._lookahead = lookahead
        self._next_node = ROOT + 1  # never reused: layers with a window identify pages by these
        self._log: EventLog | None = None
        self.clear()

    def clear(self) -> None:
        """Free all blocks and forget their contents."""
        self._pool.clear()
        self._block_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._node_of: dict[int, int] = {}  # registered block -> its id in chains
        self._without_drafts: set[int] = set()  # registered blocks without the drafter's keys and values
        if self._log is not None:
            self._log.cleared()

    def keep_events(self) -> None:
        """Start recording events for `take_events`."""
        self._log = EventLog(self.block_size)

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call."""
        return [] if self._log is None else self._log.take()

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, least recently used first, or None if too few are free."""
        return self._pool.allocate(count)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; the tail of a prefix will be evicted before its head."""
        self._pool.release(blocks)

    def match(self, tokens: Sequence[Content], *, with_drafts: bool = False) -> PrefixMatch:
        """The longest cached prefix that leaves at least one token to compute. Takes a reference to each page.

        `with_drafts`: match only pages that also hold the drafter's keys and values.
        """
        found = PrefixMatch()
        node = ROOT
        if not self._sharing:
            return found
        for page in range((len(tokens) - 1) // self.block_size):
            block = self._block_of.get((node, self._content(tokens, page)))
            if block is None or (with_drafts and block in self._without_drafts):
                break
            node = self._node_of[block]
            if found.draft_hole is None and block in self._without_drafts:
                found.draft_hole = page * self.block_size
            found.blocks.append(block)
            found.nodes.append(node)
            self._pool.hold(block)
        return found

    def shorten(self, found: PrefixMatch, num_pages: int) -> None:
        """Release all pages of a match after the first `num_pages`."""
        self.release(found.blocks[num_pages:])
        del found.blocks[num_pages:], found.nodes[num_pages:]
        if found.draft_hole is not None and found.draft_hole >= num_pages * self.block_size:
            found.draft_hole = None

    def num_unseen(self, tokens: Sequence[Content]) -> int:
        """Number of cached prefix tokens from the first page without the drafter's keys and values on."""
        if not self._without_drafts:
            return 0
        node, num_pages, num_seen = ROOT, 0, None
        for page in range((len(tokens) - 1) // self.block_size):
            block = self._block_of.get((node, self._content(tokens, page)))
            if block is None:
                break
            node = self._node_of[block]
            if num_seen is None and block in self._without_drafts:
                num_seen = page
            num_pages = page + 1
        return 0 if num_seen is None else (num_pages - num_seen) * self.block_size

    @property
    def sharing(self) -> bool:
        """Whether pages can be found again."""
        return self._sharing

    @property
    def lookahead(self) -> int:
        """Number of tokens after a page that its key covers."""
        return self._lookahead

    def register(
        self,
        block: int,
        node: int,
        tokens: Sequence[Content],
        page: int,
        *,
        has_drafts: bool = True,
        token_ids: Sequence[int] = (),
    ) -> int:
        """Make page number `page` of `tokens`, held by `block`, findable after prefix `node`; returns its id in the
        chain.

        If an equal page is registered already, the chain continues from it. It stays the registered one unless it lacks
        the drafter's keys and values and this page has them. `token_ids`: the ids that events report, which differ from
        `tokens` where items are.
        """
        if not self._sharing:
            return ROOT
        key = (node, self._content(tokens, page))
        known = self._block_of.get(key)
        if known is not None and not (has_drafts and known in self._without_drafts):
            return self._node_of[known]
        if known is None:
            self._node_of[block] = self._next_node
            self._next_node += 1
            if self._log is not None:
                self._log.stored(self._node_of[block], node, tokens, token_ids, page)
        else:  # keeps the id, so events and chains see the same page
            self._node_of[block] = self._node_of[known]
            self._unlearn(known)
        self._block_of[key] = block
        self._key_of[block] = key
        if not has_drafts:
            self._without_drafts.add(block)
        return self._node_of[block]

    def can_register(self, num_tokens: int, page: int) -> bool:
        """Whether `num_tokens` known tokens cover page `page` and its lookahead."""
        return self._sharing and (page + 1) * self.block_size + self._lookahead <= num_tokens

    def check_integrity(self) -> None:
        """AssertionError if reference counts, the free list and the index disagree."""
        self._pool.check_integrity()
        assert self._block_of == {key: block for block, key in self._key_of.items()}, "a key and its block"
        assert self._key_of.keys() == self._node_of.keys(), "a known block and its node"

    def _content(self, tokens: Sequence[Content], page: int) -> tuple[Content, ...]:
        """The tokens in a page's key. Page 1, block_size 4, lookahead 1: tokens 4..8."""
        start = page * self.block_size
        return tuple(tokens[start : start + self.block_size + self._lookahead])

    def _is_known(self, block: int) -> bool:
        return block in self._key_of

    def _forget(self, block: int) -> None:
        node = self._unlearn(block)
        if node is not None and self._log is not None:
            self._log.removed(node)

    def _unlearn(self, block: int) -> int | None:
        """Remove a block from the index; returns its former id in the chain, None if it had none."""
        key = self._key_of.pop(block, None)
        if key is None:
            return None
        del self._block_of[key]
        self._without_drafts.discard(block)
        return self._node_of.pop(block)
