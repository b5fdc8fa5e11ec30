"""`draftproof serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
from typing import Any

import click
from click.core import ParameterSource

from draftproof.cli import options
from draftproof.cli.settings_file import config_option
from draftproof.server.settings import ServerConfig

EXAMPLES = """\b
Examples:
  draftproof serve
  draftproof serve Qwen/Qwen3-0.6B --speculative-config ngram
  draftproof serve --config serve.yaml --port 8001
  draftproof serve TARGET --speculative-config '{"model": "HEAD", "num_speculative_tokens": 5}' --api-key SECRET
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def f(", "max_tokens": 32}'
"""
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "yaml")


@click.command(epilog=EXAMPLES)
@click.argument("target", metavar="[MODEL]", required=False)
@click.option("--no-speculation", is_flag=True, help="Decode the default model without a drafter.")
@config_option()
@options.server_flags
@options.engine_flags
def command(target: str | None, no_speculation: bool, engine: dict[str, Any], server: dict[str, Any]) -> None:
    """Serve MODEL, or the default one, over OpenAI's API until Ctrl-C.

    An answer is the one that LLM.generate gives for the same seed, whatever else is being served, and with any drafter.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve: {', '.join(missing)} missing; pip install 'draftproof[serve]'")
    if target is not None:
        source = click.get_current_context().get_parameter_source("model")
        if "model" in engine and source is not ParameterSource.DEFAULT_MAP:
            raise ValueError(f"MODEL={target!r} and --model={engine['model']!r}: give only one of them")
        engine["model"] = target
    config = ServerConfig(**server)
    from draftproof.server import logs
    from draftproof.server.run import check_address, serve

    check_address(config)
    logs.configure(config.log_format)
    serve(options.make_llm(options.with_drafter(engine, not no_speculation)), config)
