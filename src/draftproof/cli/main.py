"""The command `draftproof`: its subcommands, and the handling of errors and exit statuses."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from draftproof import __version__
from draftproof.schema import did_you_mean

# name -> one line of help; a command's module is imported when it is called
COMMANDS = {
    "demo": "Decode with and without a drafter, compare every token, show the speed.",
    "generate": "Complete one prompt, streaming, or a file of them.",
    "serve": "Serve a model over OpenAI's API; answers do not depend on other requests.",
    "verify": "Prove that output is the same with and without a drafter, on your model and prompts.",
    "certify": "Show which operators and products are exact on this machine, and which are used.",
    "doctor": "Check a model and its drafter, measure both here, and predict the speed-up.",
    "bench": "Measure plain decoding beside speculation: latency, throughput, load at a rate, methods.",
    "train": "Train a draft head for a model, on the model's own answers.",
    "draft": "Show what the drafter would propose after a prompt, beside what the target says.",
}

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

NO_ROOM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)  # raised when writing to a full disk, without a file name


class Commands(click.Group):
    """Commands by name, imported on use so that --help needs neither torch nor a model."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"draftproof.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but suggest the nearest name for an unknown command."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            hint = did_you_mean(name, COMMANDS) or f"known: {', '.join(COMMANDS)}"
            ctx.fail(f"no such command {name!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  draftproof demo
  draftproof generate "def fibonacci(n):" --max-tokens 64
  draftproof generate --chat "What is 12 * 7?"
  draftproof serve Qwen/Qwen3-0.6B --speculative-config ngram
  draftproof verify --model Qwen/Qwen3-0.6B --speculative-config ngram
  draftproof COMMAND --help
""",
)
@click.option("--traceback", is_flag=True, help="On an error, show where it came from.")
@click.version_option(__version__, package_name="draftproof")
def commands(traceback: bool) -> None:
    """Language-model inference whose speculative decoding cannot change the output, bit for bit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 done, 1 negative result, 2 wrong input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _plain_warnings():
            status = commands(args=arguments, prog_name="draftproof", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader has closed the pipe
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in NO_ROOM or "--traceback" in arguments:
            raise
        print(f"error: standard output: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    except ValueError as error:
        if "--traceback" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show this package's own warnings as a sentence, without the line of code that gave them."""
    usual = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(_PACKAGE):
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _drop_output() -> None:
    """Write nothing more to standard output, not even when Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
