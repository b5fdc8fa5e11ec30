"""How families mark what they think before they answer."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

from draftproof.server.parsers.reader import SPACE, Reader, Reasoning, Steps

# The markers of each, and which names it goes by. An answer may begin inside, where the prompt ends with the first one.
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
    """Tokens of an answer up to the end of its reasoning, with the markers; all of them where it has no end."""
    text = decode(token_ids)
    if not begins_inside and not text.lstrip(SPACE).startswith(markers[0]):
        return 0
    if markers[1] not in text:
        return len(token_ids)
    return bisect.bisect_left(range(len(token_ids)), True, key=lambda k: markers[1] in decode(token_ids[:k]))


def read(reader: Reader, markers: tuple[str, str], begins_inside: bool) -> Steps[None]:
    """The reasoning that an answer begins with, if it does; what follows it is left."""
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
