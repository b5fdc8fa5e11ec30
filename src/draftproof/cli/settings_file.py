"""A file of flags: `--config FILE`, YAML with a key for each flag. Flags on the command line take precedence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from draftproof.cli.options import F, JsonType
from draftproof.schema import did_you_mean, shown


def config_option() -> Callable[[F], F]:
    """The flag `--config`, for a command whose other flags the file may set."""
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read,
        help="YAML file with a key for each flag, as in 'port: 80'. Flags win over it.",
    )


def _read(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Make the file's values the command's defaults."""
    if path is None:
        return
    options = {p.name: p for p in ctx.command.params if isinstance(p, click.Option) and p.name != param.name}
    values: dict[str, Any] = {}
    for key, value in load(path).items():
        name = str(key).replace("-", "_")
        if name not in options:
            known = sorted(str(one).replace("_", "-") for one in options if one)
            hint = did_you_mean(str(key).replace("_", "-"), known) or f"known: {', '.join(known)}"
            raise ValueError(f"--config {path}: unknown key {shown(key)}: {hint}")
        if name in values:
            raise ValueError(f"--config {path}: {key}: is there twice; leave one out")
        if value is not None:
            values[name] = _as_flag(options[name], value, f"--config {path}: {key}={shown(value)}")
    ctx.default_map = values


def load(path: Path) -> Mapping[Any, Any]:
    """The file's keys and values. ValueError if it cannot be read or is not a mapping."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: cannot be read as YAML: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(f"--config {path}: must hold keys and values, as in 'port: 80', not {shown(found)}")
    return found


def _as_flag(option: click.Option, value: Any, where: str) -> Any:
    """A value in the form that the flag takes on the command line, so that it is checked the same way."""
    if isinstance(value, Mapping):
        if not isinstance(option.type, JsonType):
            raise ValueError(f"{where}: must be one value")
        return value
    if isinstance(value, list):
        if not option.multiple:
            raise ValueError(f"{where}: must be one value")
        return [_text(one, where) for one in value]
    text = _text(value, where)
    return [text] if option.multiple else text


def _text(value: Any, where: str) -> str:
    if isinstance(value, (list, Mapping)) or value is None:
        raise ValueError(f"{where}: must hold single values")
    return str(value).lower() if isinstance(value, bool) else str(value)
