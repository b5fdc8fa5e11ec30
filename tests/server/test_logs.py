"""The server's log."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from draftproof.server import logs
from tests.server.running import drafting, local

TEXT = "/v1/completions"


def test_lines_of_requests_have_their_ids(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with local(drafting()) as (client, _):
            forged = {"prompt": "x", "max_tokens": 1, "request_id": "a\nERROR all is lost"}
            asked = {"good": {"prompt": "x", "max_tokens": 3}, "bad": {"prompt": 5}, "forged": forged}
            for request_id, body in asked.items():
                await client.post(TEXT, json=body, headers={"X-Request-Id": request_id})

    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(logs.JsonFormatter())
    asyncio.run(main())
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    own = [line for line in lines if line["logger"].startswith("draftproof.server")]
    told = {line["request_id"]: line for line in own}
    good, bad = told["good"], told["bad"]
    assert (good["id"], good["completion_tokens"], good["finish_reasons"]) == ("cmpl-good", 3, "length")
    assert good["level"] == "INFO" and good["message"].startswith("cmpl-good: 1 prompt tokens, 3 tokens")
    assert told["forged"]["message"].startswith("cmpl-a\\nERROR all is lost: 1 prompt tokens"), (
        "it is one line"
    )
    assert (bad["status"], bad["path"], bad["method"]) == (400, TEXT, "POST")


def test_a_line_stays_one_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    logs.configure("json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("some").exception('it said "no"\n\x00')
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["message"] == 'it said "no"\n\x00' and "ValueError: two\nlines" in told["error"]
    assert told["logger"] == "some" and "request_id" not in told
