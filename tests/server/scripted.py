"""A model that writes what a test tells it to, in a real engine and server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftproof import LLM, assets
from draftproof.engine.core import EngineCore
from draftproof.engine.deltas import TokenDelta
from draftproof.engine.interface import RequestSpec

TURN = "<|im_start|>"
# Hermes's format: tools first, calls as JSON between markers.
TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for t in tools %}{{ t['function'] | tojson }}
{% endfor %}Call by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] or '' }}\
{% for c in m.tool_calls or [] %}<tool_call>\
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def model(folder: Path, template: str = TEMPLATE) -> Path:
    """The embedded model with the given chat template."""
    source = assets.path(assets.TARGET)
    for name in os.listdir(source):
        if name != "chat_template.jinja":
            (folder / name).symlink_to(Path(source) / name)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def scripted(folder: Path, says: Callable[[str], str], template: str = TEMPLATE, **settings: Any) -> LLM:
    """An engine whose model answers a prompt's text with `says(text)`, a few tokens per step."""
    llm = LLM(
        str(model(folder, template)), dtype="float32", num_kv_blocks=300, **{"max_model_len": 256, **settings}
    )
    llm.engine.__class__ = ScriptedCore
    llm.engine.says = says
    llm.engine.tokenizer = llm.tokenizer
    llm.engine.scripts = {}
    return llm


class ScriptedCore(EngineCore):
    """The engine's core, with scripted tokens in place of the model's passes."""

    says: Callable[[str], str]
    tokenizer: Any
    scripts: dict[str, tuple[list[int], int]]  # request id -> (remaining tokens, how many of them may come)

    @property
    def has_work(self) -> bool:
        return bool(self.scripts)

    def add_request(self, request_id: str, spec: RequestSpec) -> None:
        text = self.says(self.tokenizer.decode(spec.token_ids, skip_special_tokens=False))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        most = spec.limit - len(spec.token_ids)
        self.scripts[request_id] = [*ids, self.tokenizer.eos_token_id], most
        self.stats.num_prompt_tokens += len(spec.token_ids)

    def step(self) -> list[TokenDelta]:
        deltas = []
        for request_id, (ids, most) in list(self.scripts.items()):
            taken, rest = ids[: min(3, most)], ids[3:]
            reason = "length" if most <= 3 and len(ids) > most else None if rest else "stop"
            deltas.append(TokenDelta(request_id, taken, is_round=True, finish_reason=reason))
            if reason is None:
                self.scripts[request_id] = rest, most - 3
            else:
                del self.scripts[request_id]
        return deltas

    def abort(self, request_id: str) -> None:
        self.scripts.pop(request_id, None)
