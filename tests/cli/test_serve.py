"""`draftproof serve`: what reaches the engine and the server."""

from __future__ import annotations

import importlib.util
import socket
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
    monkeypatch.setattr(run, "check_address", lambda config: None)  # others may listen at the default one
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


def test_a_port_that_is_taken_is_told_before_a_model_is_read(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"port={port}: nothing can listen there: Address already in use" in capsys.readouterr().err
    assert main(["serve", "--host", "203.0.113.7"]) == 2
    assert "host='203.0.113.7', port=8000: nothing can listen there" in capsys.readouterr().err
    assert not engines


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


FILE = """\
model: m
port: 80
api-key: [a, 7]
served_model_name: one
max-num-seqs: 3
speculative-config: {method: ngram, num_speculative_tokens: 2}
enforce-eager: true
client-timeout: 1e1
kv-offload:
"""


def test_a_file_sets_flags_and_flags_win(
    engines: Engines, served: list[ServerConfig], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(FILE.replace("kv-offload", "tokenizer"))
    assert main(["serve", "--config", str(file)]) == 0
    drafter = {"method": "ngram", "num_speculative_tokens": 2}
    told = {"model": "m", "max_num_seqs": 3, "speculative_config": drafter, "enforce_eager": True}
    assert engines[0].engine == told
    own = {"api_key": ["a", "7"], "served_model_name": ["one"], "client_timeout": 10.0}
    assert served[0] == ServerConfig(port=80, **own)
    flags = ["--port", "9", "--api-key", "b", "--no-enforce-eager", "--speculative-config", "suffix"]
    assert main(["serve", "other", *flags, "--config", str(file)]) == 0
    changed = {"model": "other", "speculative_config": {"method": "suffix"}, "enforce_eager": False}
    assert engines[1].engine == told | changed
    assert served[1] == ServerConfig(port=9, **own | {"api_key": ["b"]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prt: 80", "unknown key 'prt': did you mean 'port'?"),
        ("max_num_seq: 8", "unknown key 'max_num_seq': did you mean 'max-num-seqs'?"),
        ("config: x", "unknown key 'config': "),
        ("port: 8000.5", "'8000.5' is not a valid integer"),
        ("port: true", "'true' is not a valid integer"),
        ("port: [1, 2]", "port=[1, 2]: must be one value"),
        ("host: {a: b}", "host={'a': 'b'}: must be one value"),
        ("api-key: [[a]]", "api-key=[['a']]: must hold single values"),
        ("port: 99999", "port=99999: must be an integer from 0 to 65535"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max_num_seqs: is there twice"),
        ("port: [", "cannot be read as YAML"),
        ("!!python/object:os.system {}", "cannot be read as YAML"),
        ("just words", "must hold keys and values"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(
    engines: Engines,
    served: list[ServerConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    message: str,
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    assert main(["serve", "--config", str(file)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not served


def test_a_file_that_is_not_there_is_told(
    engines: Engines, served: list[ServerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", "missing.yaml"]) == 2
    assert "missing.yaml: cannot be read" in capsys.readouterr().err
