"""Compares two runs of the same requests, bit for bit: ids, log-probabilities and finish reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draftproof.metrics import SpeculationStats
from draftproof.types import CompletionOutput, Logprob, RequestOutput


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs of one request.

    `what` is "token", "logprob", "prompt logprob", "length", "finish", "text", "prompt", "choices" or "error";
    `position` counts output tokens (prompt tokens for prompt log-probabilities); `plain` and `other` show what each
    run has there, with its likeliest tokens if log-probabilities were requested.
    """

    request: int
    choice: int
    position: int
    what: str
    plain: str
    other: str

    def __str__(self) -> str:
        place = f"request {self.request}, choice {self.choice}, position {self.position}"
        return f"{place}: {self.what} differs\n  plain: {self.plain}\n  other: {self.other}"


@dataclass(slots=True)
class Tally:
    """What was compared, in numbers: without tokens or drafts, equality proves nothing."""

    requests: int = 0
    tokens: int = 0
    logprobs: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Count one run's outputs."""
        for output in outputs:
            self.requests += 1
            self.speculation.add(output.metrics.speculation)
            for choice in output.outputs:
                self.tokens += len(choice.token_ids)
                self.logprobs += sum(len(entry) for entry in choice.logprobs or [])


def compare(plain: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> list[Difference]:
    """The first difference of each choice of each request; empty if the runs are equal.

    The runs must have the same requests in the same order; ValueError if their numbers differ.
    """
    if len(plain) != len(other):
        raise ValueError(f"compare: {len(plain)} outputs against {len(other)}: run the same requests twice")
    pairs = enumerate(zip(plain, other, strict=True))
    return [found for index, (a, b) in pairs for found in _compare_request(index, a, b)]


def _compare_request(index: int, a: RequestOutput, b: RequestOutput) -> list[Difference]:
    if a.prompt_token_ids != b.prompt_token_ids:
        return [Difference(index, 0, 0, "prompt", str(a.prompt_token_ids), str(b.prompt_token_ids))]
    if a.error != b.error:
        return [Difference(index, 0, 0, "error", str(a.error), str(b.error))]
    if len(a.outputs) != len(b.outputs):
        return [Difference(index, 0, 0, "choices", str(len(a.outputs)), str(len(b.outputs)))]
    position = _first_unequal(a.prompt_logprobs, b.prompt_logprobs)
    if position is not None:
        shown = (_shown_entry(_at(run.prompt_logprobs, position)) for run in (a, b))
        return [Difference(index, 0, position, "prompt logprob", *shown)]
    found = (_compare_choice(index, x, y) for x, y in zip(a.outputs, b.outputs, strict=True))
    return [difference for difference in found if difference is not None]


def _compare_choice(index: int, a: CompletionOutput, b: CompletionOutput) -> Difference | None:
    def differ(position: int, what: str, plain: object, other: object) -> Difference:
        return Difference(index, a.index, position, what, str(plain), str(other))

    for position, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if x != y:
            return differ(position, "token", _shown_token(a, position), _shown_token(b, position))
    length = min(len(a.token_ids), len(b.token_ids))
    position_or_none = _first_unequal((a.logprobs or [])[:length], (b.logprobs or [])[:length])
    if position_or_none is not None:
        position = position_or_none
        return differ(position, "logprob", _shown_token(a, position), _shown_token(b, position))
    if len(a.token_ids) != len(b.token_ids):
        return differ(length, "length", len(a.token_ids), len(b.token_ids))
    if (a.logprobs is None) != (b.logprobs is None) or len(a.logprobs or []) != len(b.logprobs or []):
        return differ(length, "logprob", len(a.logprobs or []), len(b.logprobs or []))
    if a.cumulative_logprob != b.cumulative_logprob:
        return differ(length, "logprob", a.cumulative_logprob, b.cumulative_logprob)
    if (a.finish_reason, a.stop_reason) != (b.finish_reason, b.stop_reason):
        return differ(length, "finish", (a.finish_reason, a.stop_reason), (b.finish_reason, b.stop_reason))
    if a.text != b.text:
        return differ(length, "text", repr(a.text), repr(b.text))
    return None


Entries = Sequence[Mapping[int, Logprob] | None]


def _first_unequal(a: Entries | None, b: Entries | None) -> int | None:
    """The first position at which two lists of log-probabilities differ in any bit."""
    a, b = a or [], b or []
    for position in range(max(len(a), len(b))):
        if position >= min(len(a), len(b)) or not _same_entry(a[position], b[position]):
            return position
    return None


def _same_entry(a: Mapping[int, Logprob] | None, b: Mapping[int, Logprob] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(_same_logprob(a[token], b[token]) for token in a)


def _same_logprob(a: Logprob, b: Logprob) -> bool:
    """Equal bits; two NaN are equal, 0.0 and -0.0 are not."""
    same = a.logprob == b.logprob and math.copysign(1, a.logprob) == math.copysign(1, b.logprob)
    return a.rank == b.rank and (same or (math.isnan(a.logprob) and math.isnan(b.logprob)))


def _at(entries: Entries | None, position: int) -> Mapping[int, Logprob] | None:
    return entries[position] if entries is not None and position < len(entries) else None


def _shown_token(choice: CompletionOutput, position: int) -> str:
    return f"token {choice.token_ids[position]}, {_shown_entry(_at(choice.logprobs, position))}"


def _shown_entry(entry: Mapping[int, Logprob] | None) -> str:
    """The likeliest tokens with all digits of their log-probabilities, for display."""
    if entry is None:
        return "no log-probabilities"
    best = sorted(entry.items(), key=lambda item: item[1].rank)
    return "; ".join(f"rank {p.rank}: {token} {p.decoded_token!r} {p.logprob!r}" for token, p in best)
