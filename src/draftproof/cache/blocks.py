"""Which blocks of memory are free, and who holds the others. Host only; knows no tensors.

A block that nobody holds keeps what it is known for until it is handed out again: least recently used ones first, those
that are known for nothing before all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """Blocks 1..num_blocks-1 (block 0 is the memory's scratch), each held by any number of requests.

    `is_known(block)`: it may be found again; `forget(block)` is called before it is handed out anew.
    """

    def __init__(
        self, num_blocks: int, is_known: Callable[[int], bool], forget: Callable[[int], None]
    ) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self._is_known = is_known
        self._forget = forget
        self.clear()

    def clear(self) -> None:
        """All blocks are free."""
        self._ref_count = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks))  # oldest first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, least recently used first, or None if there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._ref_count[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """Take one more reference to a block that was found."""
        self._ref_count[block] += 1
        self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference each; the last one is evicted before the first."""
        for block in reversed(blocks):
            assert self._ref_count[block] > 0, block
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._free[block] = None
                if not self._is_known(block):
                    self._free.move_to_end(block, last=False)

    def check_integrity(self) -> None:
        """AssertionError if what is counted and what is free do not fit together."""
        assert 0 not in self._free and not self._ref_count[0], "block 0 is the memory's"
        for block in range(1, self.num_blocks):
            assert (self._ref_count[block] == 0) == (block in self._free), (
                f"block {block}: count and free list"
            )
