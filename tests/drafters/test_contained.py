"""User code cannot change the process's settings for the engine, and sees its own settings."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import overrides
from torch.utils import _python_dispatch

from draftproof import LLM, DraftSpec, EngineConfig, Proposal, Verified
from draftproof.drafters.contained import DrafterError, contained
from draftproof.drafters.users import UsersDrafter
from tests.conformance import faulty


def state() -> dict[str, Any]:
    return {
        "rounding": ctypes.CDLL(None).fegetround(),
        "flushes": float(torch.tensor([1e-40]) * 1) == 0,
        "device": torch.get_default_device(),
        "made on": torch.zeros(1).device,
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
        "modes": list(map(id, overrides._get_current_function_mode_stack())),
        "dispatch": list(map(id, _python_dispatch._get_current_dispatch_mode_stack())),
    }


CHANGES = {kind.__name__: kind.meddle for kind in (*faulty.Meddles.__subclasses__(), faulty.Meddles)}
CHANGES["grad"] = lambda self: torch.set_grad_enabled(False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ours", ["nothing", "a device", "inference mode", "no grad"])
def test_what_was_changed_is_put_back(change: str, ours: str) -> None:
    """Settings that the caller made stay."""
    contexts: dict[str, Any] = {
        "nothing": torch.enable_grad(),
        "a device": torch.device("cpu"),
        "inference mode": torch.inference_mode(),
        "no grad": torch.no_grad(),
    }
    with contexts[ours]:
        before = state()
        with contained():
            CHANGES[change](faulty.Faulty(EngineConfig()))
        assert state() == before
        with pytest.raises(DrafterError, match="RuntimeError: after it"), contained():
            CHANGES[change](faulty.Faulty(EngineConfig()))
            raise RuntimeError("after it")
        assert state() == before


def test_a_default_device_of_the_callers_stays_and_can_be_taken_back() -> None:
    torch.set_default_device("cpu")
    try:
        before = state()
        with contained():
            torch.set_default_device("meta")
        assert state() == before and before["modes"]
    finally:
        torch.set_default_device(None)
    assert not state()["modes"]


@pytest.mark.parametrize(
    "error", [SystemExit(2), GeneratorExit(), StopIteration(), OSError("a\nb"), BaseException()]
)
def test_whatever_is_raised_is_one_kind_of_error(error: BaseException) -> None:
    with pytest.raises(DrafterError) as caught, contained():
        raise error
    assert str(caught.value).startswith(type(error).__name__) and "\n" not in str(caught.value)


class Records:
    """Records the config that it is made with."""

    spec = DraftSpec()
    made: list[EngineConfig] = []  # noqa: RUF012

    def __init__(self, config: EngineConfig) -> None:
        self.made.append(config)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal | list[list[int]]:
        return [[1] * num_drafts for _ in range(verified.num_requests)]


NAME = "tests.drafters.test_contained.Records"
OWN: dict[str, tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]] = {
    "K is resolved": ({"method": NAME, "max_faults": 3}, [(5, {})]),
    "its options": ({"method": NAME, "num_speculative_tokens": 3, "depth": [2]}, [(3, {"depth": [2]})]),
    "each its own in a chain": (
        {
            "method": "chain",
            "max_faults": 3,
            "num_speculative_tokens": 4,
            "drafters": [
                {"method": NAME, "depth": 1},
                {"method": NAME, "num_speculative_tokens": 2, "width": 7},
            ],
        },
        [(4, {"depth": 1}), (2, {"width": 7})],
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_a_users_class_gets_its_own_config(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EngineConfig] = []
    monkeypatch.setattr(Records, "made", made)
    given, expected = OWN[case]
    LLM(dtype="float32", max_model_len=64, speculative_config=given)
    own = [config.speculative_config for config in made]
    assert [(c.num_speculative_tokens, c.options) for c in own if c] == expected
    assert all(c and c.method == NAME and c.max_faults == given.get("max_faults", 8) for c in own)
    assert all(config.max_model_len == 64 for config in made)


SOURCE = """
import torch
torch.set_default_device("meta")
from draftproof import DraftSpec, Proposal
class Drafter:
    spec = DraftSpec()
    def __init__(self, config): torch.set_default_dtype(torch.float64)
    def bind(self, memory): torch.set_default_device("meta")
    def propose(self, verified, num_drafts): return []
"""


def test_what_a_module_a_constructor_and_bind_change_is_put_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meddling_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    before = state()
    LLM(dtype="float32", max_model_len=64, speculative_config={"method": "meddling_module.Drafter"})
    assert state() == before


class SaysNothing:
    spec = DraftSpec()

    def propose(self, verified: Verified, num_drafts: int) -> list[list[int]]:
        return []


@pytest.mark.parametrize("spec", ["reads_ahead=-1", "lookahead=True", "lookahead='far'"])
def test_a_spec_that_makes_no_sense_is_refused(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOURCE.replace("DraftSpec()", f"DraftSpec({spec})")
    (tmp_path / "odd_spec.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_spec", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=f"spec.{spec}: must be an integer from 0"):
        LLM(speculative_config={"method": "odd_spec.Drafter"})


class Silent:
    """A draw that is never used."""

    inputs: tuple[torch.Tensor, ...] = ()

    def over(self, inputs: tuple[torch.Tensor, ...]) -> Silent:
        return self

    def __call__(self, *given: Any) -> torch.Tensor:
        raise AssertionError("nothing is drawn")


def of_requests(num_requests: int) -> Verified:
    some = torch.zeros(num_requests, dtype=torch.int64)
    return Verified(
        tokens_T=some,
        positions_T=some,
        query_start_loc_R1=torch.arange(num_requests + 1),
        slots_R=some,
        live_R=some,
        next_R=some,
        k_R=some,
        taps=(),
        draw=Silent(),
        history=lambda r: some,
    )


@pytest.mark.parametrize(
    ("drafts", "fault"),
    [
        ([["a"]], "a draft is of type str, expected an integer"),
        ([[1, 2.0]], "a draft is of type float, expected an integer"),
        ([[True]], "a draft is of type bool, expected an integer"),
        (None, "propose returned NoneType, not Proposal or a list of lists of ids"),
        ([[1], [2]], "propose returned drafts for 2 requests, expected 1"),
    ],
)
def test_a_wrong_proposal_is_described(monkeypatch: pytest.MonkeyPatch, drafts: object, fault: str) -> None:
    monkeypatch.setattr(SaysNothing, "propose", lambda self, verified, num_drafts: drafts)
    with pytest.raises(DrafterError, match=f"TypeError: {fault}"):
        UsersDrafter(SaysNothing(), "SaysNothing").propose(of_requests(1), 3)


def test_counts_of_no_requests_are_whole_numbers() -> None:
    proposal = UsersDrafter(SaysNothing(), "SaysNothing").propose(of_requests(0), 3)
    assert proposal.count_R.dtype == proposal.tokens_RK.dtype == torch.int64
    assert proposal.count_R.shape == (0,) and proposal.tokens_RK.shape[0] == 0
