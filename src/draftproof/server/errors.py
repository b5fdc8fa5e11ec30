"""Error responses: OpenAI's and Anthropic's error objects, and the HTTP statuses that go with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from draftproof.schema import shown

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
MESSAGES = "/v1/messages"
MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
BEGINS_WITH_FIELD = re.compile(r"([a-z_]+)(?:\[\d+\])?[=:]")
# our own argument names in error messages, which no body has. "prompt" is not among them, though it may also mean the
# encoded messages of a chat
OURS = frozenset({"draft", "params", "limit"})
INNER_FIELDS = (
    "include_usage",
    "include_drafts",
    "num_speculative_tokens",
    "method",
    "function",
    "type",
    "name",
    "parameters",
)  # fields of objects within a body


class RefusalError(Exception):
    """An error response, with its HTTP status and headers; `param`: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_for(self, path: str) -> dict[str, Any]:
        """The body in the format of the route's API."""
        if not path.startswith(MESSAGES):
            return self.body()
        kind = MESSAGES_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def unavailable(why: str) -> RefusalError:
    """A 503: the engine computes nothing any more."""
    return RefusalError(503, f"{why}; ask another", code="unavailable", headers={"Retry-After": "5"})


def of_value(error: ValueError) -> RefusalError:
    """A 400 for a request that the engine cannot serve; the engine's messages begin with the field."""
    found = BEGINS_WITH_FIELD.match(str(error))
    param = found[1] if found and found[1] not in OURS else None
    return RefusalError(400, str(error), param=param, code="invalid_value")


def of_body(error: ValidationError) -> RefusalError:
    """A 400 for a body that is not JSON or has a field of a wrong type; names field, value and what is allowed."""
    found = error.errors(include_url=False)
    first = found[0]
    where = [str(part) for part in first["loc"]]
    if not where:
        return RefusalError(400, f"body: {first['msg']}", code="invalid_json")
    name, path = where[0], _path(first["loc"])
    wanted = [e["msg"] for e in found if e["loc"][:1] == first["loc"][:1]]
    if first["type"] == "missing":
        return RefusalError(400, f"{path}: is missing", param=name, code="missing_field")
    told = "; or ".join(dict.fromkeys(wanted[:4]))
    return RefusalError(400, f"{path}={shown(first['input'])}: {told}", param=name, code="invalid_type")


def _path(where: Sequence[int | str]) -> str:
    """The path of a field in a body, such as messages[0].name; pydantic's entries for tried types are left out."""
    path = str(where[0])
    for part in where[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in INNER_FIELDS:
            path += f".{part}"
    return path
