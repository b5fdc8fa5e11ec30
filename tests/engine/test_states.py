"""Per-slot states of layers: the engine commits the permanent rows to them, once per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, DraftSpec, Proposal, SamplingParams, Taps, Verified
from draftproof.cache.states import LayerState
from draftproof.drafters.sandbox import DrafterSandbox
from draftproof.models.families import FAMILIES, Family
from draftproof.models.registry import MIXERS, MixerKind
from tests.models import toy_state
from tests.models.toy_state import SumSpec, SumState

RAW: dict[str, Any] = {
    "model_type": "toy", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
TEXT = [(i * 17 + i * i // 5 + 3) % 61 for i in range(60)]
PROMPTS: Any = [TEXT[:40], TEXT[:8] * 4, [5, 6, 7], TEXT[20:45], TEXT[:40]]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(
        MIXERS, "summing", MixerKind(config=toy_state.SummingConfig, read=toy_state.read, keys=frozenset())
    )
    monkeypatch.setitem(
        FAMILIES,
        "toy",
        Family(model_type="toy", architectures=("Toy",), mixer="summing"),  # type: ignore[misc]
    )
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    return tmp_path


def texts_of(states: list[LayerState]) -> list[list[tuple[list[int], list[float]]]]:
    """For each state, the (tokens, sum) that it saw of each request, sorted."""
    found = []
    for state in states:
        assert isinstance(state, SumState)
        for slot in range(len(state.sum_SX)):
            state.close(slot)
        found.append(sorted(state.texts))
    return found


def generate(llm: LLM, prompts: Any) -> list[list[int]]:
    """Generate; returns the rows that must have become permanent: all tokens of each request but the last."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return sorted([*o.prompt_token_ids, *o.outputs[0].token_ids][:-1] for o in outputs)


def engine(folder: Path, **changes: Any) -> LLM:
    settings: dict[str, Any] = {
        "load_format": "dummy", "dtype": "float32", "max_model_len": 96, "block_size": 16, "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
    }  # fmt: skip
    return LLM(str(folder), **{**settings, **changes})


@pytest.mark.parametrize("drafter", [None, NGRAM])
def test_a_targets_layers_keep_the_rows_that_live(folder: Path, drafter: dict[str, Any] | None) -> None:
    """With chunked prompts, accepted and rejected drafts, and reused slots."""
    with engine(folder, speculative_config=drafter) as llm:
        wanted = generate(llm, PROMPTS)
        runner = llm.engine.runner
        states = runner.cache.states
        assert len(states) == RAW["num_hidden_layers"] and not runner.draft_cache.states
        found = texts_of(states)
        assert all([tokens for tokens, _ in each] == wanted for each in found)
        assert isinstance(states[0], SumState)
        assert states[0].most == 24 and (states[0].num_cut > 20) == (drafter is not None)
    with engine(folder, max_num_seqs=1, max_num_batched_tokens=96) as llm:  # one by one, prompts not chunked
        generate(llm, PROMPTS)
        alone = texts_of(llm.engine.runner.cache.states)
    for each, other in zip(found, alone, strict=True):
        for (_, total), (_, expected) in zip(each, other, strict=True):
            assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_state_begins_with_its_request(folder: Path) -> None:
    """Pages of an earlier equal prompt are not reused, since they do not record the state at their end."""
    with engine(folder) as llm:
        for _ in range(2):
            generate(llm, [TEXT[:40]])
        assert llm.stats.num_cached_tokens == 0
        (first, again), *_ = texts_of(llm.engine.runner.cache.states)
        assert first == again and len(first[0]) == 69


class Keeping:
    """A drafter with a per-slot state; repeats the newest token as its drafts."""

    spec = DraftSpec(taps=Taps(final=True), states=(SumSpec(size=4),))

    def __init__(self, config: object) -> None:
        pass

    def bind(self, runtime: Any) -> None:
        (self.state,) = runtime.cache.states

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        self.state.write(verified.taps[0])
        tokens_RK = verified.next_R[:, None].repeat(1, num_drafts)
        return Proposal(tokens_RK, verified.k_R)


KEEPING = {"method": f"{__name__}.Keeping", "num_speculative_tokens": 2, "trusted": True}


@pytest.mark.parametrize(
    ("config", "number"),
    [(KEEPING, 0), ({"method": "chain", "drafters": [NGRAM, KEEPING], "num_speculative_tokens": 3}, 1)],
)
def test_a_drafters_layers_keep_what_they_were_shown(config: dict[str, Any], number: int) -> None:
    with LLM(max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128, speculative_config=config) as llm:
        wanted = generate(llm, PROMPTS)
        runner = llm.engine.runner
        assert runner.draft_cache.states == [runner.sandboxes[number].drafter.drafter.state]
        (found,) = texts_of(runner.draft_cache.states)
        assert len(found) == len(wanted)
        # it does not see prefixes that come from the cache, nor rows for which no drafts are to follow
        for tokens, _ in found:
            assert len(tokens) >= 30 and any(text[-len(tokens) :] == tokens for text in wanted)
        assert runner.draft_cache.states[0].num_cut > 20


def test_a_step_that_a_drafter_is_not_shown_is_none_of_its_state() -> None:
    with LLM(max_num_seqs=3, max_model_len=128, speculative_config=KEEPING) as llm:
        runner = llm.engine.runner
        commit, seen = runner._commit, list[bool]()

        def watched(verified: Verified, *, with_drafter: bool) -> None:
            seen.append(with_drafter)
            commit(verified, with_drafter=with_drafter)

        runner._commit = watched  # type: ignore[method-assign]
        llm.engine.policy.choose = lambda requests, *_: [0] * len(requests)
        llm.engine.policy.will_draft = lambda *_: False
        generate(llm, [TEXT[:12]])
        assert seen and not any(seen)
        assert texts_of(runner.draft_cache.states) == [[]]


def test_a_class_that_is_not_trusted_has_none() -> None:
    with pytest.raises(ValueError, match=r"Keeping: spec\.states=.*'trusted'"):
        LLM(speculative_config={**KEEPING, "trusted": False})


def test_who_lost_rows_of_a_request_is_not_asked_for_it_again() -> None:
    sandbox = DrafterSandbox(Keeping(None), vocab_size=61, max_faults=3, time_limit=None)  # type: ignore[arg-type]
    sandbox.lose([1])
    assert sandbox.drafts_for(0) and not sandbox.drafts_for(1)
