"""The bodies of requests, and their translation for the engine. Field names are OpenAI's, beyond them vLLM's."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from draftproof.frontend.images import is_image
from draftproof.frontend.input_processor import Prompt
from draftproof.frontend.llm import LLM
from draftproof.schema import shown, words
from draftproof.server.errors import RefusalError
from draftproof.server.parsers import told
from draftproof.server.settings import ServerConfig
from draftproof.server.structured import GUIDED, rule_asked
from draftproof.types import RequestHints, SamplingParams

# Fields of other servers that would change the answer, so they are refused and not ignored.
NOT_SERVED: Mapping[str, frozenset[str]] = {
    "tools are those of chats, in `tools`": words("tools functions function_call"),
    "there is neither infilling nor beam search": words("suffix use_beam_search"),
    "prompts and answers are text or token ids": words("audio prompt_embeds"),
    "tools are the client's": words("web_search_options"),
    "prompts are not cut": words("truncate_prompt_tokens"),
    "nothing is kept here but answers of /v1/responses": words("conversation container mcp_servers"),
}
NOTHING_ASKED: tuple[object, ...] = (None, False, "", [], {}, {"type": "text"})
SHOWN_NAME = re.compile(r"[^\w.-]", re.ASCII)
MOST_NAMES_SHOWN = 16


def _numbers(given: Any) -> Any:
    """Check that a mapping's values are numbers; anything but a mapping is left to pydantic. ValueError names the first
    other value."""
    for name, value in given.items() if isinstance(given, dict) else ():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{shown(name)}: {shown(value)}: must be a number")
    return given


# Reading stops at the first wrong entry: reporting a million of them takes a thousand times as long as reading them.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]
# Fields of a body that `SamplingParams` has under the same names.
SAMPLING = words(
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids "
    "ignore_eos min_tokens prompt_logprobs skip_special_tokens include_stop_str_in_output bad_words "
    "allowed_token_ids logit_bias"
)


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage and no choices. `include_drafts`: chunks say how many drafts their
    step verified, and which stretches of its text were drafted."""

    model_config = ConfigDict(strict=True)
    include_usage: bool = False
    include_drafts: bool = False


class Speculation(BaseModel):
    """`num_speculative_tokens`: the most drafts a round for this request; "auto": as the engine does. `method`: the
    drafter of a chain that proposes for it. Changes speed only."""

    model_config = ConfigDict(strict=True, extra="forbid")
    num_speculative_tokens: int | Literal["auto"] = "auto"
    method: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """ValueError names the first unknown field."""
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(
                    f"{shown(name)}: there is no such field; there are {', '.join(cls.model_fields)}"
                )
        return given


class Function(BaseModel):
    """A function that the model may call; `parameters`: JSON schema of its arguments."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool of a chat."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True)]


class Body(BaseModel):
    """A body whose unknown fields are accepted, and of whose known ones the types must be right."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None

    def unknown_fields(self) -> str:
        """Names of ignored fields, for a header; empty if there are none. ValueError for fields that ask for something
        that is not served."""
        given = self.model_extra or {}
        for why, refused in NOT_SERVED.items():
            for name in sorted(refused):
                if given.get(name) not in NOTHING_ASKED:
                    raise ValueError(f"{name}: is not served: {why}; leave it out")
        names = [SHOWN_NAME.sub("?", name[:64]) or "?" for name in islice(given, MOST_NAMES_SHOWN)]
        more = f", and {len(given) - MOST_NAMES_SHOWN} more" if len(given) > MOST_NAMES_SHOWN else ""
        return ", ".join(names) + more


