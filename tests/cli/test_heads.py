"""Commands given a draft head as the model: the head drafts for the target that it names, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftproof import assets
from draftproof.cli import options
from draftproof.cli.main import main
from tests.slow import slow


@slow
def test_a_head_given_as_the_model_is_verified_against_its_target_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[dict[str, Any]] = []
    make = options.make_llm

    def noting(engine: Any) -> Any:
        built.append(dict(engine))
        return make(engine)

    monkeypatch.setattr(options, "make_llm", noting)
    flags = "--limit 1 --max-tokens 8 --batch-sizes 1 --chunk-sizes 2048 --temperatures 0 --dtype float32"
    assert main(["verify", "--model", str(assets.path("tiny-eagle3")), *flags.split()]) == 0
    plain, drafting = built
    assert plain["model"] == drafting["model"] == str(assets.path("tiny"))
    assert "speculative_config" not in plain and "speculative_config" in drafting
    assert "identical: yes" in capsys.readouterr().out


def test_a_head_given_as_the_model_does_not_draft_where_speculation_is_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = str(assets.path("tiny-eagle3"))
    flags = "--no-speculation --json --max-tokens 6 --temperature 0 --dtype float32"
    assert main(["generate", "def f(", "--model", head, *flags.split()]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["metrics"]["speculation"]["num_draft_tokens"] == 0
