"""Blocks of layers with a sliding window: pages that no row can see any more are released.

Such layers have their own blocks and block table. Pages are identified by their ids in the chain of the prefix cache
(`pages.PageAllocator`): a prefix is served only if these layers still hold everything that its next row sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.cache.blocks import BlockPool

# Extra positions below a row's window that a drafter's row may read when it borrows these layers: Gemma 4's assistant
# stands one position lower, and sees one more.
MARGIN = 2


class WindowPages:
    """The blocks of all layers with one window size."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        assert window > 0
        self.window = window
        self._block_size = block_size
        self._pool = BlockPool(num_blocks, self._is_known, self._forget)
        self._block_of: dict[int, int] = {}  # keyed by the page's id in the chain
        self._node_of: dict[int, int] = {}

    def clear(self) -> None:
        """Free all blocks and forget their contents."""
        self._pool.clear()
        self._block_of.clear()
        self._node_of.clear()

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def first_page(self, position: int) -> int:
        """The first page that rows from `position` on may see.

        Example: window 10, blocks of 4, position 32: page 5, which holds positions 20 to 23 (the row sees 23 to 32,
        borrowers two more).
        """
        return max(0, position + 1 - self.window - MARGIN) // self._block_size

    def allocate(self, count: int) -> list[int] | None:
        return self._pool.allocate(count)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block."""
        self._pool.release(blocks)

    def register(self, block: int, node: int) -> None:
        """Make the contents of `block` findable as page `node`; if already registered, the first block stays."""
        if node not in self._block_of:
            self._block_of[node] = block
            self._node_of[block] = node

    def usable(self, nodes: Sequence[int]) -> int:
        """The largest number of leading pages of this chain after which the next row finds everything that it sees."""
        usable = 0
        run = 0  # consecutive cached pages up to this one
        for page, node in enumerate(nodes):
            run = run + 1 if node in self._block_of else 0
            end = page + 1
            if end - run <= self.first_page(end * self._block_size):
                usable = end
        return usable

    def hold(self, nodes: Sequence[int]) -> list[int]:
        """The blocks of a chain's pages, by page, with a reference to each; 0 for pages out of the window."""
        first = self.first_page(len(nodes) * self._block_size)
        blocks = [0] * min(first, len(nodes)) + [self._block_of[node] for node in nodes[first:]]
        for block in blocks[first:]:
            self._pool.hold(block)
        return blocks

    def check_integrity(self) -> None:
        """AssertionError if reference counts, the free list and the index disagree."""
        self._pool.check_integrity()
        assert self._block_of == {node: block for block, node in self._node_of.items()}, (
            "a page and its block"
        )

    def _is_known(self, block: int) -> bool:
        return block in self._node_of

    def _forget(self, block: int) -> None:
        node = self._node_of.pop(block, None)
        if node is not None:
            del self._block_of[node]


def usable_by_all(windows: Sequence[WindowPages], nodes: Sequence[int]) -> int:
    """The largest number of leading pages of a chain after which the next row finds everything that it sees, in the
    layers of every window size.
    """
    num_pages = len(nodes)
    while True:
        least = min((window.usable(nodes[:num_pages]) for window in windows), default=num_pages)
        if least == num_pages:
            return num_pages
        num_pages = least  # a shorter chain may be unusable for another window, so all are asked again
