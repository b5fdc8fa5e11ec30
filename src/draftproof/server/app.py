"""The routes: OpenAI's, vLLM's beside them, and what balancers and dashboards ask."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from draftproof.server import errors
from draftproof.server.errors import RefusalError
from draftproof.server.limits import Gate, read_body, within
from draftproof.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_model,
)
from draftproof.server.service import Service
from draftproof.server.streaming import EventResponse, events

B = TypeVar("B", bound=Body)
T = TypeVar("T")
LONG_BODY = 1 << 16  # bytes from which on parsing would hold other answers up
SCHEMAS = "#/components/schemas/"
UNREAD = "X-Unread-Fields"  # header: fields of a body that nobody read
GONE = 499  # status of an answer whose client has gone: for logs, nobody reads it


def create_app(service: Service) -> ASGIApp:
    """The whole application. Its lifespan ends with the engine's."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.llm.shutdown(service.config.shutdown_timeout)

    version = importlib.metadata.version("draftproof")
    app = FastAPI(title="draftproof", version=version, docs_url=None, redoc_url=None, lifespan=lifespan)
    _answer_errors(app)
    for path, kind in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)):
        _post(app, path, kind, partial(_generate, service, kind))
    _post(app, "/tokenize", TokenizeBody, partial(_tokenize, service))
    _post(app, "/detokenize", DetokenizeBody, partial(_detokenize, service))
    _add_looks(app, service, version)
    if service.config.api_key:
        _add_orders(app, service)
    _name_schemas(app)
    gated: ASGIApp = Gate(app, service.config.api_key)
    if service.config.cors_origin:
        origins = list(service.config.cors_origin)
        gated = CORSMiddleware(gated, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return gated


def _post(app: FastAPI, path: str, kind: type[Body], route: Callable[[Request], Awaitable[Response]]) -> None:
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


def _name_schemas(app: FastAPI) -> None:
    """Put what bodies' schemas refer to where /openapi.json has its schemas."""
    described = app.openapi()
    named = described.setdefault("components", {}).setdefault("schemas", {})
    for routes in described["paths"].values():
        for route in routes.values():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            named |= body.get("schema", {}).pop("$defs", {})


def _add_orders(app: FastAPI, service: Service) -> None:
    """Routes that change what the engine does; they exist where there is a key to ask for."""

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        await service.llm.reset_prefix_cache()
        return Response()

    @app.post("/pause")
    async def pause() -> Response:
        """Requests are taken, and wait."""
        await service.llm.pause()
        return Response()

    @app.post("/resume")
    async def resume() -> Response:
        await service.llm.resume()
        return Response()


def _add_looks(app: FastAPI, service: Service, version: str) -> None:
    """Routes that only look."""
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        facts = {"object": "model", "created": started, "owned_by": "draftproof", "root": service.names[0]}
        longest = service.llm.llm.max_model_len
        return {
            "object": "list",
            "data": [{"id": name, **facts, "max_model_len": longest} for name in service.names],
        }

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether the engine lives: a server that is shutting down is healthy."""
        if service.llm.llm.engine.error is not None and not service.is_draining:
            raise RefusalError(503, service.llm.llm.engine.error, code="unavailable")
        return Response()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are taken."""
        service.check_ready()
        return Response()

    @app.get("/version")
    async def told_version() -> dict[str, str]:
        return {"version": version, "system_fingerprint": service.llm.llm.fingerprint}

    @app.get("/load")
    async def load() -> dict[str, int]:
        admission = service.admission
        return {"server_load": admission.num_outputs, "prompt_tokens": admission.num_tokens}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.meter.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _generate(
    service: Service, kind: type[ChatBody] | type[CompletionBody], request: Request
) -> Response:
    body = await _read(service, request, kind)
    headers = _unread(body)
    job = await service.begin(body, body.request_id or request.state.request_id)
    if body.stream:
        return EventResponse(events(service, job), partial(service.end, job), headers)
    try:
        answer = await _unless_gone(request, service.whole(job))
    finally:
        service.end(job)
    return Response(status_code=GONE) if answer is None else JSONResponse(answer, headers=headers)


async def _tokenize(service: Service, request: Request) -> Response:
    body = await _read(service, request, TokenizeBody)
    check_model(body.model, service.names)
    tokenizer = service.llm.llm.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("prompt: give either prompt or messages")
    if body.prompt is not None:
        ids = await service.llm.encode(partial(tokenizer.encode, body.prompt, body.add_special_tokens))
    else:
        template: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt}
        work = partial(tokenizer.chat, body.messages or [], **template)
        ids = await service.llm.encode(partial(within, service.config.chat_template_timeout, work))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.llm.llm.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    return JSONResponse(answer, headers=_unread(body))


async def _detokenize(service: Service, request: Request) -> Response:
    body = await _read(service, request, DetokenizeBody)
    check_model(body.model, service.names)
    size = service.llm.llm.model_config.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise ValueError(f"tokens: id {token:.6g}: ids go from 0 to {size - 1}")
    tokenizer = service.llm.llm.tokenizer
    text = await service.llm.encode(partial(tokenizer.decode, body.tokens, skip_special_tokens=False))
    return JSONResponse({"prompt": text}, headers=_unread(body))


async def _read(service: Service, request: Request, kind: type[B]) -> B:
    """The body, checked; a long one by another thread than the one that hands answers out."""
    raw = await read_body(request, service.config)
    if len(raw) < LONG_BODY:
        return kind.model_validate_json(raw)
    return await service.llm.encode(partial(kind.model_validate_json, raw))


def _unread(body: Body) -> dict[str, str]:
    names = body.unknown_fields()
    return {UNREAD: names} if names else {}


async def _unless_gone(request: Request, work: Awaitable[T]) -> T | None:
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


def _answer_errors(app: FastAPI) -> None:
    """Every error as OpenAI's clients read it."""

    def told(refusal: RefusalError) -> Response:
        return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RefusalError)
        return told(error)

    async def wrong_body(_: Request, error: Exception) -> Response:
        assert isinstance(error, ValidationError)
        return told(errors.of_body(error))

    async def wrong_value(_: Request, error: Exception) -> Response:
        assert isinstance(error, ValueError)
        return told(errors.of_value(error))

    async def wrong_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path:.80}: {error.detail}"
        return told(RefusalError(error.status_code, message, headers=error.headers))

    async def broken(_: Request, error: Exception) -> Response:
        return told(RefusalError(500, f"internal error: {type(error).__name__}"))

    async def left(_: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    app.add_exception_handler(RefusalError, refused)
    app.add_exception_handler(ValidationError, wrong_body)
    app.add_exception_handler(ValueError, wrong_value)
    app.add_exception_handler(HTTPException, wrong_route)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, broken)
