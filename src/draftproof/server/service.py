"""Serves a request, from its validated body to its answer, for all routes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from draftproof import assets
from draftproof.frontend.async_llm import AnswerStream, AsyncLLM, together
from draftproof.schema import shown
from draftproof.server import answers, errors
from draftproof.server.errors import RefusalError
from draftproof.server.limits import Admission, Ticket, within
from draftproof.server.logs import FACTS
from draftproof.server.meter import Meter
from draftproof.server.parsers import NONE, Parser, Syntax, reasoning
from draftproof.server.parsers.forms import call_grammar
from draftproof.server.protocol import ChatBody, CompletionBody, check_model
from draftproof.server.settings import ServerConfig
from draftproof.server.structured import told_of
from draftproof.types import RequestOutput, SamplingParams, StructuredOutputsParams

log = logging.getLogger(__name__)
LAST = 16  # tokens at a prompt's end that may hold the marker which begins reasoning
STEP_GRACE = 5  # seconds that the current step has to end at shutdown
FINISHED = "%s: %d prompt tokens, %d tokens, %d of them drafted, %s, %.3f s"
AnyBody = ChatBody | CompletionBody


@dataclass(slots=True)
class Job:
    """One request that is being served, with a stream for each of its prompts. `id`: id of the answer."""

    id: str
    body: AnyBody
    model: str
    params: SamplingParams
    ticket: Ticket
    streams: list[AnswerStream] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)


def _token_ids(prompt: Any) -> Sequence[int]:
    """The token ids of a chat's prompt, with one placeholder per image."""
    found: Sequence[int] = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
    return found


