"""Incremental parsing of a streamed answer: its pieces, and the `Reader` of the text received so far.

A family's syntax is a generator over a `Reader`. It yields the pieces that are certain, and None when it needs more
text; so it is written as if the whole text were there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")
SPACE = " \t\r\n"
OPEN, CLOSE = "{[", "}]"
ENDS_SCALAR = ",}]" + SPACE


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the JSON text of the latest call's arguments."""

    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments
Steps: TypeAlias = Generator[Piece | None, None, T]
Makes: TypeAlias = Callable[[str], Piece]


class Reader:
    """The text of one answer received so far. Its end is held back while it may be the start of a marker."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self.is_over = False

    def push(self, text: str) -> None:
        """Add text."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def mark(self) -> None:
        """Remember the current position for `taken` and `go_back`, until `forget`."""
        self._mark = self._at

    def taken(self) -> str:
        """The text since `mark`."""
        assert self._mark is not None, "it was set"
        return self._text[self._mark : self._at]

    def go_back(self) -> None:
        """Return to the mark."""
        assert self._mark is not None, "it was set"
        self._at = self._mark

    def step_back(self, num_chars: int) -> None:
        """Return the last `num_chars` characters, which are read again."""
        self._at -= num_chars

    def forget(self) -> None:
        self._mark = None

    def until(self, make: Makes | None, *markers: str) -> Steps[str]:
        """Yield the text before the first of the markers, in pieces by `make` (None: drop it). Returns the marker,
        which is taken too, or "" at the end of the answer."""
        while True:
            rest = self.rest
            found = min(((rest.find(marker), marker) for marker in markers if marker in rest), default=None)
            held = 0 if self.is_over else _held_back(rest, markers)
            size = len(rest) - held if found is None else found[0]
            self._at += size
            if size and make is not None:
                yield make(rest[:size])
            if found is not None:
                self._at += len(found[1])
                return found[1]
            if self.is_over:
                return ""
            yield None

    def text_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """(the whole text before the first of the markers, the marker), as in `until`."""
        parts: list[str] = []
        walk = self.until(Content, *markers)
        while True:
            try:
                piece = next(walk)
            except StopIteration as end:
                return "".join(parts), end.value
            if piece is None:
                yield None
            else:
                parts.append(piece.text)  # type: ignore[union-attr]

    def space(self) -> Steps[None]:
        """Skip white space."""
        while True:
            rest = self.rest
            self._at += len(rest) - len(rest.lstrip(SPACE))
            if self.rest or self.is_over:
                return
            yield None

    def starts_with(self, marker: str) -> Steps[bool]:
        """Whether `marker` comes next; if so it is taken."""
        while True:
            if self.rest.startswith(marker):
                self._at += len(marker)
                return True
            if self.is_over or not marker.startswith(self.rest):
                return False
            yield None

    def peek(self) -> Steps[str]:
        """The next character, without taking it; empty at the end."""
        while not self.rest and not self.is_over:
            yield None
        return self.rest[:1]

    def json_value(self, make: Makes | None = None) -> Steps[str]:
        """Take the next JSON value and return its text, which may be malformed or cut off; yields it in pieces by
        `make`."""
        parts: list[str] = []
        depth, in_string, escaped = 0, False, False
        first = yield from self.peek()
        is_scalar = first not in (*OPEN, '"')
        is_done = not first
        while not is_done:
            rest, size = self.rest, 0
            for size, char in enumerate(rest, start=1):
                if escaped:
                    escaped = False
                elif in_string:
                    escaped, in_string = char == "\\", char != '"'
                    is_done = not in_string and not depth
                elif char == '"':
                    in_string = True
                elif char in OPEN:
                    depth += 1
                elif char in CLOSE and depth:
                    depth -= 1
                    is_done = not depth
                elif is_scalar and char in ENDS_SCALAR:
                    is_done, size = True, size - 1
                if is_done:
                    break
            self._at += size
            if size:
                parts.append(rest[:size])
                if make is not None:
                    yield make(rest[:size])
            if self.is_over:
                break
            if not is_done:
                yield None
        return "".join(parts)


def _held_back(text: str, markers: tuple[str, ...]) -> int:
    """Characters at the end of `text` that may be the start of a marker."""
    longest = max(map(len, markers), default=1)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


def json_call(
    reader: Reader, name_key: str = "name", argument_keys: tuple[str, ...] = ("arguments",)
) -> Steps[bool]:
    """Read a call written as a JSON object with a name and arguments, which are passed on as they come. Anything else
    is passed on as text. Returns whether it was a call."""
    reader.mark()
    name, arguments, has_begun, has_arguments = "", "", False, False
    if (yield from reader.starts_with("{")):
        while True:
            yield from reader.space()
            if (yield from reader.starts_with(",")):
                continue
            if (yield from reader.peek()) != '"':
                break
            key = _loaded((yield from reader.json_value()))
            yield from reader.space()
            if not (yield from reader.starts_with(":")):
                break
            yield from reader.space()
            if key == name_key and not name:
                found = _loaded((yield from reader.json_value()))
                name = found if isinstance(found, str) else ""
            elif key in argument_keys and not has_arguments:
                has_arguments = True
                is_object = (yield from reader.peek()) == "{"
                if name and is_object:
                    yield CallStart(name)
                    has_begun = True
                    yield from reader.json_value(CallArguments)
                else:
                    arguments = yield from reader.json_value()
            else:
                yield from reader.json_value()
        yield from reader.starts_with("}")
    if not has_begun and name:
        yield CallStart(name)
        given = _loaded(arguments)
        yield CallArguments(given if isinstance(given, str) else arguments or "{}")
    elif not has_begun and reader.taken():
        yield Content(reader.taken())
    reader.forget()
    return bool(name)


def _loaded(text: str) -> object:
    """The value of a JSON text; None if it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
