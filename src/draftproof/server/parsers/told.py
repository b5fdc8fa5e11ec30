"""Tools for models whose chat template has none: described, called and answered in plain text, in Hermes's form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

FAMILY = "hermes"
NAMES_TOOLS = re.compile("tool", re.IGNORECASE)
Messages = list[dict[str, Any]]
TELLS = """\
You can call tools. Each line here is one, with the JSON schema of its arguments:
{tools}
To call one, write this:
<tool_call>
{{"name": "its name", "arguments": {{...}}}}
</tool_call>"""


def is_told(template: str) -> bool:
    """Whether tools must be described in plain text, because the chat template does not support them."""
    return bool(template) and NAMES_TOOLS.search(template) is None


def as_text(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """A conversation with calls and tool results as text, and the tools described in the system message."""
    made = [_plain(message) for message in messages]
    if not tools:
        return made
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = TELLS.format(tools=listed)
    if not made or made[0].get("role") != "system":
        return [{"role": "system", "content": told}, *made]
    return [{**made[0], "content": _joined(made[0].get("content"), told, "\n\n")}, *made[1:]]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    calls, content = message.get("tool_calls"), message.get("content")
    if message.get("role") == "tool":
        before, behind = "<tool_response>\n", "\n</tool_response>"
        return {"role": "user", "content": _joined(_joined(before, content, ""), behind, "")}
    if not calls:
        return message
    written = "\n".join(f"<tool_call>\n{_call(call['function'])}\n</tool_call>" for call in calls)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _joined(content, written, "\n")}


def _call(function: Mapping[str, Any]) -> str:
    given = {"name": function["name"], "arguments": function["arguments"]}
    return json.dumps(given, ensure_ascii=False)


def _joined(first: Any, second: Any, between: str) -> Any:
    """Two contents joined: to a list of parts if one is such a list, else to a text."""
    if isinstance(first, list) or isinstance(second, list):
        return [*_parts(first), *_parts(second)]
    return between.join(text for text in (first, second) if text)


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
