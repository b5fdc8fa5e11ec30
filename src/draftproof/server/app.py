"""The application and its routes: OpenAI's, some of vLLM's, and those for load balancers and dashboards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from draftproof import __version__
from draftproof.frontend.async_llm import ClosedError
from draftproof.server import errors
from draftproof.server.agent_routes import add_agent_routes
from draftproof.server.answering import GONE, answered, post, read, unread
from draftproof.server.errors import RefusalError
from draftproof.server.limits import OPEN_ROUTES, Gate
from draftproof.server.page import FILES, add_page
from draftproof.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_model,
    check_size,
)
from draftproof.server.service import Service
from draftproof.server.streaming import EventResponse, events


def create_app(service: Service) -> ASGIApp:
    """The whole application; the end of its lifespan shuts the engine down."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.shut_down()

    app = FastAPI(title="draftproof", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    _answer_errors(app)
    for path, kind in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)):
        post(app, path, kind, partial(_generate, service, kind))
    post(app, "/tokenize", TokenizeBody, partial(_tokenize, service))
    post(app, "/detokenize", DetokenizeBody, partial(_detokenize, service))
    add_agent_routes(app, service)
    _add_looks(app, service)
    if service.config.api_key:
        _add_orders(app, service)
    if service.config.page:
        add_page(app)
    _name_schemas(app)
    open_routes = OPEN_ROUTES + (tuple(FILES) if service.config.page else ())
    gated: ASGIApp = Gate(app, service.config.api_key, lambda: service.is_draining, open_routes)
    if service.config.cors_origin:
        origins = list(service.config.cors_origin)
        gated = CORSMiddleware(gated, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return gated


def _name_schemas(app: FastAPI) -> None:
    """Add the schemas that the bodies' schemas refer to, to /openapi.json's components."""
    described = app.openapi()
    named = described.setdefault("components", {}).setdefault("schemas", {})
    for routes in described["paths"].values():
        for route in routes.values():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            named |= body.get("schema", {}).pop("$defs", {})


def _add_orders(app: FastAPI, service: Service) -> None:
    """Routes that control the engine; they exist only if the server requires an API key."""

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


def _add_looks(app: FastAPI, service: Service) -> None:
    """Read-only routes: health, models, metrics."""
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        facts: dict[str, Any] = {
            "object": "model",
            "created": started,
            "owned_by": "draftproof",
            "root": service.names[0],
        }
        facts |= service.abilities
        return {"object": "list", "data": [{"id": name, **facts} for name in service.names]}

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether the engine lives: a server that is shutting down is healthy."""
        if service.llm.llm.engine.error is not None and not service.is_draining:
            raise errors.unavailable(service.llm.llm.engine.error)
        return Response()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are taken."""
        service.check_ready()
        return Response()

    @app.get("/version")
    async def told_version() -> dict[str, str]:
        return {"version": __version__, "system_fingerprint": service.llm.llm.fingerprint}

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
    body = await read(service, request, kind)
    headers = unread(body)
    job = await service.begin(body, body.request_id or request.state.request_id)
    if body.stream:
        return EventResponse(events(service, job), partial(service.end, job), headers)
    return await answered(service, request, job, service.whole(job), headers)


async def _tokenize(service: Service, request: Request) -> Response:
    body = await read(service, request, TokenizeBody)
    check_model(body.model, service.names)
    tokenizer = service.llm.llm.tokenizer
    if body.prompt is None or body.messages is not None:
        ids = await service.prompt_ids(body.chat())
    else:
        check_size("prompt", len(body.prompt), "characters", service.config.max_prompt_chars)
        ids = await service.llm.encode(partial(tokenizer.encode, body.prompt, body.add_special_tokens))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.llm.llm.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        answer["token_strs"] = await service.llm.encode(lambda: [decode([i]) for i in ids])
    return JSONResponse(answer, headers=unread(body))


async def _detokenize(service: Service, request: Request) -> Response:
    body = await read(service, request, DetokenizeBody)
    check_model(body.model, service.names)
    size = service.llm.llm.model_config.vocab_size
    check_size("tokens", len(body.tokens), "entries", service.config.max_prompt_chars)
    for token in body.tokens:
        if not 0 <= token < size:
            raise ValueError(f"tokens: id {token:.6g}: ids go from 0 to {size - 1}")
    tokenizer = service.llm.llm.tokenizer
    text = await service.llm.encode(partial(tokenizer.decode, body.tokens, skip_special_tokens=False))
    return JSONResponse({"prompt": text}, headers=unread(body))


def _answer_errors(app: FastAPI) -> None:
    """Answer every error with an object that OpenAI's (or Messages') clients read."""

    def told(request: Request, refusal: RefusalError) -> Response:
        return JSONResponse(refusal.body_for(request.url.path), refusal.status, headers=refusal.headers)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusalError)
        return told(request, error)

    async def wrong_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, ValidationError)
        return told(request, errors.of_body(error))

    async def wrong_value(request: Request, error: Exception) -> Response:
        assert isinstance(error, ValueError)
        return told(request, errors.of_value(error))

    async def closed(request: Request, error: Exception) -> Response:
        return told(request, errors.unavailable(str(error)))

    async def wrong_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path:.80}: {error.detail}"
        return told(request, RefusalError(error.status_code, message, headers=error.headers))

    async def broken(request: Request, error: Exception) -> Response:
        message = f"internal error: {type(error).__name__}"
        return told(request, RefusalError(500, message, headers={"Connection": "close"}))  # uvicorn closes it

    async def left(_: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    app.add_exception_handler(RefusalError, refused)
    app.add_exception_handler(ValidationError, wrong_body)
    app.add_exception_handler(ValueError, wrong_value)
    app.add_exception_handler(ClosedError, closed)
    app.add_exception_handler(HTTPException, wrong_route)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, broken)
