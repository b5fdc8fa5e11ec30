"""Which replica a request goes to: rules are data, so another one is a line of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# A request that is being computed counts as so many tokens of a prompt: what its steps cost whoever comes next.
TOKENS_PER_OUTPUT = 64


@dataclass(slots=True)
class PrefixIndex:
    """Hashes of the blocks that a replica holds, as its events say, and of those that it was asked to compute."""

    stored: set[int] = field(default_factory=set)
    placed: Counter[int] = field(default_factory=Counter)

    def num_cached(self, hashes: Sequence[int]) -> int:
        """Blocks at the beginning of a text that are there, or will be."""
        for number, own in enumerate(hashes):
            if own not in self.stored and own not in self.placed:
                return number
        return len(hashes)

    def place(self, hashes: Iterable[int]) -> None:
        self.placed.update(hashes)

    def unplace(self, hashes: Iterable[int]) -> None:
        for own in hashes:
            self.placed[own] -= 1
            if not self.placed[own]:
                del self.placed[own]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as a request that is to be placed sees it. `num_waiting`: tokens of prompts placed there that are yet
    to be computed; `num_outputs`: outputs that are open there; `num_placed`: all that ever were."""

    number: int
    num_uncached: int
    num_waiting: int
    num_outputs: int
    num_placed: int

    @property
    def load(self) -> int:
        """Tokens that are ahead of it."""
        return self.num_waiting + TOKENS_PER_OUTPUT * self.num_outputs


# What is least for the replica that is chosen. A cached prefix is worth as many tokens as it saves: where all texts
# begin alike, or one replica has everybody's, the others are used all the same.
RULES: Mapping[str, Callable[[Candidate], tuple[int, ...]]] = {
    "prefix": lambda c: (c.num_uncached + c.load, c.num_placed, c.number),
    "load": lambda c: (c.load, c.num_placed, c.number),
    "round_robin": lambda c: (c.num_placed, c.number),
}


def choose(rule: str, candidates: Sequence[Candidate]) -> int:
    """The number of the replica that the rule takes."""
    return min(candidates, key=RULES[rule]).number
