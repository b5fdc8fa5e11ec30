"""Flags that commands share: one for each field of EngineConfig and SamplingParams, generated from the fields."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from draftproof import assets
from draftproof.config import EngineConfig
from draftproof.server.settings import ServerConfig
from draftproof.train.settings import AnswerConfig, HeadConfig
from draftproof.types import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from draftproof.frontend.llm import LLM

EMBEDDED_DRAFTER = "tiny-eagle3"
SMOLLM2_DRAFTER = "smollm2-eagle3"  # the asset "smollm2-dflash" fits, too
LEAST = 1e-9  # the smallest number that counts as above 0
F = TypeVar("F", bound=Callable[..., Any])

# A command's own defaults by field. None: the flag does not apply, and is hidden.
OwnDefaults = Mapping[str, int | None]
_NO_DEFAULTS: OwnDefaults = MappingProxyType({})


def engine_flags(function: F, own: OwnDefaults = MappingProxyType({})) -> F:
    """Give a command one flag for each field of EngineConfig; given flags are passed as the dict `engine`."""
    return _flags(EngineConfig, "engine", function, own)


def sampling_flags(function: F, own: OwnDefaults = MappingProxyType({})) -> F:
    """Give a command one flag for each field of SamplingParams; given flags are passed as `sampling`."""
    return _flags(SamplingParams, "sampling", function, own)


def server_flags(function: F) -> F:
    """Give a command one flag for each field of ServerConfig; given flags are passed as `server`."""
    return _flags(ServerConfig, "server", function, MappingProxyType({}))


def train_flags(function: F) -> F:
    """Give a command one flag for each field of AnswerConfig and HeadConfig; given flags are passed as `answers` and
    `head`."""
    return _flags(AnswerConfig, "answers", _flags(HeadConfig, "head", function, _NO_DEFAULTS), _NO_DEFAULTS)


def _flags(config: Any, into: str, function: F, own: OwnDefaults) -> F:
    """One click option for each field of the dataclass `config` that has a help text."""
    fields = [field for field in dataclasses.fields(config) if "help" in field.metadata]

    @functools.wraps(function)
    def command(**kwargs: Any) -> Any:
        given = {field.name: kwargs.pop(field.name) for field in fields}
        given = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items() if v not in (None, ())}
        return function(**{into: given}, **kwargs)

    wrapped: Any = command
    kinds = typing.get_type_hints(config)
    for field in reversed(fields):
        name = field.name
        default = own.get(name, field.default)
        hidden = name in own and default is None
        wrapped = _option(name, kinds[name], field.metadata["help"], default, hidden=hidden)(wrapped)
    return cast(F, wrapped)


def _option(name: str, kind: Any, text: str, default: object, *, hidden: bool) -> Callable[[F], F]:
    """The click option of one field of type `kind`. Its default is only shown; the library applies it."""
    flag = "--" + name.replace("_", "-")
    kinds = {kind, *typing.get_args(kind)}
    if isinstance(default, (bool, int, float, str)):
        text = f"{text} [default: {_shown(default)}]"
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text, hidden=hidden)
    form: Any = str
    if typing.get_origin(kind) is typing.Literal:
        form = click.Choice(typing.get_args(kind))
    elif name in SPECIAL:
        form = SPECIAL[name]
    elif kinds & {int, Sequence[int]}:
        form = int
    elif float in kinds:
        form = float
    many = bool(kinds & {Sequence[int], Sequence[str]})
    return click.option(flag, name, type=form, default=None, multiple=many, help=text, hidden=hidden)


def _shown(default: object) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


class JsonType(click.ParamType[Any]):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, Mapping):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r}: not valid JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value!r}: must be a JSON object", param, ctx)
        return parsed


class DrafterType(JsonType):
    """A JSON object, a directory (`{"model": ...}`) or a method's name (`{"method": ...}`)."""

    name = "json|method|directory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            is_model = "/" in value or Path(value).is_dir()
            return {"model": value} if is_model else {"method": value}
        return super().convert(value, param, ctx)


