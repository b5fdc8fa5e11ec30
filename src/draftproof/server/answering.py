"""Code shared by the routes: reading a body within limits, and answering until the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftproof.server.answers import as_json
from draftproof.server.errors import RefusalError
from draftproof.server.limits import read_body
from draftproof.server.protocol import Body
from draftproof.server.service import Job, Service

B = TypeVar("B", bound=Body)
T = TypeVar("T")
LONG_BODY = 1 << 16  # bytes; parsing a longer body in the event loop would delay other answers
SCHEMAS = "#/components/schemas/"
UNREAD = "X-Unread-Fields"  # header: a body's unknown fields, which were ignored
GONE = 499  # status after the client has disconnected; only logs show it


class Answer(JSONResponse):
    """A JSON response, serialised like the events of a stream."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


def post(app: FastAPI, path: str, kind: type[Body], route: Callable[[Request], Awaitable[Response]]) -> None:
    """Add a route that reads its own body, within limits; FastAPI is given the body's schema for /openapi.json."""

    async def post(request: Request) -> Response:
        return await route(request)

    described = kind.model_json_schema(ref_template=SCHEMAS + "{model}")
    schema = {"content": {"application/json": {"schema": described}}, "required": True}
    app.add_api_route(
        path,
        post,
        methods=["POST"],
        name=path,
        response_model=None,
        responses={status: {"description": "refused"} for status in (400, 401, 404, 408, 413, 415, 429, 503)},
        openapi_extra={"requestBody": schema},
    )


async def read(service: Service, request: Request, kind: type[B]) -> B:
    """The validated body; a long one is parsed in another thread than the event loop's."""
    raw = await read_body(request, service.config, service.admission)
    if len(raw) < LONG_BODY:
        return _parsed(kind, raw)
    return await service.llm.encode(partial(_parsed, kind, raw))


def _parsed(kind: type[B], raw: bytes) -> B:
    """Parse and validate a body. NaN and infinities, which JSON lacks and no answer could echo, are refused."""
    try:
        given = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise RefusalError(400, f"body: Invalid JSON: {error}", code="invalid_json") from None
    return kind.model_validate(given)


def unread(body: Body) -> dict[str, str]:
    names = body.unknown_fields()
    return {UNREAD: names} if names else {}


async def answered(
    service: Service, request: Request, job: Job, work: Awaitable[Any], headers: dict[str, str]
) -> Response:
    """Await `work`, a job's answer, then end the job. An error here is not the request's fault, so a ValueError becomes
    a RuntimeError: it must not be answered with a 400."""
    try:
        answer = await unless_gone(request, work)
        return Response(status_code=GONE) if answer is None else Answer(answer, headers=headers)
    except ValueError as error:
        raise RuntimeError(f"{job.id}: an answer could not be made: {error}") from error
    finally:
        service.end(job)


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; if the client disconnects first, `work` is cancelled and the result is None."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
