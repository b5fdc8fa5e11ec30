"""Logits of MTP heads in the speculators format against the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.drafters.forced import module_steps
from tests.drafters.heads import Pair, close


def steps(pair: Pair, state_TH: Tensor, shift: int = 1) -> list[tuple[Tensor, Tensor]]:
    return module_steps(pair, state_TH, *pair.io["logits_steps"].shape[:2], shift)


def test_every_step_gives_the_reference_logits() -> None:
    pair = Pair("mtp", "target_qwen3")
    (tap,) = pair.taps()
    close(tap, pair.io["last_prenorm_raw"], 1e-5)
    for (hidden, _), expected in zip(steps(pair, tap), pair.io["logits_steps"], strict=True):
        close(pair.head.logits(hidden), expected)


@pytest.mark.parametrize("mistake", ["token not shifted", "state after the norm", "feedback before the norm"])
def test_the_reference_tells_a_mistake(mistake: str) -> None:
    """Each mistake changes the logits by more than the tolerance, so the test above detects it."""
    pair = Pair("mtp", "target_qwen3")
    (tap,) = pair.taps()
    shift = 1
    if mistake == "token not shifted":
        shift = 0
    elif mistake == "state after the norm":
        tap = pair.target._norms[-1](tap)
    else:
        pair.run = before_the_norm(pair)  # type: ignore[method-assign]
    done = steps(pair, tap, shift)
    found = [
        (pair.head.logits(h) - io).abs().max()
        for (h, _), io in zip(done, pair.io["logits_steps"], strict=True)
    ]
    assert max(found) > 1e-3


def before_the_norm(pair: Pair) -> Callable[..., tuple[Tensor, Tensor]]:
    """The pair's `run`, feeding back the input of the final norm."""
    run, norm = pair.run, pair.head.network.norm  # type: ignore[attr-defined]
    kept: list[Tensor] = []
    add = norm.add

    class Spy:
        def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            kept.append(x + residual)
            return add(x, residual)

    pair.head.network.norm = Spy()  # type: ignore[attr-defined]

    def run_and_spoil(*given: Any) -> tuple[Tensor, Tensor]:
        hidden, _ = run(*given)
        return hidden, kept[-1]

    return run_and_spoil