class GenerationBody(Body):
    """Fields that chats and completions share. None: the model's own default."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    logit_bias: Numbers | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: str | None = Field(default=None, max_length=256)
    speculation: Speculation | None = None
    priority: int | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    @property
    def shows_drafts(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_drafts

    @property
    def max_num_tokens(self) -> int | None:
        """The most output tokens; None: up to the model's length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives beside each token; None: no log-probabilities are wanted."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own tokens are part of the answer, with their log-probabilities."""
        return False

    @property
    def num_prompts(self) -> int:
        raise NotImplementedError

    def prompts(self, llm: LLM) -> list[Prompt]:
        """The `num_prompts` prompts for the engine."""
        raise NotImplementedError

    @property
    def num_chars(self) -> int:
        """Number of characters that will be tokenized."""
        raise NotImplementedError

    def params(self, defaults: SamplingParams, limits: ServerConfig) -> SamplingParams:
        """The sampling parameters. A request without a seed is given one, so that its answer can be reproduced.
        ValueError names field, value and what is allowed."""
        self.check_limits(limits)
        if self.stream and self.prompt_logprobs is not None and not self.scores_prompt:
            raise ValueError(
                f"prompt_logprobs={self.prompt_logprobs}: streams have none; leave stream out, or ask a completion for "
                "echo and logprobs"
            )
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        given.setdefault("seed", secrets.randbits(53))  # exact in a double, which JSON's readers use
        given |= {"max_tokens": self.max_num_tokens, "logprobs": self.num_logprobs}
        guided = {name: getattr(self, name) for name in GUIDED if getattr(self, name) is not None}
        given["structured_outputs"] = rule_asked(
            self.response_format, self.structured_outputs, guided, limits
        )
        if self.scores_prompt:
            given.setdefault("prompt_logprobs", self.num_logprobs)
        return dataclasses.replace(defaults, **given)

    @property
    def form_field(self) -> str:
        """Name of the field that asks for structured output."""
        names = ("structured_outputs", "response_format", *GUIDED)
        return next((name for name in names if getattr(self, name) not in (None, {"type": "text"})), "tools")

    def check_limits(self, limits: ServerConfig) -> None:
        """ValueError for a field beyond its limit."""
        what = "messages" if isinstance(self, ChatBody) else "prompt"
        check_size(what, self.num_chars, "characters", limits.max_prompt_chars)
        for name in ("stop", "bad_words"):
            value = getattr(self, name) or []
            listed = [value] if isinstance(value, str) else value
            check_size(name, len(listed), "entries", limits.max_stop_strings)
            check_size(name, sum(map(len, listed)), "characters", limits.max_stop_chars)
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            check_size(name, len(getattr(self, name) or ()), "entries", limits.max_listed_ids)
        for name, number in (("logprobs", self.num_logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if number is not None and number > limits.max_logprobs:
                raise ValueError(f"{name}={number}: must be at most {limits.max_logprobs}")

    @property
    def hints(self) -> RequestHints:
        """Hints that change the answer's speed only."""
        asked = self.speculation or Speculation()
        wanted = None if asked.num_speculative_tokens == "auto" else asked.num_speculative_tokens
        return RequestHints(num_speculative_tokens=wanted, method=asked.method, priority=self.priority or 0)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Objects
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return []
        return self.tools or [] if self._allowed is None else self._named(self._allowed.get("tools"))

    @property
    def required(self) -> list[Tool]:
        """The tools of which one must be called; empty: calling is optional."""
        if self._allowed is not None:
            mode = self._allowed.get("mode", "auto")
            if mode not in ("auto", "required"):
                raise ValueError(f"tool_choice: mode={shown(mode)}: must be auto or required")
            return self.offered if mode == "required" else []
        if self.tool_choice in (None, "none", "auto"):
            return []
        if isinstance(self.tool_choice, dict):
            return self._named([self.tool_choice])
        return self.tools or self._named([])

    @property
    def _allowed(self) -> dict[str, Any] | None:
        """The object of an "allowed_tools" choice, in the chat or the Responses format; None for other choices."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return None
        inner = choice.get("allowed_tools", choice)
        return inner if isinstance(inner, dict) else {}

    def _named(self, choices: Any) -> list[Tool]:
        """The named tools. ValueError if one is not among `tools`, or none is named."""
        tools = {tool.function.name: tool for tool in self.tools or ()}
        listed = [_chosen_name(choice) for choice in choices] if isinstance(choices, list) else []
        if not tools:
            raise ValueError(f"tool_choice={shown(self.tool_choice)}: needs `tools`, of which there are none")
        if not listed or any(name not in tools for name in listed):
            raise ValueError(
                f"tool_choice={shown(self.tool_choice)}: must be auto, none, required, or functions of `tools` by name"
            )
        return [tools[str(name)] for name in dict.fromkeys(listed)]

    @property
    def calls_once(self) -> bool:
        """Whether at most one tool may be called."""
        is_one = isinstance(self.tool_choice, dict) and self._allowed is None
        return self.parallel_tool_calls is False or is_one

    @property
    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise ValueError(f"top_logprobs={self.top_logprobs}: needs logprobs=true; set it")
            return None
        return self.top_logprobs or 0

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_chars(self) -> int:
        texts = [part for message in self.messages for part in _texts(message)]
        return sum(len(str(part)) for part in (*texts, *(self.tools or ())))

    def prompts(self, llm: LLM) -> list[Prompt]:
        """The conversation's prompt. ValueError if the chat template rejects it."""
        messages = [_for_template(message, f"messages[{i}]") for i, message in enumerate(self.messages)]
        template = llm.tokenizer.chat_template()
        given = {**self._effort(template), **self._template()}
        if told.is_told(template):
            messages = told.as_text(messages, given.pop("tools", ()))
        return [llm.chat_prompt(messages, **given)]

    def _effort(self, template: str) -> dict[str, Any]:
        """The chat template's arguments for the reasoning effort, under the names that this template uses."""
        if self.reasoning_effort is None:
            return {}
        thinks = self.reasoning_effort != "none"
        named: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            named["reasoning_effort"] = self.reasoning_effort
        words = set(re.findall(r"\w+", template))
        return {name: value for name, value in named.items() if name in words}

    def _template(self) -> dict[str, Any]:
        """The chat template's other arguments."""
        given = dict(self.chat_template_kwargs or {})
        for name in ("chat_template", "tokenize"):
            if name in given:  # a template is code, which only the model may supply
                raise ValueError(f"chat_template_kwargs: {name}: cannot be set by a request; leave it out")
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.offered:
            given["tools"] = [tool.model_dump(exclude_none=True) for tool in self.offered]
        return given


def _chosen_name(choice: Any) -> str | None:
    """The name of the function that a choice names, in the chat or the Responses format."""
    found = choice.get("function", choice) if isinstance(choice, dict) else None
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def _texts(message: Mapping[str, Any]) -> list[Any]:
    """The parts of a message that count towards `num_chars`; images count only as bytes of the body."""
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return [message]
    return [{**message, "content": None}, *(part for part in content if not is_image(part))]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def _holds_several(self) -> bool:
        """Whether `prompt` is a list of prompts; a list of token ids is one prompt."""
        return isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)

    @property
    def num_prompts(self) -> int:
        return len(self.prompt) if self._holds_several else 1

    @property
    def num_chars(self) -> int:
        given: Any = self.prompt if self._holds_several else [self.prompt]
        return sum(len(prompt) for prompt in given if isinstance(prompt, str))

    def prompts(self, llm: LLM) -> list[Prompt]:
        """The prompts as given: text or token ids."""
        given: Any = self.prompt
        return list(given) if self._holds_several else [given]


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation."""

    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool = False

    def chat(self) -> ChatBody:
        """The chat whose prompt is to be tokenized. ValueError if a text is given too, or neither."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        names = (
            "messages",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
            "tools",
        )
        return ChatBody.model_validate({name: getattr(self, name) for name in names})


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: Ids


def _for_template(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as chat templates expect it: call arguments as objects, reasoning under the templates' key."""
    reasoning = message.get("reasoning")
    if isinstance(reasoning, str):
        message = {"reasoning_content": reasoning, **message}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls={shown(calls)}: must be a list of calls")
    return {
        **message,
        "tool_calls": [_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)],
    }


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}={shown(call)}: must have a function with a name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: arguments={shown(arguments)}: must be a JSON object") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments={shown(arguments)}: must be a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def check_model(name: str | None, served: list[str]) -> str:
    """The model name for the answer: the request's, which must be served, or else the first served one."""
    if name is not None and name not in served:
        raise RefusalError(
            404,
            f"model={name!r:.120}: is not served here; there is {', '.join(served)}",
            param="model",
            code="model_not_found",
        )
    return name or served[0]


def check_size(name: str, size: int, what: str, most: int) -> None:
    """ValueError if `size` exceeds `most`."""
    if size > most:
        raise ValueError(f"{name}: has {size} {what}, at most {most}")
