"""The objects that users pass in and get back, under vLLM's names and defaults."""

from __future__ import annotations

import functools
import json
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from draftproof.metrics import DrafterStats, SpeculationStats
from draftproof.schema import check_flag, check_whole, documented, reject_unknown_keys, shown

INT32_MAX = 2**31 - 1
MOST_LOGPROBS = 1024  # alternatives per token
FinishReason = Literal["stop", "length", "abort", "error"]
T = TypeVar("T")
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


def _names_known(cls: type[T]) -> type[T]:
    """A dataclass whose constructor raises ValueError for an unknown name and suggests the nearest field."""
    init: Any = cls.__init__

    @functools.wraps(init)
    def construct(self: T, *args: Any, **given: Any) -> None:
        reject_unknown_keys(cls.__name__, given, [f.name for f in fields(cls)])  # type: ignore[arg-type]
        init(self, *args, **given)

    cls.__init__ = construct  # type: ignore[assignment]
    return cls


@_names_known
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output, given by exactly one rule; names are vLLM's.

    Rules: `json`, a schema as a dict or as text; `regex`; `choice`, one of several texts; `grammar`, Lark or GBNF;
    `json_object`, any object; `structural_tag`, free text in which a trigger starts a part that follows a schema.

    In JSON output a single space may follow a comma or a colon, and there is no other whitespace between tokens.
    `whitespace_pattern` is a regex for the whitespace allowed instead; `disable_any_whitespace` allows none.
    `disable_additional_properties`: objects have only the named properties, unless the schema says otherwise.
    `after_token_id`: the rule applies to what follows this token's first occurrence in the output, such as the end of a
    reasoning block. ValueError if no rule or several rules are given.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    after_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("json", "structural_tag"):
            object.__setattr__(self, name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={shown(value)}: must be text that is not empty")
        if self.choice is not None:
            listed = list(self.choice) if isinstance(self.choice, (list, tuple)) else []
            if not listed or not all(isinstance(text, str) and text for text in listed):
                raise ValueError(f"choice={shown(self.choice)}: must be a list of texts, none of them empty")
            object.__setattr__(self, "choice", listed)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_flag(name, getattr(self, name))
        if self.json_object is not None:
            check_flag("json_object", self.json_object)
        if self.after_token_id is not None:
            check_whole("after_token_id", self.after_token_id, 0)
        rules = [name for name in RULES if getattr(self, name) not in (None, False)]
        if len(rules) != 1:
            given = f"{', '.join(rules)} are given" if rules else "no rule is given"
            raise ValueError(f"structured_outputs: {given}; give one of {', '.join(RULES)}")


RULES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _json_text(name: str, value: Any) -> str | None:
    """A schema as text, so that later changes to a dict have no effect."""
    if value is None or (isinstance(value, str) and value):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)}: must be a JSON object, or its text")
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: cannot be written as JSON: {error}") from None


