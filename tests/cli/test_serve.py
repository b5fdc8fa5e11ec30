"""`draftproof serve`: what reaches the engine and the server."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli.main import main
from draftproof.server import run
from draftproof.server.settings import ServerConfig
from tests.cli.fake_llm import Engines


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The settings of servers that would have been started."""
    configs: list[ServerConfig] = []
    monkeypatch.setattr(run, "serve", lambda llm, config: configs.append(config))
    return configs


def test_flags_reach_engine_and_server(engines: Engines, served: list[ServerConfig]) -> None:
    arguments = ["--speculative-config", "ngram", "--port", "9", "--api-key", "a", "--api-key", "b"]
    assert main(["serve", "m", *arguments]) == 0
    assert engines[0].engine == {"model": "m", "speculative_config": {"method": "ngram"}}
    assert served == [ServerConfig(port=9, api_key=["a", "b"])]
    assert served[0].host == "127.0.0.1"


def test_the_embedded_model_has_its_drafter(engines: Engines, served: list[ServerConfig]) -> None:
    assert main(["serve"]) == main(["serve", "--no-speculation"]) == 0
    assert Path(engines[0].engine["speculative_config"]["model"]).is_dir()
    assert engines[1].engine == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--model", "n"], "MODEL='m' and --model='n': give only one of them"),
        (["--port", "70000"], "port=70000: must be an integer from 0 to 65535"),
        (["--max-choices", "0"], "max_choices=0: "),
        (["--ssl-keyfile", "key.pem"], "ssl_certfile=None, ssl_keyfile='key.pem': https needs both"),
        (["--api-key", ""], "api_key='': must not be empty"),
    ],
)
def test_wrong_input_is_told(
    engines: Engines,
    served: list[ServerConfig],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not served


def test_a_missing_extra_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "error: serve: uvicorn missing; pip install 'draftproof[serve]'\n"
