"""A `StepInput` as one flat list of 64-bit integers, to be recorded or sent to another process without pickling.

Layout: a list is its length followed by its items; a floating-point number is its 64 bits; an absent list has length
-1; a mask is a list of 32-bit words. Example: `released=[3]`, nothing else -> [1, 3, 0, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0,
0].
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from draftproof.engine.interface import Admission, Item, RowPrice, ScheduledRequest, StepInput, TableEntry
from draftproof.types import SamplingParams

ABSENT = -1
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGERS = ("top_k", "min_tokens")


def pack(step: StepInput) -> list[int]:
    """The step as integers; see the top of the file."""
    out = [len(step.released), *step.released, len(step.admitted)]
    for admission in step.admitted:
        _pack_admission(out, admission)
    out.append(len(step.table_entries))
    for entry in step.table_entries:
        out += entry
    out += [len(step.fresh_blocks), *step.fresh_blocks, len(step.scheduled)]
    for s in step.scheduled:
        num_logprobs = ABSENT if s.num_logprobs is None else s.num_logprobs
        out += (s.slot, s.start, s.num_rows, s.num_sampled, s.num_drafts, num_logprobs)
        out += (*s.scored, s.num_prompt_logprobs)
    out += (int(step.all_decode), int(step.without_drafter), int(step.without_models))
    out += (ABSENT if step.most_model_drafts is None else step.most_model_drafts, *map(_bits, step.price))
    out.append(len(step.masks))
    for mask in step.masks:
        _pack_list(out, memoryview(mask).cast("i").tolist())
    out.append(len(step.forced))
    for slot, position, drafts in step.forced:
        out += (slot, position)
        _pack_list(out, drafts)
    return out


def unpack(vector: Sequence[int]) -> StepInput:
    """The step that `pack` was given, without the sampling parameters that no runner reads (stop strings, n)."""
    reader = _Reader(vector)
    released = reader.integers()
    admitted = [_unpack_admission(reader) for _ in range(reader.integer())]
    entries = [reader.entry() for _ in range(reader.integer())]
    fresh_blocks = reader.integers()
    scheduled = [_unpack_scheduled(reader) for _ in range(reader.integer())]
    step = StepInput(
        released=released,
        admitted=admitted,
        table_entries=entries,
        fresh_blocks=fresh_blocks,
        scheduled=scheduled,
        all_decode=bool(reader.integer()),
        without_drafter=bool(reader.integer()),
        without_models=bool(reader.integer()),
        most_model_drafts=reader.number_or_none(),
        price=RowPrice(*(reader.number() for _ in RowPrice._fields)),
        masks=[array("i", reader.integers()).tobytes() for _ in range(reader.integer())],
        forced=[(reader.integer(), reader.integer(), reader.integers()) for _ in range(reader.integer())],
    )
    assert reader.at == len(vector), (reader.at, len(vector))
    return step


def _pack_admission(out: list[int], a: Admission) -> None:
    out += (a.slot, a.num_computed, a.num_prompt, a.limit, a.row_seed)
    _pack_list(out, a.token_ids)
    _pack_list(out, sorted(a.stop_ids))
    out.append(len(a.bad_words_ids))
    for word in a.bad_words_ids:
        _pack_list(out, word)
    _pack_list(out, a.members)
    out.append(len(a.items))
    for item in a.items:
        out += (*struct.unpack("<4q", item.content), item.start, item.num_rows, int(item.is_whole))
    out.append(int(a.is_masked))
    out += [_bits(getattr(a.params, name)) for name in FLOATS]
    out += [getattr(a.params, name) for name in INTEGERS]
    _pack_list(out, a.params.allowed_token_ids)
    bias = a.params.logit_bias
    _pack_list(out, None if bias is None else list(bias))
    out += [_bits(value) for value in (bias or {}).values()]


def _unpack_admission(reader: _Reader) -> Admission:
    slot, num_computed, num_prompt, limit, row_seed = (reader.integer() for _ in range(5))
    token_ids, stop_ids = reader.integers(), reader.integers()
    bad_words_ids = [reader.integers() for _ in range(reader.integer())]
    members = tuple(reader.integers())
    items = tuple(reader.item() for _ in range(reader.integer()))
    is_masked = bool(reader.integer())
    floats = {name: reader.number() for name in FLOATS}
    integers = {name: reader.integer() for name in INTEGERS}
    allowed, biased = reader.optional(), reader.optional()
    bias = None if biased is None else {token: reader.number() for token in biased}
    params = SamplingParams(**floats, **integers, max_tokens=None, allowed_token_ids=allowed, logit_bias=bias)  # type: ignore[arg-type]
    return Admission(
        slot=slot,
        token_ids=token_ids,
        num_computed=num_computed,
        num_prompt=num_prompt,
        limit=limit,
        row_seed=row_seed,
        params=params,
        stop_ids=frozenset(stop_ids),
        bad_words_ids=bad_words_ids,
        members=members,
        items=items,
        is_masked=is_masked,
    )


def _unpack_scheduled(reader: _Reader) -> ScheduledRequest:
    slot, start, num_rows, num_sampled, num_drafts, num_logprobs = (reader.integer() for _ in range(6))
    scored = (reader.integer(), reader.integer())
    return ScheduledRequest(
        slot=slot,
        start=start,
        num_rows=num_rows,
        num_sampled=num_sampled,
        num_drafts=num_drafts,
        num_logprobs=None if num_logprobs == ABSENT else num_logprobs,
        scored=scored,
        num_prompt_logprobs=reader.integer(),
    )


def _pack_list(out: list[int], values: Sequence[int] | None) -> None:
    if values is None:
        out.append(ABSENT)
    else:
        out += [len(values), *values]


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


class _Reader:
    """Reads a vector from front to back; `at`: index of the next integer."""

    def __init__(self, vector: Sequence[int]) -> None:
        self._vector = vector
        self.at = 0

    def integer(self) -> int:
        self.at += 1
        return self._vector[self.at - 1]

    def entry(self) -> TableEntry:
        return self.integer(), self.integer(), self.integer(), self.integer()

    def item(self) -> Item:
        content = struct.pack("<4q", *(self.integer() for _ in range(4)))
        return Item(content, self.integer(), self.integer(), bool(self.integer()))

    def number(self) -> float:
        return float(struct.unpack("<d", struct.pack("<q", self.integer()))[0])

    def number_or_none(self) -> int | None:
        found = self.integer()
        return None if found == ABSENT else found

    def integers(self) -> list[int]:
        found = self.optional()
        assert found is not None
        return found

    def optional(self) -> list[int] | None:
        count = self.integer()
        if count == ABSENT:
            return None
        self.at += count
        return list(self._vector[self.at - count : self.at])
