"""Parsing of tool calls and reasoning in models' output. A family's syntax is a file here, with a row below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from draftproof.schema import did_you_mean
from draftproof.server.parsers import deepseek, gemma, glm, hermes, llama3, mistral, reasoning, told
from draftproof.server.parsers.forms import Form
from draftproof.server.parsers.reader import SPACE, CallArguments, CallStart, Content, Piece, Reader, Steps

NONE = "none"
Reads = Callable[[Reader, Mapping[str, Any]], Steps[None]]
# (reader of a family's calls, its markers, its forms: empty if calls cannot be enforced by a grammar).
TOOLS: Mapping[str, tuple[Reads, tuple[str, ...], tuple[Form, ...]]] = MappingProxyType(
    {
        "hermes": (hermes.read, hermes.MARKERS, hermes.FORMS),
        "llama3": (llama3.read, llama3.MARKERS, llama3.FORMS),
        "mistral": (mistral.read, mistral.MARKERS, mistral.FORMS),
        "deepseek": (deepseek.read, deepseek.MARKERS, deepseek.FORMS),
        "gemma": (gemma.read, gemma.MARKERS, gemma.FORMS),
        "glm": (glm.read, glm.MARKERS, glm.FORMS),
    }
)
# Texts in a chat template that identify a family's syntax; the first one found counts.
TOOL_SIGNS = {
    "<arg_key>": "glm",
    "<|tool_call>": "gemma",
    "<start_function_call>": "gemma",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁call▁begin｜>": "deepseek",
    "<|python_tag|>": "llama3",
    "Environment: ipython": "llama3",
}


class Syntax:
    """How a model writes calls and reasoning: by name, or (None) by its chat template. `form`: None if calls cannot be
    enforced by a grammar."""

    def __init__(self, template: str, tool_name: str | None, reasoning_name: str | None) -> None:
        """`template`: empty if there is none. ValueError for an unknown name."""
        _check("tool_call_parser", tool_name, TOOLS)
        _check("reasoning_parser", reasoning_name, reasoning.PAIRS)
        is_told = told.is_told(template)
        if is_told and tool_name not in (None, NONE, told.FAMILY):
            raise ValueError(
                f"tool_call_parser={tool_name!r}: the model's chat template tells of no tools, and where they are told "
                f"in plain text calls are {told.FAMILY}'s; leave it out"
            )
        otherwise = told.FAMILY if is_told else NONE
        found = next((name for sign, name in TOOL_SIGNS.items() if sign in template), otherwise)
        self.tools = tool_name or found
        found = next((name for name, pair in reasoning.PAIRS.items() if pair[1] in template), NONE)
        self.reasoning = reasoning_name or found
        forms = () if self.tools == NONE else TOOLS[self.tools][2]
        self.form = next((form for form in forms if form.sign in template), None)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that decoding must keep, even if they are special tokens."""
        own = () if self.tools == NONE else TOOLS[self.tools][1]
        return (*own, *reasoning.PAIRS.get(self.reasoning, ()))


def _check(field: str, name: str | None, known: Mapping[str, Any]) -> None:
    if name not in (None, NONE, *known):
        hint = did_you_mean(str(name), [*known, NONE]) or "leave it out for the model's own"
        raise ValueError(f"{field}={name!r}: must be one of {', '.join([*known, NONE])}; {hint}")


class Parser:
    """Parses one answer into pieces while its text is streamed."""

    def __init__(
        self,
        syntax: Syntax,
        schemas: Mapping[str, Any] | None,
        *,
        begins_inside: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """`schemas`: tool name -> schema of its arguments; None: calls are text. `begins_inside`: the answer begins
        inside reasoning, without its marker. `most_calls`: calls beyond are dropped."""
        self._reader = Reader()
        self._steps = self._read(syntax, schemas, begins_inside)
        self._most_calls = most_calls
        self._space = ""
        self.num_calls = 0

    def _read(self, syntax: Syntax, schemas: Mapping[str, Any] | None, begins_inside: bool) -> Steps[None]:
        if syntax.reasoning != NONE:
            yield from reasoning.read(self._reader, reasoning.PAIRS[syntax.reasoning], begins_inside)
        if schemas is not None and syntax.tools != NONE:
            yield from TOOLS[syntax.tools][0](self._reader, schemas)
        yield from self._reader.until(Content)

    def push(self, text: str, *, is_over: bool = False) -> list[Piece]:
        """Add text; returns the pieces that are certain now. White space before a call is dropped."""
        self._reader.push(text)
        self._reader.is_over |= is_over
        pieces: list[Piece] = []
        for piece in self._steps:
            if piece is None:
                break
            pieces += self._checked(piece)
        if is_over and self._space:
            pieces.append(Content(self._space))
        return pieces

    def _checked(self, piece: Piece) -> list[Piece]:
        if isinstance(piece, Content):
            text = self._space + piece.text
            kept = text.rstrip(SPACE)
            self._space = text[len(kept) :]
            return [Content(kept)] if kept else []
        if isinstance(piece, CallStart):
            self.num_calls += 1
            self._space = ""
        is_call = isinstance(piece, (CallStart, CallArguments))
        is_too_many = self._most_calls is not None and self.num_calls > self._most_calls
        return [] if is_call and is_too_many else [piece]