@_names_known
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request. Field names and defaults are vLLM's.

    Lists and dicts are copied, so changing them later has no effect. `temperature=0` is greedy. `top_k` 0 or -1,
    `top_p` 1 and `min_p` 0 switch a filter off; ties at a filter's boundary are kept. `seed` None: the row seed comes
    from the engine's seed and the arrival number. Logprobs are natural logarithms of the model's probabilities before
    any processing. Biases are clamped to -100..100, as in vLLM; their token ids may be strings of digits, as in JSON.
    ValueError for values out of range or of the wrong type. With `structured_outputs` the end-of-text token ends the
    output whatever `ignore_eos` says, and a text that is complete and cannot be continued ends it before `min_tokens`.
    """

    n: int = documented(1, "Number of outputs for each prompt.")
    presence_penalty: float = documented(0.0, "Penalty on tokens that occurred in the output.")
    frequency_penalty: float = documented(0.0, "Penalty on tokens for each time they occurred in the output.")
    repetition_penalty: float = documented(
        1.0, "Factor on tokens that occurred in the prompt or output; above 1 discourages them."
    )
    temperature: float = documented(1.0, "0 is greedy.")
    top_p: float = documented(1.0, "Sample from the likeliest tokens that make up this probability.")
    top_k: int = documented(0, "Sample from this many likeliest tokens; 0 for all.")
    min_p: float = documented(0.0, "Drop tokens less likely than this share of the likeliest one.")
    seed: int | None = None  # no help text, so no flag: --seed sets the engine's
    stop: str | Sequence[str] | None = documented(
        None, "End the output before this text; may be given several times."
    )
    stop_token_ids: Sequence[int] | None = documented(
        None, "End the output after this token id; may be given several times."
    )
    ignore_eos: bool = documented(False, "Continue after the end-of-text token.")
    max_tokens: int | None = documented(16, "Maximum length of the output, in tokens.")
    min_tokens: int = documented(0, "Minimum length of the output, in tokens.")
    logprobs: int | None = documented(None, "Return this many log-probabilities for each output token.")
    prompt_logprobs: int | None = documented(
        None, "Return this many log-probabilities for each prompt token."
    )
    detokenize: bool = True  # no flag: the command prints text
    skip_special_tokens: bool = documented(True, "Leave special tokens out of the text.")
    include_stop_str_in_output: bool = documented(False, "Keep the stop text at the end of the output.")
    bad_words: Sequence[str] | None = documented(None, "Never produce this text; may be given several times.")
    allowed_token_ids: Sequence[int] | None = documented(
        None, "Produce only these token ids; may be given several times."
    )
    logit_bias: dict[int, float] | None = documented(
        None, "Added to logits before sampling, from -100 to 100, as JSON: '{\"42\": -5}'."
    )
    structured_outputs: StructuredOutputsParams | None = None  # no flag: a rule has its own fields

    def __post_init__(self) -> None:
        _read_numbers(self)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        _check_lists(self)
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else list(value))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))
        rule: Any = self.structured_outputs
        if isinstance(rule, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**rule))
        elif rule is not None and not isinstance(rule, StructuredOutputsParams):
            raise ValueError(
                f"structured_outputs={shown(rule)}: must be a StructuredOutputsParams, or a dict"
            )

    def clone(self) -> SamplingParams:
        """A copy."""
        return replace(self)

    @property
    def stop_strings(self) -> list[str]:
        return list(self.stop or ())


# The range of each numeric field: name, lowest, highest, the range in words.
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("n", 1, 1024, "from 1 to 1024"),
    ("presence_penalty", -2, 2, "between -2 and 2"),
    ("frequency_penalty", -2, 2, "between -2 and 2"),
    ("repetition_penalty", 1e-6, 1e6, "greater than 0 and at most 1000000"),
    ("temperature", 0, 1e6, "from 0 (greedy) to 1000000"),
    ("top_p", 1e-9, 1, "greater than 0 and at most 1"),
    ("top_k", -1, INT32_MAX, f"from 1 to {INT32_MAX}, or 0 or -1 to switch it off"),
    ("min_p", 0, 1, "between 0 and 1"),
    ("seed", -math.inf, math.inf, "of any size"),
    ("max_tokens", 1, math.inf, "of at least 1"),
    ("min_tokens", 0, INT32_MAX, f"from 0 to {INT32_MAX}"),
    ("logprobs", 0, MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}"),
    ("prompt_logprobs", 0, MOST_LOGPROBS, f"between 0 and {MOST_LOGPROBS}"),
)


def _read_numbers(p: SamplingParams) -> None:
    """Convert NumPy's numbers to Python's. ValueError names the field, its value and the allowed range."""
    kinds = {f.name: str(f.type) for f in fields(p)}
    for name, low, high, words in _RANGES:
        value: Any = getattr(p, name)
        if value is None and "None" in kinds[name]:
            continue
        integral = "int" in kinds[name]
        kind: Any = numbers.Integral if integral else numbers.Real
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            what = "an integer" if integral else "a number"
            raise ValueError(f"{name}={shown(value)}: must be {what} {words}")
        if type(value) not in (int, float):
            object.__setattr__(p, name, int(value) if integral else float(value))
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ValueError(f"min_tokens={p.min_tokens}: must not exceed max_tokens={p.max_tokens}")


def _check_lists(p: SamplingParams) -> None:
    """Raise ValueError for fields that must be lists and are not, and for entries of the wrong type."""
    for name, kind in (
        ("stop", str),
        ("bad_words", str),
        ("stop_token_ids", int),
        ("allowed_token_ids", int),
    ):
        value = getattr(p, name)
        if value is not None and (
            isinstance(value, (str, bytes))
            or not isinstance(value, Collection)
            or any(not isinstance(x, kind) or isinstance(x, bool) or x == "" for x in value)
        ):
            what = "strings, none of them empty" if kind is str else "token ids"
            raise ValueError(f"{name}={value!r:.80}: must be a list of {what}")


def _read_bias(bias: Mapping[Any, float]) -> dict[int, float]:
    """`logit_bias` with token ids as integers (JSON has strings) and values clamped to -100..100."""
    values = bias.values() if isinstance(bias, Mapping) else [None]
    if not all(isinstance(v, numbers.Real) and not isinstance(v, bool) and v == v for v in values):
        raise ValueError(
            f"logit_bias={bias!r:.80}: must be a dict of token ids and numbers, which are cut to -100..100"
        )
    return {
        int(token) if isinstance(token, str) and token.isdecimal() else token: float(min(max(v, -100), 100))
        for token, v in bias.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHints:
    """What a request may ask for besides its parameters. Hints affect when its tokens come, never which tokens.

    num_speculative_tokens: the most drafts per round; None: the engine's setting. method: the drafter of a chain that
    proposes for this request; None: the best one so far. priority: waiting requests are admitted in ascending order;
    running requests are not preempted for it.
    """

    num_speculative_tokens: int | None = None
    method: str | None = None
    priority: int = 0


@dataclass(slots=True)
class Logprob:
    """One entry of a logprobs dictionary; `rank` 1 is the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request, with the output so far."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds. `speculation` and `drafters` (one entry per drafter) sum over the request's choices."""

    speculation: SpeculationStats
    first_token_latency: float = 0.0
    num_preemptions: int = 0
    queue_seconds: float = 0.0
    num_cached_tokens: int = 0
    drafters: list[DrafterStats] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, as in vLLM."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None


@dataclass(slots=True)
class Delta:
    """The tokens and text that one step added to one choice: the unit of `LLM.stream`.

    `accepted[i]` says whether `token_ids[i]` was an accepted draft token. `logprobs`: one dict per token if the request
    asked for them. `stop_reason` as in `CompletionOutput`; `error` explains a `finish_reason` of "error".
    `num_drafted`: drafts that the step verified; None if the step was not a round, such as the end of a prompt.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    accepted: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    num_drafted: int | None = None