class NumbersType(click.ParamType[Any]):
    """Numbers separated by commas; `positive`: all above 0."""

    name = "n,n,..."

    def __init__(self, kind: type[int] | type[float], *, positive: bool = False) -> None:
        self.kind = kind
        self.positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            numbers = [self.kind(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r}: must be numbers separated by commas, such as 1,8", param, ctx)
        if self.positive and not all(number >= LEAST for number in numbers):
            assert param is not None, "only flags have this type"
            raise ValueError(f"{param.opts[0]} {value}: must be above 0")
        return numbers


class ListType(click.ParamType[Any]):
    """Words separated by commas; with `choices`, only these."""

    name = "word,word,..."

    def __init__(self, *choices: str) -> None:
        self.choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        words = value.split(",")
        for word in words:
            if self.choices and word not in self.choices:
                self.fail(f"{word!r}: must be one of {', '.join(self.choices)}", param, ctx)
        return words


SPECIAL: dict[str, click.ParamType[Any]] = {
    "hf_overrides": JsonType(),
    "speculative_config": DrafterType(),
    "logit_bias": JsonType(),
    "kv_events_config": JsonType(),
    "allowed_media_domains": ListType(),
}


def with_drafter(engine: Mapping[str, Any], speculation: bool = True) -> dict[str, Any]:
    """The engine's flags; if neither drafter nor model is named, with the default model's own drafter, else n-gram."""
    chosen = dict(engine)
    if not speculation:
        if "speculative_config" in chosen:
            raise ValueError("--no-speculation and --speculative-config: give only one of them")
    elif "model" not in chosen:
        default = assets.default_model()
        own = {"method": "ngram"}
        if default.is_embedded or default.is_packaged:
            own = {"model": str(assets.path(EMBEDDED_DRAFTER if default.is_embedded else SMOLLM2_DRAFTER))}
        chosen.setdefault("speculative_config", own)
    return chosen


def is_embedded(engine: Mapping[str, Any]) -> bool:
    """Whether no model is named and the default is the embedded one."""
    return "model" not in engine and assets.default_model().is_embedded


def apart(engine: Mapping[str, Any]) -> dict[str, Any]:
    """`with_drafter`, and a draft head given as the model becomes the drafter of the target that it names: for
    commands that run the target alone, too."""
    from draftproof.engine.loading.locate import locate
    from draftproof.frontend.llm import show_progress

    chosen = with_drafter(engine)
    given = EngineConfig.from_kwargs(**chosen)
    config, directory = locate(given, show_progress)
    if config is not given and config.speculative_config is not None:
        drafter = {**chosen.get("speculative_config", {}), "model": config.speculative_config.model}
        chosen |= {"model": str(directory), "speculative_config": drafter}
    return chosen


def without_drafter(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of an engine that decodes plainly."""
    return {name: value for name, value in engine.items() if name != "speculative_config"}


def make_llm(engine: Mapping[str, Any]) -> LLM:
    """The engine; torch and the model are first loaded here. Prints, once per command, the default model's name if none
    is given, the memory used, and whether drafts are predicted to pay."""
    from draftproof.engine.reporting import speculation_line
    from draftproof.frontend.llm import LLM

    if "model" not in engine:
        default = assets.default_model()
        _tell(default.note or f"model: {default.name}")
        engine = {**engine, "model": default.where}
    llm = LLM(**engine)
    _tell(str(llm.memory))
    if llm.stats.predictions:
        _tell(speculation_line(llm.stats.predictions))
    return llm


def _tell(line: str) -> None:
    """Write a line to standard error, once per command."""
    context = click.get_current_context(silent=True)
    told: set[str] = set() if context is None else context.meta.setdefault(f"{__name__}.told", set())
    if line not in told:
        click.echo(line, err=True)
    told.add(line)


def make_params(llm: LLM, sampling: Mapping[str, Any]) -> SamplingParams:
    """The model's own defaults, overridden by the given flags."""
    return dataclasses.replace(llm.default_sampling_params(), **sampling)


def use_color(wanted: bool | None) -> bool:
    """Whether to colour: as requested, else on a terminal unless NO_COLOR is set."""
    if wanted is not None:
        return wanted
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal; without one, uncut."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(table)
