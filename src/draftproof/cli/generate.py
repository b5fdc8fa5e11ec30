"""`draftproof generate`: one prompt streamed, or many at once, as text or JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from draftproof.cli import options
from draftproof.cli.prompts import Prompt, read_prompts
from draftproof.cli.stream import write_stream
from draftproof.frontend.painter import Painter
from draftproof.types import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from draftproof.frontend.llm import LLM

EXAMPLES = """\b
Examples:
  draftproof generate "def fibonacci(n):" --max-tokens 64 --temperature 0
  echo "import numpy" | draftproof generate
  draftproof generate --chat "What is 12 * 7?" --stop $'\\n'
  draftproof generate --prompt-file humaneval.jsonl --json > outputs.jsonl
  draftproof generate "x = " --model Qwen/Qwen3-0.6B --speculative-config ngram
  draftproof generate "x = " --model TARGET --speculative-config '{"model": "HEAD", "num_speculative_tokens": 5}'
"""


@click.command(epilog=EXAMPLES)
@click.argument("prompt", required=False)
@click.option(
    "--prompt-file", help="File with one prompt per line, or .jsonl with prompt, messages, turns or question."
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the file's first prompts.")
@click.option("--chat", is_flag=True, help="Ask the prompt as a user's message, under the chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per prompt, with ids and statistics."
)
@click.option(
    "--color/--no-color", default=None, help="Colour accepted draft tokens. [default: on a terminal]"
)
@click.option("--no-speculation", is_flag=True, help="Decode without a drafter.")
@options.sampling_flags
@options.engine_flags
def command(
    prompt: str | None,
    prompt_file: str | None,
    limit: int | None,
    chat: bool,
    as_json: bool,
    color: bool | None,
    no_speculation: bool,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> int:
    """Complete PROMPT, every prompt of a file, or standard input.

    One prompt is streamed; accepted draft tokens show in another colour. Sampling flags that are not given are
    the model's own defaults.
    """
    prompts = read_prompts(prompt, prompt_file, limit)
    chosen = options.with_drafter(engine, not no_speculation)
    if no_speculation and "model" in chosen:
        chosen = options.without_drafter(options.apart(chosen))
    llm = options.make_llm(chosen)
    params = options.make_params(llm, sampling)
    if len(prompts) == 1 and params.n == 1 and not as_json:
        return _stream(llm, prompts[0], chat, params, options.use_color(color))
    inputs = [p.for_llm(llm.tokenizer, chat) for p in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=len(prompts) > 1 and sys.stderr.isatty())
    for asked, output in zip(prompts, outputs, strict=True):
        if as_json:
            click.echo(json.dumps(as_record(asked, output), ensure_ascii=False))
        else:
            _print_text(asked, output, titled=len(prompts) > 1)
    failed = [(asked, output.error) for asked, output in zip(prompts, outputs, strict=True) if output.error]
    for asked, error in failed:
        print(f"error: prompt {asked.id}: {error}", file=sys.stderr)
    return 1 if failed else 0


def _stream(llm: LLM, prompt: Prompt, chat: bool, params: SamplingParams, color: bool) -> int:
    ids = prompt.token_ids(llm.tokenizer, chat)
    painter = Painter(llm.tokenizer, ids, params.skip_special_tokens) if color else None
    last = write_stream(llm.stream({"prompt_token_ids": ids}, params), painter)
    if last is not None and last.finish_reason == "error":
        print("error: the output ended early", file=sys.stderr)
        return 1
    return 0


def _print_text(asked: Prompt, output: RequestOutput, titled: bool) -> None:
    if titled:
        click.secho(f"== {asked.id}: {asked.title}", bold=True)
    for choice in output.outputs:
        if len(output.outputs) > 1:
            click.secho(f"-- choice {choice.index}", dim=True)
        click.echo(choice.text)


def as_record(asked: Prompt, output: RequestOutput) -> dict[str, Any]:
    """One line of JSON output."""
    record = dataclasses.asdict(output)
    record["id"] = asked.id
    speculation = output.metrics.speculation
    record["metrics"]["speculation"]["acceptance_length"] = speculation.acceptance_length
    return record
