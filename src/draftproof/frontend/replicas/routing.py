"""Which replica a request goes to: rules are data, so another one is a line of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Load of a running request, in prompt tokens: what its steps cost a request that comes next.
TOKENS_PER_OUTPUT = 64


@dataclass(slots=True)
class PrefixIndex:
    """Hashes of the blocks that a replica has cached, by its events, and of those that placed requests will cache."""

    stored: set[int] = field(default_factory=set)
    placed: Counter[int] = field(default_factory=Counter)

    def num_cached(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that are cached, or will be."""
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
    """A replica's state, for placing one request. `num_uncached`: the request's tokens that it has not cached;
    `num_waiting`: uncomputed prompt tokens of requests placed there; `num_outputs`: its open requests; `num_placed`:
    all requests ever placed there."""

    number: int
    num_uncached: int
    num_waiting: int
    num_outputs: int
    num_placed: int

    @property
    def load(self) -> int:
        """Work ahead of the request, in prompt tokens."""
        return self.num_waiting + TOKENS_PER_OUTPUT * self.num_outputs


# Cost functions: the replica with the least is chosen. A cached prefix is worth the tokens that it saves, so other
# replicas are used even if all prompts share a prefix or one replica has cached all of them.
RULES: Mapping[str, Callable[[Candidate], tuple[int, ...]]] = {
    "prefix": lambda c: (c.num_uncached + c.load, c.num_placed, c.number),
    "load": lambda c: (c.load, c.num_placed, c.number),
    "round_robin": lambda c: (c.num_placed, c.number),
}


def choose(rule: str, candidates: Sequence[Candidate]) -> int:
    """The number of the replica with the least cost by the rule."""
    return min(candidates, key=RULES[rule]).number
