"""The forecast of an engine's memory that is logged before loading."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from draftproof import LLM
from draftproof.models.decoder import Decoder

PATTERN = r"weights of about (.*?) MiB, .* are free; .* about (\d+) tokens of [48] KiB: (\d+) requests of"


def told(caplog: pytest.LogCaptureFixture) -> tuple[float, int, int]:
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("to load: ")]
    found = re.search(PATTERN, line)
    assert found is not None, line
    return float(found[1]), int(found[2]), int(found[3])


SETTINGS = [({}, 5), ({"num_kv_blocks": 65}, 2)]


@pytest.mark.parametrize(("settings", "num_requests"), SETTINGS)
def test_what_is_told_beforehand_comes_true(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], num_requests: int
) -> None:
    caplog.set_level(logging.INFO)
    with LLM(dtype="float32", max_model_len=512, max_num_seqs=5, **settings) as llm:
        weights, num_tokens, requests = told(caplog)
        assert weights == pytest.approx(llm.memory.weights / 2**20, rel=0.05)
        assert requests == num_requests and num_tokens >= llm.memory.kv_tokens
        assert "num_kv_blocks" not in settings or num_tokens == llm.memory.kv_tokens == 1024


def test_compressed_weights_are_told_as_they_will_be_held(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with LLM(dtype="bfloat16", max_model_len=512, max_num_seqs=5, device="cpu") as llm:
        assert told(caplog)[0] == pytest.approx(llm.memory.weights / 2**20, rel=0.03)


def test_it_is_told_before_weights_are_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ValueError("no weights today")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Decoder, "load", load)
    with pytest.raises(ValueError, match="no weights today"):
        LLM(dtype="float32", max_model_len=512)
    assert told(caplog)[1] > 0
