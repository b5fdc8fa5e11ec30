"""`draftproof certify`: its table, its exit status, and that it can say no."""

from __future__ import annotations

import json

import pytest

from draftproof.cli.main import main
from draftproof.engine import certificates
from draftproof.kernels.exactness import OperatorCertifier
from tests.slow import slow


def lines_of(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


@slow
def test_every_operator_and_product_is_listed_and_what_is_used_is_exact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["certify", "--json"]) == 0
    lines = lines_of(capsys.readouterr().out)
    operators = {line["operator"] for line in lines}
    assert {
        "rms_norm",
        "add_rms_norm",
        "rope_store",
        "attention",
        "silu_mul",
        "sample",
        "product",
    } <= operators
    shapes = {(line["operator"], line["shape"]) for line in lines}
    used = {(line["operator"], line["shape"]) for line in lines if line["used"]}
    assert used == shapes
    assert all(line["exact"] == 1 for line in lines if line["used"] and line["operator"] != "product")
    assert all(line["microseconds"] > 0 for line in lines)  # type: ignore[operator]
    assert len({line["version"] for line in lines if line["operator"] == "attention"}) >= 4


@slow
def test_an_operator_without_an_exact_version_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = OperatorCertifier.verdict

    def verdict(self: OperatorCertifier, case: object, name: str, version: object) -> bool:
        if getattr(case, "operator", "") == "silu_mul":
            return False
        return original(self, case, name, version)  # type: ignore[arg-type]

    monkeypatch.setattr(OperatorCertifier, "verdict", verdict)
    assert main(["certify"]) == 1
    shown = capsys.readouterr().out
    assert "no exact version here: silu_mul" in shown and "NOT exact" in shown


@slow
def test_what_is_used_is_what_an_engine_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's operators alone, and the first attention refused."""
    from draftproof import LLM
    from draftproof.attention.chunked import PRODUCTS, ChunkedAttention
    from draftproof.config import EngineConfig

    original = OperatorCertifier.verdict

    def verdict(self: OperatorCertifier, case: object, name: str, version: object) -> bool:
        return name != "sdpa" and original(self, case, name, version)  # type: ignore[arg-type]

    monkeypatch.setattr(OperatorCertifier, "verdict", verdict)
    lines = certificates.survey(EngineConfig.from_kwargs(native=False)).lines
    used = {line.version for line in lines if line.operator == "attention" and line.used}
    assert len(used) == 1 and used <= {"chunked", "elementwise"}
    backend = LLM(native=False).engine.runner.backend
    assert isinstance(backend, ChunkedAttention)
    assert (backend.products is PRODUCTS) == (used == {"chunked"})


@slow
def test_overrides_of_the_config_are_certified(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--hf-overrides", '{"num_attention_heads": 2}', "--json"]) == 0
    lines = lines_of(capsys.readouterr().out)
    assert all(str(line["shape"]).startswith("2/2 of") for line in lines if line["operator"] == "attention")


def test_a_model_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "here", "--model", "there"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "./no/such/folder"]) == 2
    assert "no/such/folder" in capsys.readouterr().err
