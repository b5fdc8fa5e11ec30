"""`draftproof serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import click

from draftproof.cli import options
from draftproof.server.settings import ServerConfig

EXAMPLES = """\b
Examples:
  draftproof serve
  draftproof serve Qwen/Qwen3-0.6B --speculative-config ngram
  draftproof serve TARGET --speculative-config '{"model": "HEAD", "num_speculative_tokens": 5}' --api-key SECRET
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def f(", "max_tokens": 32}'
"""
NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@click.command(epilog=EXAMPLES)
@click.argument("target", metavar="[MODEL]", required=False)
@click.option("--no-speculation", is_flag=True, help="Decode the default model without a drafter.")
@options.server_flags
@options.engine_flags
def command(target: str | None, no_speculation: bool, engine: dict[str, Any], server: dict[str, Any]) -> None:
    """Serve MODEL, or the default one, over OpenAI's API until Ctrl-C.

    Answers to a seed are those of LLM.generate, whoever else is being served, and with any drafter.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve: {', '.join(missing)} missing; pip install 'draftproof[serve]'")
    if target is not None:
        if "model" in engine:
            raise ValueError(f"MODEL={target!r} and --model={engine['model']!r}: give only one of them")
        engine["model"] = target
    config = ServerConfig(**server)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from draftproof.server.run import serve

    serve(options.make_llm(options.with_drafter(engine, not no_speculation)), config)
