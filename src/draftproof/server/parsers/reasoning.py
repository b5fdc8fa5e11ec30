"""How families mark reasoning at the start of an answer."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

from draftproof.server.parsers.reader import SPACE, Reader, Reasoning, Steps

# Name -> (opening marker, closing marker). An answer begins inside reasoning if its prompt ends with the opening one.
PAIRS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),  # DeepSeek R1 and later, Qwen 3, GLM 4.5, Hermes 4
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma": ("<|channel>thought", "<channel|>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "seed": ("<seed:think>", "</seed:think>"),
}


def num_tokens(
    token_ids: Sequence[int],
    markers: tuple[str, str],
    begins_inside: bool,
    decode: Callable[[Sequence[int]], str],
) -> int:
    """Number of tokens of an answer's reasoning, including its markers; all tokens if it does not end."""
    text = decode(token_ids)
    if not begins_inside and not text.lstrip(SPACE).startswith(markers[0]):
        return 0
    if markers[1] not in text:
        return len(token_ids)
    return bisect.bisect_left(range(len(token_ids)), True, key=lambda k: markers[1] in decode(token_ids[:k]))


def read(reader: Reader, markers: tuple[str, str], begins_inside: bool) -> Steps[None]:
    """Yield the reasoning at the start of an answer, if there is any; the text after it is left to the caller."""
    if not begins_inside:
        reader.mark()
        yield from reader.space()
        begins_inside = yield from reader.starts_with(markers[0])
        if not begins_inside:
            reader.go_back()
        reader.forget()
    if begins_inside:
        yield from reader.space()
        yield from reader.until(Reasoning, markers[1])
        yield from reader.space()
