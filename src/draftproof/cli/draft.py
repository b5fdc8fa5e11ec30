"""`draftproof draft`: what the drafter proposes after a prompt, next to the target's own tokens."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from draftproof.cli import options
from draftproof.cli.prompts import read_prompts

EXAMPLES = """\b
Examples:
  draftproof draft "def add(a, b):"
  draftproof draft "for i in range(" -k 8
  draftproof draft --chat "What is 12 * 7?" --json
  draftproof draft "x = [1, 2, 3, 1, 2," --model Qwen/Qwen3-0.6B --speculative-config ngram
"""


@click.command(epilog=EXAMPLES)
@click.argument("prompt", required=False)
@click.option("--prompt-file", help="Take the first prompt of this file.")
@click.option(
    "-k", "count", type=click.IntRange(1, 64), default=5, show_default=True, help="Number of drafts."
)
@click.option("--chat", is_flag=True, help="Ask the prompt under the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.engine_flags
def command(
    prompt: str | None,
    prompt_file: str | None,
    count: int,
    chat: bool,
    as_json: bool,
    engine: dict[str, Any],
) -> int:
    """Show the tokens that the drafter proposes after PROMPT and the target's greedy token.

    The table shows the target's greedy continuation beside them; drafts are accepted up to the first that differs.
    """
    engine = options.with_drafter(engine)
    if "speculative_config" not in engine:
        raise ValueError("--speculative-config: name the drafter, such as ngram or a directory")
    engine["speculative_config"] = {"num_speculative_tokens": count, **engine["speculative_config"]}
    asked = read_prompts(prompt, prompt_file, 1)[0]
    llm = options.make_llm(engine)
    ids = asked.token_ids(llm.tokenizer, chat)
    greedy = dataclasses.replace(
        llm.default_sampling_params(), temperature=0.0, n=1, max_tokens=count + 1, ignore_eos=True
    )
    output = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)[0]
    if output.error:
        raise ValueError(output.error)
    first, *target = output.outputs[0].token_ids
    drafts = llm.draft(ids, count, next_token=first)
    accepted = num_accepted(drafts, target)

    def text(token_id: int) -> str:
        return llm.tokenizer.decode([token_id], skip_special_tokens=False)

    if as_json:
        record = {"next_token": first, "drafts": drafts, "target": target, "num_accepted": accepted}
        click.echo(json.dumps(record))
        return 0
    rows = [(d, text(d), t, text(t)) for d, t in zip(drafts, target, strict=False)]
    _print_table(first, text(first), rows, accepted)
    click.echo(
        f"{accepted} of {len(drafts)} drafts would be accepted" if drafts else "the drafter proposes nothing"
    )
    return 0


def num_accepted(drafts: list[int], target: list[int]) -> int:
    """Number of leading drafts that the target agrees with."""
    agree = [draft == said for draft, said in zip(drafts, target, strict=False)]
    return agree.index(False) if False in agree else len(agree)


def _print_table(first: int, first_text: str, rows: list[tuple[int, str, int, str]], accepted: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for name in ("position", "drafter", "target", "accepted"):
        table.add_column(name, justify="right" if name == "position" else "left")
    table.add_row("0", "", f"{first} {escape(repr(first_text))}", "")
    for i, (draft, draft_text, target, target_text) in enumerate(rows):
        verdict = "yes" if i < accepted else "no"
        ours, theirs = (f"{n} {escape(repr(s))}" for n, s in ((draft, draft_text), (target, target_text)))
        table.add_row(str(i + 1), ours, theirs, verdict, style="green" if i < accepted else None)
    options.print_table(table)
