"""Routes for agents: OpenAI's Responses and Anthropic's Messages, both translated to a chat request."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftproof.server import conversation
from draftproof.server.answering import Answer, answered, post, read, unread
from draftproof.server.conversation import Writer
from draftproof.server.messages import CountBody, MessagesBody, MessageWriter
from draftproof.server.protocol import check_model
from draftproof.server.response_events import ResponseWriter
from draftproof.server.responses import ResponsesBody, ResponseStore
from draftproof.server.service import Job, Service
from draftproof.server.streaming import EventResponse

NO_SUCH: dict[int | str, dict[str, Any]] = {status: {"description": "refused"} for status in (401, 404)}


def add_agent_routes(app: FastAPI, service: Service) -> None:
    """Add both APIs; stored responses live as long as the application."""
    store = ResponseStore(service.config)
    post(app, "/v1/responses", ResponsesBody, partial(_respond, service, store))
    post(app, "/v1/messages", MessagesBody, partial(_message, service))
    post(app, "/v1/messages/count_tokens", CountBody, partial(_count, service))

    @app.get("/v1/responses/{response_id}", responses=NO_SUCH, response_model=None)
    async def response(response_id: str) -> Response:
        return Answer(store.get(response_id).response)

    @app.delete("/v1/responses/{response_id}", responses=NO_SUCH, response_model=None)
    async def delete(response_id: str) -> dict[str, Any]:
        store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}


async def _respond(service: Service, store: ResponseStore, request: Request) -> Response:
    body = await read(service, request, ResponsesBody)
    headers = unread(body)
    previous = body.previous_response_id
    before = store.get(previous, "previous_response_id").items if previous else ()
    job = await service.begin(body.chat(before), body.request_id or request.state.request_id)
    head = service.head(job, "response")
    writer = ResponseWriter(body, head, [*before, *body.items], store)
    return await _answer(service, request, job, writer, headers)


async def _message(service: Service, request: Request) -> Response:
    body = await read(service, request, MessagesBody)
    headers = unread(body)
    job = await service.begin(body.chat(), body.request_id or request.state.request_id)
    writer = MessageWriter(job.model, job.params.seed)
    return await _answer(service, request, job, writer, headers)


async def _answer(
    service: Service, request: Request, job: Job, writer: Writer, headers: dict[str, str]
) -> Response:
    """A job's answer as `writer` formats it, streamed or whole."""
    if job.body.stream:
        return EventResponse(conversation.events(service, job, writer), partial(service.end, job), headers)
    return await answered(service, request, job, conversation.whole(service, job, writer), headers)


async def _count(service: Service, request: Request) -> Response:
    body = await read(service, request, CountBody)
    check_model(body.model, service.names)
    ids = await service.prompt_ids(body.chat())
    return JSONResponse({"input_tokens": len(ids)}, headers=unread(body))
