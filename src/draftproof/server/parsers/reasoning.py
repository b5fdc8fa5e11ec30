"""How families mark what they think before they answer."""

from __future__ import annotations

from collections.abc import Mapping

from draftproof.server.parsers.reader import Reader, Reasoning, Steps

# The markers of each, and which names it goes by. An answer may begin inside, where the prompt ends with the first one.
PAIRS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),  # DeepSeek R1 and later, Qwen 3, GLM 4.5, Hermes 4
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma": ("<|channel>thought", "<channel|>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "seed": ("<seed:think>", "</seed:think>"),
}


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
