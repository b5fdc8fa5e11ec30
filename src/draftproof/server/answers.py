"""The JSON objects of answers: whole ones and chunks, log-probabilities, usage, speculation metrics."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from draftproof.frontend.async_llm import AnswerStream
from draftproof.metrics import SpeculationStats
from draftproof.server.parsers import Parser
from draftproof.server.parsers.reader import CallArguments, CallStart, Content, Piece, Reasoning
from draftproof.types import CompletionOutput, Delta, Logprob, RequestOutput

LEAST_LOGPROB = -9999.0  # JSON has no infinity
TokenLogprobs = Sequence[Mapping[int, Logprob]]


def as_json(content: object) -> bytes:
    """JSON in UTF-8. Infinities become null: a request may hold 1e400, which JSON's readers make infinite."""
    return to_json(content, inf_nan_mode="null")


def usage(outputs: Sequence[RequestOutput], num_reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's usage object; `num_reasoning`: generated tokens that are reasoning. Rejected drafts are reported, but
    not counted in `completion_tokens`, since they are not part of the answer."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_written = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    drafts = SpeculationStats()
    for output in outputs:
        drafts.add(output.metrics.speculation)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
        "prompt_tokens_details": {"cached_tokens": sum(o.metrics.num_cached_tokens for o in outputs)},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning,
            "accepted_prediction_tokens": drafts.num_accepted_tokens,
            "rejected_prediction_tokens": drafts.num_draft_tokens - drafts.num_accepted_tokens,
        },
    }


def metrics(stream: AnswerStream, output: RequestOutput, most_drafts: int) -> dict[str, Any] | None:
    """vLLM's object of times and acceptance; None for several outputs. `most_drafts`: K, the most drafts per round."""
    if len(output.outputs) != 1:
        return None
    num_tokens = len(output.outputs[0].token_ids)
    seconds = stream.last - stream.first
    return {
        "time_to_first_token_ms": 1000 * (stream.first - stream.started),
        "queue_time_ms": 1000 * output.metrics.queue_seconds,
        "generation_time_ms": 1000 * seconds,
        "mean_itl_ms": 1000 * seconds / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / (stream.last - stream.started) if num_tokens else 0.0,
        "speculative_decoding": speculation(output.metrics.speculation, most_drafts) if most_drafts else None,
    }


def speculation(counted: SpeculationStats, most_drafts: int) -> dict[str, Any]:
    """vLLM's object of acceptance. Like vLLM, it counts only rounds with drafts; `acceptance_histogram[i]`: number of
    these in which i drafts were accepted."""
    drafted, accepted = counted.drafted_per_position, counted.accepted_per_position
    num_steps = drafted[0] if drafted else 0
    at_least = [num_steps, *accepted, *[0] * (most_drafts + 1 - len(accepted))]
    return {
        "mean_acceptance_length": 1 + counted.num_accepted_tokens / num_steps if num_steps else None,
        "draft_acceptance_rate": counted.acceptance_rate if num_steps else None,
        "acceptance_histogram": [at_least[i] - at_least[i + 1] for i in range(most_drafts + 1)],
        "num_accepted_draft_tokens": counted.num_accepted_tokens,
        "num_draft_tokens": counted.num_draft_tokens,
        "num_spec_steps": num_steps,
        "num_spec_tokens": most_drafts,
    }


def chat_logprobs(token_ids: Sequence[int], given: TokenLogprobs, most: int) -> dict[str, Any]:
    """Log-probabilities in the chat format, with the `most` likeliest alternatives of each token."""
    content = []
    for token_id, found in zip(token_ids, given, strict=True):
        best = sorted(found.values(), key=lambda one: one.rank)[:most]
        content.append({**_entry(found[token_id]), "top_logprobs": [_entry(one) for one in best]})
    return {"content": content}


def _entry(one: Logprob) -> dict[str, Any]:
    text = one.decoded_token or ""
    return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode())}


