"""What routes have in common: a body that is read within limits, and an answer that its client may leave."""

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
LONG_BODY = 1 << 16  # bytes from which on parsing would hold other answers up
SCHEMAS = "#/components/schemas/"
UNREAD = "X-Unread-Fields"  # header: fields of a body that nobody read
GONE = 499  # status of an answer whose client has gone: for logs, nobody reads it


class Answer(JSONResponse):
    """What is not an event of a stream, written as that is."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


def post(app: FastAPI, path: str, kind: type[Body], route: Callable[[Request], Awaitable[Response]]) -> None:
    """A route whose body we read ourselves, within limits; its schema is told to /openapi.json."""

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
    """The body, checked; a long one by another thread than the one that hands answers out."""
    raw = await read_body(request, service.config, service.admission)
    if len(raw) < LONG_BODY:
        return _parsed(kind, raw)
    return await service.llm.encode(partial(_parsed, kind, raw))


def _parsed(kind: type[B], raw: bytes) -> B:
    """A body as it was sent, without the numbers that JSON has not, which no answer could repeat."""
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
    """The answer that `work` makes of a job, which is ended. From here on nothing that goes wrong is the request's
    fault, so a ValueError is none of those that are answered with a 400."""
    try:
        answer = await unless_gone(request, work)
        return Response(status_code=GONE) if answer is None else Answer(answer, headers=headers)
    except ValueError as error:
        raise RuntimeError(f"{job.id}: an answer could not be made: {error}") from error
    finally:
        service.end(job)


async def unless_gone(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`, which is cancelled, and None, as soon as the client has gone."""

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
