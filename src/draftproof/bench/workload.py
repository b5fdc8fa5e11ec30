"""A benchmark's requests: prompts of random ids, the jobs of an iteration, and arrival times."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from draftproof.bench.drive import Job
from draftproof.types import SamplingParams

FIRST_ID = 10  # most vocabularies begin with special tokens


def random_prompts(
    count: int, length: int, range_ratio: float, vocab_size: int, seed: int
) -> list[list[int]]:
    """`count` prompts of random ids, with lengths drawn from `length` * (1 - `range_ratio`) to (1 + `range_ratio`)."""
    generator = random.Random(seed)
    low, high = max(1, math.floor(length * (1 - range_ratio))), math.ceil(length * (1 + range_ratio))
    return random_ids([generator.randint(low, high) for _ in range(count)], vocab_size, generator)


def random_ids(lengths: Sequence[int], vocab_size: int, generator: random.Random) -> list[list[int]]:
    """One prompt of random ids per length."""
    first = FIRST_ID if vocab_size > 2 * FIRST_ID else 0
    return [[generator.randrange(first, vocab_size) for _ in range(n)] for n in lengths]


def cycled(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` prompts, repeated cyclically if there are fewer."""
    return [prompts[i % len(prompts)] for i in range(count)]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times in seconds, ascending; the first is 0. `rate`: requests per second; infinite: all at once.

    The gaps are gamma-distributed: `burstiness` 1 is a Poisson process, below 1 bursty, above 1 steadier, infinity a
    fixed rate.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        steady = math.isinf(burstiness)
        now += 1 / rate if steady else generator.gammavariate(burstiness, 1 / (rate * burstiness))
    return found


def jobs(
    prompts: Sequence[list[int]],
    indices: Sequence[int],
    params: SamplingParams,
    times: Sequence[float] | None = None,
) -> list[Job]:
    """One job for each of `indices`; a prompt has the same seed in every run and batch."""
    given: Sequence[float | None] = [None] * len(indices) if times is None else times
    return [
        Job(i, prompts[i], dataclasses.replace(params, seed=i), arrival)
        for i, arrival in zip(indices, given, strict=True)
    ]