def text_logprobs(
    token_ids: Sequence[int],
    given: Sequence[Mapping[int, Logprob] | None],
    offset: int = 0,
    first: str = "",
) -> dict[str, Any]:
    """Log-probabilities in the completions format. An entry None in `given` is a prompt's first token, which has none;
    its text is `first`. `offset`: where the first token begins in the text, in characters."""
    tokens: list[str] = []
    own: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, found in zip(token_ids, given, strict=True):
        text = first if found is None else found[token_id].decoded_token or ""
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        own.append(None if found is None else _finite(found[token_id].logprob))
        top.append(_alternatives(found))
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _alternatives(found: Mapping[int, Logprob] | None) -> dict[str, float] | None:
    """Log-probabilities by token text; of several tokens with the same text, the likeliest counts."""
    if found is None:
        return None
    named: dict[str, float] = {}
    for one in sorted(found.values(), key=lambda one: one.rank):
        named.setdefault(one.decoded_token or "", _finite(one.logprob))
    return named


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's form: an object for each prompt token, by token id; null for the first."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if found is None
        else {
            str(token): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token, one in found.items()
        }
        for found in output.prompt_logprobs
    ]


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)  # in this order NaN becomes LEAST_LOGPROB, too


def chat_choice(
    choice: CompletionOutput, num_logprobs: int | None, parser: Parser | None = None
) -> dict[str, Any]:
    """One choice of a whole chat answer; `parser`: None if the answer is plain text."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if parser is not None:
        message |= parsed(parser.push(choice.text, is_over=True))
    return {
        "index": choice.index,
        "message": message,
        "logprobs": (
            None
            if num_logprobs is None
            else chat_logprobs(choice.token_ids, choice.logprobs or [], num_logprobs)
        ),
        "finish_reason": finish_reason(choice.finish_reason, parser),
        "stop_reason": choice.stop_reason,
    }


def parsed(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The fields of a message: text, reasoning and tool calls."""
    texts = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append({**call_start(piece), "type": "function"})
        elif isinstance(piece, CallArguments):
            calls[-1]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"content": texts or (None if calls else "")}
    if thoughts:
        message |= {"reasoning": thoughts, "reasoning_content": thoughts}
    return message | ({"tool_calls": calls} if calls else {})


def call_start(piece: CallStart) -> dict[str, Any]:
    """A tool call, its arguments still empty."""
    return {"id": call_id(), "function": {"name": piece.name, "arguments": ""}}


def call_id() -> str:
    """A random id of nine letters and digits, the form that some chat templates require."""
    return secrets.token_hex(5)[:9]


def finish_reason(given: str | None, parser: Parser | None) -> str | None:
    """The finish_reason of a chat's choice: "tool_calls" if it ended normally with calls."""
    return "tool_calls" if given == "stop" and parser is not None and parser.num_calls else given


def piece_delta(piece: Piece, index: int) -> dict[str, Any]:
    """A chunk's delta for a piece of a message; `index`: index of the latest tool call."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    if isinstance(piece, CallStart):
        return {"tool_calls": [{"index": index, **call_start(piece), "type": "function"}]}
    return {"tool_calls": [{"index": index, "function": {"arguments": piece.text}}]}


def text_choice(
    output: RequestOutput, choice: CompletionOutput, echoed: str | None, first: str
) -> dict[str, Any]:
    """One choice of a whole completion; `echoed`: the prompt's text if it is to be repeated in front, and `first` that
    of its first token."""
    token_ids, found = choice.token_ids, choice.logprobs
    if echoed is not None and found is not None:
        token_ids = [*output.prompt_token_ids, *token_ids]
        found = [*(output.prompt_logprobs or []), *found]  # type: ignore[list-item]
    return {
        "index": choice.index,
        "text": (echoed or "") + choice.text,
        "logprobs": None if found is None else text_logprobs(token_ids, found, first=first),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def chat_delta(delta: Delta, num_logprobs: int | None) -> dict[str, Any]:
    """The part of a chat's chunk that holds what a step added."""
    part: dict[str, Any] = {"index": delta.index, "delta": {"content": delta.text}, "finish_reason": None}
    if delta.logprobs is not None and num_logprobs is not None:
        part["logprobs"] = chat_logprobs(delta.token_ids, delta.logprobs, num_logprobs)
    else:
        part["logprobs"] = None
    return part


def text_delta(delta: Delta, offset: int) -> dict[str, Any]:
    """The part of a completion's chunk that holds what a step added; `offset`: where it begins in the text."""
    found = None if delta.logprobs is None else text_logprobs(delta.token_ids, delta.logprobs, offset)
    return {"index": delta.index, "text": delta.text, "logprobs": found, "finish_reason": None}
