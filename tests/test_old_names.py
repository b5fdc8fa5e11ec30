"""Names that have changed work for one version more, and say what they are now."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from draftproof import LLM, Proposal, SamplingParams, Verified
from draftproof.drafters import head
from draftproof.drafters.context import DraftContext
from examples.custom_drafter import LastSeen
from examples.custom_head import build

MOVED = [
    ("draftproof.engine.llm", "LLM", "draftproof.frontend.llm", "LLM"),
    ("draftproof.drafters.build", "DraftBuild", "draftproof.drafters.context", "DraftContext"),
    ("draftproof.drafters.build", "DraftCheckpoint", "draftproof.drafters.context", "DraftCheckpoint"),
]


@pytest.mark.parametrize(("old", "old_name", "new", "new_name"), MOVED)
def test_a_module_that_moved_is_found_in_its_old_place(
    monkeypatch: pytest.MonkeyPatch, old: str, old_name: str, new: str, new_name: str
) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)  # it speaks up once a process
    with pytest.warns(DeprecationWarning, match=f"{old}: is {new} now") as caught:
        found = importlib.import_module(old)
    assert getattr(found, old_name) is getattr(importlib.import_module(new), new_name)
    assert len(caught) == 1


def test_what_a_head_is_lent_has_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="DraftMemory: is DraftRuntime now"):
        assert head.DraftMemory is head.DraftRuntime
    with pytest.raises(AttributeError, match="has no attribute 'DraftMemries'"):
        _ = head.DraftMemries


class CountsRows(LastSeen):
    """A user's drafter that was written for the last version."""

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        assert verified.cu_R1 is verified.query_start_loc_R1
        return super().propose(verified, num_drafts)


def build_as_before(ctx: DraftContext) -> Any:
    assert ctx.build is ctx.builder
    return build(ctx)


@pytest.mark.parametrize(
    ("method", "said"),
    [("CountsRows", "cu_R1: is query_start_loc_R1"), ("build_as_before", "build: is DraftContext.builder")],
)
def test_drafters_written_for_the_last_version_draft(method: str, said: str) -> None:
    with pytest.warns(DeprecationWarning, match=said) as caught:
        config = {"method": f"{__name__}.{method}", "policy": "fixed"}
        with LLM(max_model_len=64, speculative_config=config) as llm:
            llm.generate("a = [1, 1, 1, 1,", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            assert llm.stats.speculation.num_draft_tokens and not llm.stats.num_drafter_faults
    assert {warning.filename for warning in caught} == {__file__}
