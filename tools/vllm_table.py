"""Prints the table of docs/methods.md of what the keys of vLLM's speculative_config become here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from draftproof.drafters.vllm_names import ANY, TABLE, Row

HEAD = ("| key | effect | becomes, or why |", "|---|---|---|")


def lines() -> Iterator[str]:
    """The lines of the table; rows that follow one another and say the same are one line."""
    yield from HEAD
    for _, rows in groupby(TABLE, key=_alike):
        same = list(rows)
        names = ", ".join(_name(row, first=row is same[0]) for row in same)
        yield f"| {names} | {same[0].effect} | {_text(same[0])} |"


def _alike(row: Row) -> tuple[object, ...]:
    return (
        "" if row.value is ANY else row.key,
        row.effect,
        row.becomes if row.effect == "mapped" else (),
        row.why,
    )


def _name(row: Row, *, first: bool) -> str:
    if row.value is ANY:
        return f"`{row.key}`"
    return f'`{row.key}="{row.value}"`' if first else f'`"{row.value}"`'


def _text(row: Row) -> str:
    ours = " or ".join(f"`{name}`" for name in row.becomes) if row.effect == "mapped" else ""
    return ": ".join(part for part in (ours, row.why) if part)


if __name__ == "__main__":
    print("\n".join(lines()))
