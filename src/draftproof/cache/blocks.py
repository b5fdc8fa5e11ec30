"""Reference counts and the free list of memory blocks. Host only, no tensors.

A block without references keeps its contents findable until it is reallocated. Free blocks are reallocated in order of
last use, except that blocks with no findable contents go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """Blocks 1..num_blocks-1 (block 0 is reserved as scratch), each referenced by any number of requests.

    `is_known(block)`: whether its contents can be found again; `forget(block)` is called before it is reallocated.
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
        """Free all blocks."""
        self._ref_count = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_blocks))  # oldest first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, least recently used first, or None if too few are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._ref_count[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """Add a reference to a block that was found."""
        self._ref_count[block] += 1
        self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; the last one will be evicted before the first."""
        for block in reversed(blocks):
            assert self._ref_count[block] > 0, block
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._free[block] = None
                if not self._is_known(block):
                    self._free.move_to_end(block, last=False)

    def check_integrity(self) -> None:
        """AssertionError if reference counts and the free list disagree."""
        assert 0 not in self._free and not self._ref_count[0], "block 0 is the memory's"
        for block in range(1, self.num_blocks):
            assert (self._ref_count[block] == 0) == (block in self._free), (
                f"block {block}: count and free list"
            )
