"""Compares heads trained for `tiny` with those of golden.json: fp32, greedy, with its prompts, drafts per round and way
of counting.

    python -m bench.trained_heads FOLDER/eagle3 FOLDER/dflash --like tiny-eagle3,tiny-dflash
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from draftproof import assets
from tests.drafters import golden


def row(head: Path, like: str) -> str:
    """A line of the table: tokens per round, and the share of rounds that accepted a first, second, ... draft."""
    wanted = golden.GOLDEN[like]
    llm = golden.drafting(assets.path(assets.TARGET), head, wanted["k"])
    found = golden.acceptance(llm, wanted["k"], wanted["max_new"])
    llm.close()
    shares = (
        " ".join(f"{share:.2f}" for share in of["accepted_per_position"][: wanted["k"]])
        for of in (found, wanted)
    )
    mine, theirs = shares
    return f"| {head.name} | {found['tau_accepted']:.3f} | {mine} | {like} | {wanted['tau_accepted']:.3f} | {theirs} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("heads", nargs="+", type=Path)
    parser.add_argument("--like", required=True, help="the head of golden.json beside each, with commas")
    given = parser.parse_args(argv)
    names = given.like.split(",")
    if len(names) != len(given.heads) or not set(names) <= set(golden.GOLDEN):
        parser.error(f"--like {given.like}: must name one of {', '.join(golden.GOLDEN)} for each head")
    print("| head | tau | accepted at 1, 2, ... | golden.json | tau | accepted at 1, 2, ... |")
    print("|---|---|---|---|---|---|")
    for head, name in zip(given.heads, names, strict=True):
        print(row(head, name), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
