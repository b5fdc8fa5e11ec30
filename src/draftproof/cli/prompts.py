"""Prompts from a command line, a file or standard input, in the formats of the usual benchmarks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.frontend.text import Tokenizer

KEYS = "'prompt', 'messages', 'turns' or 'question'"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: raw `text`, or the `messages` of a conversation; exactly one of them is set. `reference`: the number
    that answers it, `domain`: the kind of text it asks for, if the file has them."""

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    reference: str | None = None
    domain: str = ""

    @property
    def title(self) -> str:
        """The beginning of the prompt, for display."""
        text = self.text if self.text is not None else str((self.messages or [{}])[-1].get("content", ""))
        return " ".join(text.split())[:60]

    def for_llm(self, tokenizer: Tokenizer, chat: bool) -> str | dict[str, list[int]]:
        """The prompt in the form that `LLM.generate` takes. `chat`: also send raw text as a user's message."""
        if self.messages is None and not chat:
            return self.text or ""
        messages = self.messages or [{"role": "user", "content": self.text}]
        return {"prompt_token_ids": tokenizer.chat(messages)}

    def token_ids(self, tokenizer: Tokenizer, chat: bool) -> list[int]:
        """The prompt's ids, special tokens included."""
        prompt = self.for_llm(tokenizer, chat)
        return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]


def read_prompts(argument: str | None, file: str | None, limit: int | None = None) -> list[Prompt]:
    """The prompts of the argument, else of the file, else of standard input. ValueError if there are none."""
    if argument is not None and file is not None:
        raise ValueError("PROMPT and --prompt-file: give only one of them")
    if argument is not None and argument != "-":
        return [Prompt("0", argument)]
    if file is not None:
        return read_file(Path(file))[:limit]
    if sys.stdin.isatty():
        raise ValueError("no prompt: give it as an argument, with --prompt-file, or on standard input")
    text = sys.stdin.read()
    if not text.strip():
        raise ValueError("standard input: is empty; pipe a prompt into it")
    return [Prompt("0", text.removesuffix("\n"))]


def read_file(path: Path) -> list[Prompt]:
    """The prompts of a file: .jsonl has one object per line, any other file one prompt per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-file {path}: cannot be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"--prompt-file {path}: holds no prompt")
    if path.suffix not in (".jsonl", ".json"):
        return [Prompt(str(number), line) for number, line in numbered]
    return [_parse(line, f"--prompt-file {path}, line {number}", str(number)) for number, line in numbered]


def _parse(line: str, where: str, number: str) -> Prompt:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(item, Mapping):
        raise ValueError(f"{where}: must be an object with {KEYS}")
    name = str(next((item[k] for k in ("id", "task_id", "question_id") if k in item), number))
    reference = _number(item.get("reference"))
    domain = str(item.get("domain", ""))
    match item:
        case {"prompt": str(text)}:
            return Prompt(name, text, reference=reference, domain=domain)
        case {"messages": [_, *_] as messages} if all(isinstance(m, Mapping) for m in messages):
            return Prompt(name, messages=[dict(m) for m in messages], reference=reference, domain=domain)
        # Conversations of several turns: only the first can be sent, since later ones need an answer to it.
        case {"turns": [str(text), *_]} | {"question": str(text)}:
            return Prompt(
                name, messages=[{"role": "user", "content": text}], reference=reference, domain=domain
            )
    raise ValueError(
        f"{where}: has keys {', '.join(map(str, item))}; needs {KEYS}, with text or messages in it"
    )


def _number(reference: object) -> str | None:
    """`reference` as a number's text; None if it is not a number, as in some benchmarks."""
    text = str(reference).replace(",", "")
    try:
        return text if math.isfinite(float(text)) else None
    except ValueError:
        return None