class Service:
    """Serves requests with one engine: admission, parameters, streams, answers and metrics."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        given, default = llm.llm.config.model, assets.default_model()
        own_name = default.served_name if given is None or given == default.where else given
        self.names = list(config.served_model_name) or [own_name]
        self.admission = Admission(config)
        self.meter = Meter(llm, self.admission, config.metrics_prefix, self.names[0])
        self.defaults = llm.llm.default_sampling_params()
        self.is_draining = False
        self.has_chat_template = False
        self.syntax = self._warm_up()

    def _warm_up(self) -> Syntax:
        """How the model writes calls and reasoning. Renders a chat, since the first use of a chat template imports
        transformers, for which the first request should not wait."""
        template = ""
        with contextlib.suppress(ValueError):  # no tokenizer, or no template
            self.llm.llm.tokenizer.chat([{"role": "user", "content": "Hi"}])
            template = self.llm.llm.tokenizer.chat_template()
        self.has_chat_template = bool(template)
        return Syntax(template, self.config.tool_call_parser, self.config.reasoning_parser)

    @property
    def abilities(self) -> dict[str, Any]:
        """The model's abilities, for clients: the longest prompt and answer, chats, images, drafts."""
        llm = self.llm.llm
        reads_images = llm.requests.inputs.images is not None
        drafts = {
            "num_speculative_tokens": llm.num_speculative_tokens,
            "methods": llm.requests.inputs.methods,
        }
        return {
            "max_model_len": llm.max_model_len,
            "has_chat_template": self.has_chat_template,
            "input_modalities": ["text", "image"] if reads_images else ["text"],
            "speculation": drafts,
        }

    def parser(self, job: Job) -> Parser | None:
        """A parser for one answer of a job; None if the answer is plain text."""
        body = job.body
        if not isinstance(body, ChatBody) or not self._needs_parser(body):
            return None
        schemas = {tool.function.name: tool.function.parameters for tool in body.offered}
        begins_inside = self._begins_inside(job.streams[0].prompt_token_ids)
        most = 1 if body.calls_once else None
        return Parser(self.syntax, schemas or None, begins_inside=begins_inside, most_calls=most)

    def _begins_inside(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether an answer begins inside reasoning, because its prompt ends with the marker that opens it."""
        markers = reasoning.PAIRS.get(self.syntax.reasoning)
        if markers is None:
            return False
        end = self.llm.llm.tokenizer.decode(prompt_token_ids[-LAST:], skip_special_tokens=False)
        return end.rstrip().endswith(markers[0])

    def _ruled(
        self, body: ChatBody, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> SamplingParams:
        """`params` with the grammar of required tool calls, if any; grammars apply after the reasoning at an answer's
        start. ValueError if no grammar can be made."""
        rule = self._calls(body, params) if body.required else params.structured_outputs
        if rule is not None and rule.after_token_id is None and self._begins_inside(prompt_token_ids):
            end = reasoning.PAIRS[self.syntax.reasoning][1]
            token_id = self.llm.llm.tokenizer.token_id(end)
            if token_id is None:
                raise ValueError(
                    f"structured_outputs: reasoning comes first, and {end!r} is no token of this model's"
                )
            rule = replace(rule, after_token_id=token_id)
        return replace(params, structured_outputs=rule)

    def _calls(self, body: ChatBody, params: SamplingParams) -> StructuredOutputsParams:
        """The grammar of an answer that must call a tool."""
        told = f"tool_choice={shown(body.tool_choice)}"
        if params.structured_outputs is not None:
            raise ValueError(f"{told}: the answer's form is given too; give one of them")
        if self.syntax.form is None:
            raise ValueError(
                f"{told}: is not served: the model's chat template has no form of {self.syntax.tools}'s; give \"auto\""
            )
        schemas = {tool.function.name: tool.function.parameters for tool in body.required}
        tokenizer = self.llm.llm.tokenizer

        def special_id(marker: str) -> int | None:
            return tokenizer.token_id(marker) if tokenizer.is_special_text(marker) else None

        grammar = call_grammar(self.syntax.form, schemas, special_id, is_single=body.calls_once)
        if len(grammar) > self.config.max_grammar_chars:
            raise ValueError(
                f"tools: are a grammar of {len(grammar)} characters, at most "
                f"max_grammar_chars={self.config.max_grammar_chars}"
            )
        return StructuredOutputsParams(grammar=grammar)

    def _needs_parser(self, body: ChatBody) -> bool:
        """Whether a parser is needed. ValueError for tools if this model's calls cannot be told from text."""
        if body.offered and self.syntax.tools == NONE:
            raise ValueError(
                "tools: is not served: calls could not be told from text; name a syntax that the model writes with "
                "--tool-call-parser, or leave it out"
            )
        return bool(body.offered) or self.syntax.reasoning != NONE

    def _shows_markers(self, params: SamplingParams) -> SamplingParams:
        """`params`, with special tokens kept in the text if they mark calls or reasoning."""
        tokenizer = self.llm.llm.tokenizer
        is_marked = any(map(tokenizer.is_special_text, self.syntax.markers))
        return replace(params, skip_special_tokens=False) if is_marked else params

    def check_ready(self) -> None:
        """Raise a 503 if the engine computes nothing any more."""
        why = "the server is shutting down" if self.is_draining else self.llm.error
        if why is not None:
            raise errors.unavailable(why)

    async def shut_down(self, patience: float | None = None) -> None:
        """End the engine; `patience` as in `AsyncLLM.shutdown`, None: `shutdown_timeout`."""
        self.is_draining = True
        await self.llm.shutdown(self.config.shutdown_timeout if patience is None else patience, STEP_GRACE)

    async def begin(self, body: AnyBody, request_id: str) -> Job:
        """Admit a request and start its streams; the caller must `end` the job. Raises RefusalError and ValueError."""
        self.check_ready()
        name = check_model(body.model, self.names)
        params = body.params(self.defaults, self.config)
        if isinstance(body, ChatBody) and self._needs_parser(body):
            params = self._shows_markers(params)
        num_outputs = params.n * body.num_prompts
        if num_outputs > self.config.max_choices:
            raise ValueError(
                f"n={params.n}: of {body.num_prompts} prompts are {num_outputs} outputs, of at most "
                f"max_choices={self.config.max_choices}; ask for less"
            )
        kind = "chatcmpl" if isinstance(body, ChatBody) else "cmpl"
        job = Job(f"{kind}-{request_id}", body, name, params, self.admission.enter(num_outputs))
        try:
            await self._start(job)
        except BaseException:
            self.end(job)
            self.check_ready()  # if the engine has ended meanwhile, a 503 says why
            raise
        return job

    async def _start(self, job: Job) -> None:
        work = partial(job.body.prompts, self.llm.llm)
        limit = self.config.chat_template_timeout
        prompts = await self.llm.encode(partial(within, limit, work) if job.is_chat else work)
        prompts = [await self.llm.fetch(prompt) for prompt in prompts]
        if isinstance(job.body, ChatBody):
            job.params = self._ruled(job.body, job.params, _token_ids(prompts[0]))
        try:
            await self.llm.compile(job.params, self.config.grammar_timeout)
        except ValueError as error:
            raise told_of(job.body.form_field, error) from None
        given = [await self.llm.prepare(prompt, job.params, job.body.hints) for prompt in prompts]
        num_tokens = sum(len(one.prompt_token_ids) for one in given)
        self.admission.add_tokens(job.ticket, job.params.n * num_tokens)
        for one in given:
            job.streams.append(self.llm.begin(one))

    async def prompt_ids(self, chat: ChatBody) -> Sequence[int]:
        """The token ids of a conversation, with one per row of an image; computes no answer. Errors as in `begin`."""
        chat.check_limits(self.config)
        work = partial(chat.prompts, self.llm.llm)
        (prompt,) = await self.llm.encode(partial(within, self.config.chat_template_timeout, work))
        if not isinstance(prompt, dict):
            return _token_ids(prompt)
        fetched = await self.llm.fetch(prompt)
        return (await self.llm.prepare(fetched, SamplingParams(max_tokens=1))).prompt_token_ids

    def end(self, job: Job) -> None:
        """Release what a job holds and abort its running streams. Idempotent."""
        for stream in job.streams:
            stream.close()
            self.meter.forget(stream)
        self.admission.leave(job.ticket)

    async def whole(self, job: Job) -> dict[str, Any]:
        """The complete answer; ends the job."""
        outputs = await self.complete(job)
        if job.params.logprobs is None and job.params.prompt_logprobs is None:
            return self._answer(job, outputs)
        return await self.llm.aside(partial(self._answer, job, outputs))  # not in the event loop

    async def complete(self, job: Job) -> list[RequestOutput]:
        """All outputs of a job; ends it. RefusalError if one of them failed or was aborted."""
        try:
            async for number, delta in together(job.streams, self.config.keep_alive_interval):
                if delta is not None:
                    self.meter.came(job.streams[number])
            outputs = self.outputs(job)
        finally:
            self.end(job)
        for output in outputs:
            if output.error is not None:
                raise RefusalError(500, output.error, code="engine_error")
            if any(choice.finish_reason in ("abort", None) for choice in output.outputs):
                raise errors.unavailable("the server is shutting down")
        return outputs

    def _answer(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The JSON object of a whole answer."""
        choices = [
            self._choice(job, i * job.params.n, output, choice.index)
            for i, output in enumerate(outputs)
            for choice in output.outputs
        ]
        kind = "chat.completion" if job.is_chat else "text_completion"
        answer = {**self.head(job, kind), "choices": choices, "usage": self.usage(job, outputs)}
        if job.is_chat:
            answer["prompt_logprobs"] = answers.prompt_logprobs(outputs[0])
            if job.body.return_token_ids:
                answer["prompt_token_ids"] = outputs[0].prompt_token_ids
        return answer | self.metrics(job, outputs)

    def head(self, job: Job, kind: str) -> dict[str, Any]:
        """The first fields of an answer and of each of its chunks."""
        return {
            "id": job.id,
            "object": kind,
            "created": job.created,
            "model": job.model,
            "system_fingerprint": self.llm.llm.fingerprint,
            "seed": job.params.seed,
        }

    def outputs(self, job: Job) -> list[RequestOutput]:
        """The outputs of a job's finished streams."""
        outputs = [self.llm.output(stream) for stream in job.streams]
        for stream, output in zip(job.streams, outputs, strict=True):
            self.meter.finished(stream, output)
        self._log(job, outputs)
        return outputs

    def usage(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The usage object of an answer."""
        markers = reasoning.PAIRS.get(self.syntax.reasoning)
        if markers is None or not job.is_chat:
            return answers.usage(outputs)
        begins_inside = self._begins_inside(job.streams[0].prompt_token_ids)
        decode = partial(self.llm.llm.tokenizer.decode, skip_special_tokens=False)
        written = [choice.token_ids for output in outputs for choice in output.outputs]
        num_reasoning = sum(reasoning.num_tokens(ids, markers, begins_inside, decode) for ids in written)
        return answers.usage(outputs, num_reasoning)

    def metrics(self, job: Job, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Times and acceptance, under their key in the answer's object; empty for several outputs."""
        if len(outputs) != 1:
            return {}
        found = answers.metrics(job.streams[0], outputs[0], self.llm.llm.num_speculative_tokens)
        return {} if found is None else {"metrics": found}

    def echoed(self, job: Job, prompt_ids: Sequence[int]) -> str | None:
        """The prompt's text if the answer repeats it (`echo`), else None."""
        if not isinstance(job.body, CompletionBody) or not job.body.echo:
            return None
        return self.llm.llm.tokenizer.decode(prompt_ids)

    def prompt_logprobs(self, stream: AnswerStream) -> dict[str, Any] | None:
        """A prompt's log-probabilities in the completions format; None if the request ended before they were known."""
        ids, found = stream.prompt_token_ids, self.llm.output(stream).prompt_logprobs or []
        if len(found) < len(ids):
            return None
        return answers.text_logprobs(ids, found, first=self.llm.llm.tokenizer.piece(ids[0]))

    def _choice(self, job: Job, first: int, output: RequestOutput, index: int) -> dict[str, Any]:
        """One choice of a whole answer; `first`: index of the first choice of its prompt."""
        choice, ids = output.outputs[index], output.prompt_token_ids
        if job.is_chat:
            made = answers.chat_choice(choice, job.body.num_logprobs, self.parser(job))
        else:
            piece = self.llm.llm.tokenizer.piece(ids[0]) if job.body.scores_prompt else ""
            made = answers.text_choice(output, choice, self.echoed(job, ids), piece)
            made["prompt_logprobs"] = answers.prompt_logprobs(output)
            if job.body.return_token_ids:
                made["prompt_token_ids"] = ids
        made["index"] = first + index
        if job.body.return_token_ids:
            made["token_ids"] = choice.token_ids
        return made

    def _log(self, job: Job, outputs: Sequence[RequestOutput]) -> None:
        counted = answers.usage(outputs)
        reasons = {str(choice.finish_reason) for output in outputs for choice in output.outputs}
        facts = {
            "id": job.id,
            "prompt_tokens": counted["prompt_tokens"],
            "completion_tokens": counted["completion_tokens"],
            "accepted_tokens": counted["completion_tokens_details"]["accepted_prediction_tokens"],
            "finish_reasons": ", ".join(sorted(reasons)),
            "seconds": max(stream.last - stream.started for stream in job.streams),
        }
        told = {**facts, "id": job.id.encode("unicode_escape").decode()}  # whose end is the client's
        log.info(FINISHED, *told.values(), extra={FACTS: facts})
