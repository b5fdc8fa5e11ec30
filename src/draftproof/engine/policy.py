"""How many drafts each request gets. Changes speed only: by law 1 the output cannot depend on it.

Letters: R requests that decode in a pass, k drafts of one, K the most that may be asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from draftproof.engine.progress import Progress

FIRST_GUESS = 0.6  # acceptance of a draft before anything was measured
MEMORY = 0.92  # weight of the past in the acceptance average
FIRST_PROBES = 8  # rounds at the engine's start that try different numbers
PROBE_EVERY = 24  # then one round in so many does


class Policy(Protocol):
    def choose(self, decoding: list[Progress]) -> list[int]:
        """Drafts to ask for, one number per request that will decode in the next pass."""
        ...

    def verified(self, request: Progress, num_drafted: int, num_accepted: int) -> None:
        """One round's outcome."""
        ...

    def timed(self, num_rows: int, num_drafts: int, target_seconds: float, draft_seconds: float) -> None:
        """One pass's cost: `num_rows` target rows, then a draft pass of `num_drafts` steps."""
        ...


class FixedPolicy:
    """Always K."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self, decoding: list[Progress]) -> list[int]:
        return [self._num_drafts] * len(decoding)

    def verified(self, request: Progress, num_drafted: int, num_accepted: int) -> None:
        pass

    def timed(self, num_rows: int, num_drafts: int, target_seconds: float, draft_seconds: float) -> None:
        pass


@dataclass(slots=True)
class Costs:
    """Seconds of a pass by its size. Noise only slows a pass, so a faster sample moves the estimate more (0.5)
    than a slower one (0.03). The first run of a size, which also sets things up, does not count."""

    seconds: dict[int, float] = field(default_factory=dict)
    _met: set[int] = field(default_factory=set)

    def add(self, size: int, seconds: float) -> None:
        if size not in self._met:
            self._met.add(size)
            return
        known = self.seconds.setdefault(size, seconds)
        self.seconds[size] = known + (0.5 if seconds < known else 0.03) * (seconds - known)

    @property
    def slope(self) -> float:
        """Seconds per unit of size, by least squares; never negative."""
        num = len(self.seconds)
        if num < 2:
            return 0.0
        mean_x, mean_y = sum(self.seconds) / num, sum(self.seconds.values()) / num
        spread = sum((x - mean_x) ** 2 for x in self.seconds)
        return max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in self.seconds.items()) / spread)

    def at(self, size: int) -> float:
        """What is known of this size, else of the nearest, moved along the slope."""
        known = self.seconds.get(size)
        if known is not None:
            return known
        if not self.seconds:
            return 1e-9
        nearest = min(self.seconds, key=lambda x: abs(x - size))
        return max(1e-9, self.seconds[nearest] + self.slope * (size - nearest))


@dataclass(slots=True)
class AdaptivePolicy:
    """The number of drafts that makes tokens per second largest, from measured costs and acceptance.

    A request whose drafts are accepted at rate a gets 1 + a + a^2 + .. + a^k tokens from k drafts. The cost of a
    pass depends on its rows, the cost of drafting on its steps.
    """

    num_drafts: int
    target: Costs = field(default_factory=Costs)
    draft: Costs = field(default_factory=Costs)
    overall: float = FIRST_GUESS
    _rounds: int = 0
    _probes: int = -1

    def choose(self, decoding: list[Progress]) -> list[int]:
        if not decoding:
            return []
        self._rounds += 1
        rates = [self._rate(s) for s in decoding]
        best, speed = 0, 0.0
        for k in range(self.num_drafts + 1):
            tokens = sum(_expected(a, k) for a in rates)
            now = tokens / self._cost(len(decoding) * (1 + k), k)
            if now > speed:
                best, speed = k, now
        per_row = speed * self.target.slope  # tokens that a row more must bring in
        chosen = [_last_worth(a, best, per_row) for a in rates]
        if self._rounds <= FIRST_PROBES or self._rounds % PROBE_EVERY == 0:
            return [self._next_probe()] * len(decoding)
        return chosen

    def _next_probe(self) -> int:
        """All, a third, two thirds, none: costs must be known apart, and what is off must be tried again."""
        self._probes += 1
        return self.num_drafts * (3, 1, 2, 0)[self._probes % 4] // 3

    def verified(self, request: Progress, num_drafted: int, num_accepted: int) -> None:
        """Each draft up to the first rejected one is a trial."""
        trials = min(num_accepted + 1, num_drafted)
        for i in range(trials):
            hit = float(i < num_accepted)
            request.accept_rate = MEMORY * self._rate(request) + (1 - MEMORY) * hit
            self.overall += 0.01 * (hit - self.overall)

    def timed(self, num_rows: int, num_drafts: int, target_seconds: float, draft_seconds: float) -> None:
        self.target.add(num_rows, target_seconds)
        self.draft.add(num_drafts, draft_seconds)

    def _rate(self, request: Progress) -> float:
        return self.overall if request.accept_rate is None else request.accept_rate

    def _cost(self, num_rows: int, num_drafts: int) -> float:
        return self.target.at(num_rows) + self.draft.at(num_drafts)


def _expected(rate: float, k: int) -> float:
    """Tokens of a round with k drafts: 1 + a + .. + a^k."""
    return sum(rate**i for i in range(k + 1))


def _last_worth(rate: float, most: int, per_row: float) -> int:
    k = 0
    while k < most and rate ** (k + 1) >= per_row:
        k += 1
    return k
