"""Non-text items of prompts (images, given embeddings), in the engine: their inputs, and the embeddings made of them.

An item is identified by its content, the hash of everything that its embeddings depend on. They are computed when a
step first needs one of their rows, each item alone, so that their bits do not depend on the batch, and are cached.
Shapes: N rows of an item, H hidden size, X: H and what is added to layers (`attention.given`), S slots, W positions of
a window, E embeddings of a step.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from draftproof.attention.given import NOTHING_ADDED, Added, GivenRows, WholeRows
from draftproof.attention.turns import Turns, Window
from draftproof.drafters.base import OwnEmbeddings
from draftproof.engine.interface import Item, ScheduledRequest

EMBEDS = "embeds"  # the kind of an item whose input is its embeddings
Encoder = Callable[[Mapping[str, Tensor]], Tensor]  # an item's tensors -> its embeddings [N, H], or [N, X]


class Places(NamedTuple):
    """Rotary positions of an item's rows on each axis, int64 [3, N], relative to its first row; `advance`: by how much
    the positions of the text after it are increased."""

    axes_3N: np.ndarray[Any, np.dtype[np.int64]]
    advance: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ItemInput:
    """An item as its encoder reads it: tensors by the encoder's names. `places`: for a family with several rotary axes;
    `carries`: which of its rows have embeddings, a function of the tensors; None: all. `content`: the hash of it
    all."""

    kind: str
    tensors: Mapping[str, Tensor]
    num_rows: int
    content: bytes
    places: Places | None = None
    carries: np.ndarray[Any, np.dtype[np.bool_]] | None = None

    @property
    def num_carried(self) -> int:
        """Number of its embeddings."""
        return self.num_rows if self.carries is None else int(self.carries.sum())

    def numbers(self, rows: range) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Index of the embedding of each of these rows, -1: none."""
        if self.carries is None:
            return np.asarray(rows, dtype=np.int64)
        numbers = np.where(self.carries, np.cumsum(self.carries) - 1, -1)
        return numbers[rows.start : rows.stop]

    @classmethod
    def of(
        cls,
        kind: str,
        tensors: Mapping[str, Tensor],
        num_rows: int,
        places: Places | None = None,
        carries: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    ) -> ItemInput:
        """An input of host tensors, which must not be modified later: their content is hashed here."""
        digest = hashlib.sha256(repr((kind, num_rows)).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        if places is not None:
            digest.update(repr((places.advance, places.axes_3N.tolist())).encode())
        return cls(kind, tensors, num_rows, digest.digest(), places, carries)


class ItemStore:
    """Weak references to items' inputs, and an LRU cache of embeddings.

    `encoders`: by kind of item. Embeddings beyond `max_bytes` are evicted, least recently used first, and computed
    again when needed; the last item's stay whatever their size. `num_encoded`: items encoded so far. `watchers` are
    called with an item's content whenever its embeddings are requested.
    """

    def __init__(
        self,
        hidden_size: int,
        device: torch.device,
        dtype: torch.dtype,
        max_bytes: int,
        added: Added = NOTHING_ADDED,
    ) -> None:
        self.hidden_size = hidden_size
        self.added = added
        self.max_bytes = max_bytes
        self.num_encoded = 0
        self.num_bytes = 0
        self.watchers: list[Callable[[bytes], None]] = []
        self.encoders: dict[str, Encoder] = {EMBEDS: lambda tensors: tensors[EMBEDS]}
        self._device = device
        self._dtype = dtype
        self._inputs: WeakValueDictionary[bytes, ItemInput] = WeakValueDictionary()
        self._lock = threading.Lock()  # `setdefault` of a WeakValueDictionary is not atomic
        self._embeddings: OrderedDict[bytes, Tensor] = OrderedDict()

    def hold(self, given: ItemInput) -> ItemInput:
        """The one stored input with this content; stored while the caller keeps a reference to it. Thread-safe."""
        with self._lock:
            return self._inputs.setdefault(given.content, given)

    def input(self, content: bytes) -> ItemInput:
        """The stored input with this content; its holder must still keep it."""
        return self._inputs[content]

    def rows(self, given: ItemInput) -> Tensor:
        """The embeddings of an item, on the device and in the model's dtype: [N, X], or [N, H] for a kind without
        additions to layers."""
        found = self._embeddings.get(given.content)
        if found is not None:
            self._embeddings.move_to_end(given.content)
        else:
            found = self._made(given)
        for watcher in list(self.watchers):
            watcher(given.content)
        return found

    def _made(self, given: ItemInput) -> Tensor:
        made = self.encoders[given.kind](given.tensors).to(self._device, self._dtype).contiguous()
        size = self.hidden_size * (1 if given.kind == EMBEDS else 1 + self.added.num_layers)
        if made.shape != (given.num_carried, size):
            raise ValueError(
                f"an item of kind {given.kind!r}: its encoder gave embeddings of shape {tuple(made.shape)}, but its "
                f"prompt has room for {(given.num_carried, size)}; does the processor belong to this model?"
            )
        self.num_encoded += 1
        self.num_bytes += made.nbytes
        self._embeddings[given.content] = made
        while self.num_bytes > self.max_bytes and len(self._embeddings) > 1:
            _, gone = self._embeddings.popitem(last=False)
            self.num_bytes -= gone.nbytes
        return made

    def nothing(self, num_rows: int) -> Tensor:
        """Zeros [num_rows, H], for a kind of item that this store has no encoder for."""
        return torch.zeros((num_rows, self.hidden_size), device=self._device, dtype=self._dtype)


class SlotItems:
    """The items of the requests in slots; supplies the embeddings for a step's rows."""

    def __init__(
        self,
        store: ItemStore,
        num_slots: int,
        reads_ahead: int,
        device: torch.device,
        turns: Turns | None = None,
        num_drafts: int = 0,
        *,
        own: Mapping[OwnEmbeddings, ItemStore] | None = None,
        windows_only: bool = False,
    ) -> None:
        """reads_ahead: as in `DraftSpec`; num_drafts: positions that a draft pass may reach beyond a step's rows;
        turns: for a target with several rotary axes; own: stores of drafters with their own embeddings, by
        `DraftSpec.embeds`; windows_only: as in `WholeRows`."""
        self.turns = turns
        self._own = own or {}
        self._windows_only = windows_only
        self._beyond = num_drafts + reads_ahead + 1
        self._store = store
        self._num_slots = num_slots
        self._device = device
        self._before = max(0, reads_ahead - 1)  # rows before a step's that a drafter recomputes
        self._after = max(1, reads_ahead)
        self._placed: dict[int, list[tuple[Item, ItemInput]]] = {}
        self._axes: dict[int, _Axes] = {}

    def admit(self, slot: int, items: Sequence[Item]) -> None:
        """Assign a slot to a request with items; their inputs stay stored until `release`."""
        self._placed[slot] = placed = [(item, self._store.input(item.content)) for item in items]
        if self.turns is not None:
            self._axes[slot] = axes = _axes_of(placed)
            self.turns.shift_S[slot] = axes.shift

    def release(self, slot: int) -> None:
        if self._placed.pop(slot, None) and self.turns is not None:
            del self._axes[slot]
            self.turns.shift_S[slot] = 0

    def begin(self, scheduled: Sequence[ScheduledRequest]) -> StepItems | None:
        """The items' inputs to a step, None if it has none; also sets `turns.window`, the rotary positions of its
        rows."""
        if self.turns is not None:
            self.turns.window = None
        if not self._placed:
            return None
        given, whole = self.given(scheduled), self._whole(scheduled)
        if self.turns is None or not any(
            s.slot in self._axes and s.start - self._before < self._axes[s.slot].axes_3P.shape[1]
            for s in scheduled
        ):
            return None if given is None else StepItems(given, whole)
        self.turns.window = self._window(scheduled)
        return StepItems(given, whole)

    def _whole(self, scheduled: Sequence[ScheduledRequest]) -> WholeRows | None:
        """The step's rows of items whose rows attend to each other in both directions; None if there are none."""
        positions = np.concatenate([np.arange(s.start, s.start + s.num_rows) for s in scheduled])
        more = np.zeros_like(positions)
        first = 0
        for s in scheduled:
            for item, _ in self._placed.get(s.slot, ()):
                there = _overlap((s.slot, s.start, s.start + s.num_rows), item)
                if item.is_whole and there:
                    at = first + there.start - s.start
                    more[at : at + len(there)] = item.end - 1 - np.asarray(there)
            first += s.num_rows
        if not more.any():
            return None
        return WholeRows(torch.from_numpy(more).to(self._device), more, positions, self._windows_only)

    def _window(self, scheduled: Sequence[ScheduledRequest]) -> Window:
        """Rotary positions of a step's rows, with a margin before them for rows of a pass in flight, and after them for
        drafts."""
        shift_S = np.zeros(self._num_slots, dtype=np.int64)
        pieces = []
        num_entries = 0
        for s in scheduled:
            first, end = s.start - 2 * self._beyond, s.start + s.num_rows + self._beyond
            shift_S[s.slot] = num_entries - first
            pieces.append(self._axes[s.slot].at(first, end) if s.slot in self._axes else _text(first, end))
            num_entries += end - first
        axes, shift = (
            torch.from_numpy(x).to(self._device) for x in (np.concatenate(pieces, axis=1), shift_S)
        )
        return Window(axes, shift)

    def given(self, scheduled: Sequence[ScheduledRequest]) -> GivenRows | None:
        """The embeddings for the rows of a step and of its drafter; None if there are none."""
        spans = [(s.slot, s.start - self._before, s.start + s.num_rows + self._after) for s in scheduled]
        spans = [
            span for span in spans if any(_overlap(span, item) for item, _ in self._placed.get(span[0], ()))
        ]
        if not spans:
            return None
        index_SW = np.full((self._num_slots, max(end - first for _, first, end in spans)), -1)
        first_S = np.zeros(self._num_slots, dtype=np.int64)
        more_SW = np.zeros_like(index_SW)
        pieces, num_rows = list[_Piece](), 0
        for span in spans:
            slot, first, end = span
            first_S[slot] = first
            for item, source in self._placed[slot]:
                there = _overlap(span, item)
                if not there:
                    continue
                if item.is_whole:  # then a step computes all of its rows or none
                    rows_of_step = (slot, first + self._before, end - self._after)
                    seeing = np.asarray(_overlap(rows_of_step, item), dtype=np.int64)
                    more_SW[slot, seeing - first] = item.end - 1 - seeing
                numbers = source.numbers(range(there.start - item.start, there.stop - item.start))
                carried = numbers[numbers >= 0]
                if len(carried):
                    pieces.append(_Piece(source, int(carried[0]), int(carried[-1]) + 1))
                    rows = np.where(numbers >= 0, numbers - carried[0] + num_rows, -1)
                    index_SW[slot, there.start - first : there.stop - first] = rows
                    num_rows += len(carried)
        if not pieces:
            return None
        index, firsts, more = (torch.from_numpy(x).to(self._device) for x in (index_SW, first_S, more_SW))
        others: dict[object, Callable[[], GivenRows]] = {
            own: partial(_own_rows, own, store, pieces, index, firsts, more)
            for own, store in self._own.items()
        }
        return replace(_rows_of(self._store, pieces, index, firsts), others=others)


@dataclass(frozen=True, slots=True)
class StepItems:
    """Embeddings that replace tokens in a step's rows (`given`), and rows that attend beyond their position
    (`whole`)."""

    given: GivenRows | None
    whole: WholeRows | None


class _Piece(NamedTuple):
    """A range of an item's embeddings."""

    source: ItemInput
    first: int
    end: int


def _rows_of(store: ItemStore, pieces: Sequence[_Piece], index_SW: Tensor, first_S: Tensor) -> GivenRows:
    """The pieces' embeddings from one store, concatenated."""
    found = [
        store.rows(source)[first:end] if source.kind in store.encoders else store.nothing(end - first)
        for source, first, end in pieces
    ]
    if not store.added.num_layers:
        return GivenRows(torch.cat(found), index_SW, first_S)
    size = store.hidden_size * (1 + store.added.num_layers)
    adds = [rows.shape[1] == size for rows in found]
    filled = [torch.nn.functional.pad(rows, (0, size - rows.shape[1])) for rows in found]
    adds_E = torch.tensor(adds).repeat_interleave(torch.tensor([len(rows) for rows in found]))
    return GivenRows(torch.cat(filled), index_SW, first_S, store.added, adds_E.to(index_SW.device))


def _own_rows(
    own: OwnEmbeddings,
    store: ItemStore,
    pieces: Sequence[_Piece],
    index_SW: Tensor,
    first_S: Tensor,
    more_SW: Tensor,
) -> GivenRows:
    """The pieces' embeddings from a drafter's store; its rows may attend to each other as the target's do."""
    found = _rows_of(store, pieces, index_SW, first_S)
    return replace(found, more_SW=more_SW, windows_only=own.windows_only) if own.is_whole else found


class _Axes(NamedTuple):
    """A prompt's rotary positions up to the end of its last item, int64 [3, P]; `shift` is added to the index of a
    later token to get its position."""

    axes_3P: np.ndarray[Any, np.dtype[np.int64]]
    shift: int

    def at(self, first: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rotary positions of tokens `first` to `end` (exclusive); for negative indices the values are unused."""
        known = self.axes_3P.shape[1]
        inner = self.axes_3P[:, max(0, first) : max(0, end)]
        parts = [_text(first, min(end, 0)), inner, _text(max(first, known), end) + self.shift]
        return np.concatenate(parts, axis=1)


def _text(first: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(first, max(first, end)) + np.zeros((3, 1), dtype=np.int64)


def _axes_of(placed: Sequence[tuple[Item, ItemInput]]) -> _Axes:
    """Rotary positions of a prompt: text advances by one per token on all axes, items' rows follow their `Places`."""
    pieces = []
    place = shift = 0
    for item, source in placed:
        axes_3N, advance = source.places or Places(_text(0, item.num_rows), item.num_rows)
        pieces += [_text(place, item.start) + shift, axes_3N + item.start + shift]
        place = item.start + item.num_rows
        shift += advance - item.num_rows
    return _Axes(np.concatenate(pieces, axis=1), shift)


def num_ahead(items: Sequence[Item], inputs: Sequence[ItemInput]) -> int:
    """By how much the positions of text after the items exceed its token indices; 0 if they do not."""
    return max(0, _axes_of(list(zip(items, inputs, strict=True))).shift) if items else 0


def _overlap(span: tuple[int, int, int], item: Item) -> range:
    """Positions of a span (slot, first, end) that belong to an item."""
    _, first, end = span
    return range(max(first, item.start), min(end, item.start + item.num_rows))
