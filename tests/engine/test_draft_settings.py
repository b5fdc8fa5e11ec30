"""`max_model_len`, `load_format` and `revision` of a draft checkpoint, inside speculative_config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from draftproof import LLM, RequestOutput, SamplingParams
from draftproof.bench.compare import compare
from tests.conformance.cases import EAGLE3, MTP, REPEATS, prompts
from tests.slow import few

LIMIT = 80
TEXTS = [REPEATS, prompts()[0], REPEATS * 3]


def engine(config: dict[str, Any] | None, **settings: Any) -> LLM:
    if config is not None:
        config = {"num_speculative_tokens": 4, "policy": "fixed", **config}
    return LLM(dtype="float32", max_model_len=256, speculative_config=config, **settings)


def run(llm: LLM) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=t, seed=2, max_tokens=40, ignore_eos=True, logprobs=0) for t in (0, 0.8, 0)
    ]
    return llm.generate(TEXTS, params, use_tqdm=False)


HEAD = {"model": EAGLE3, "max_model_len": LIMIT}
LIMITED: dict[str, dict[str, Any]] = {
    "head": HEAD,
    "ngram": {"method": "ngram", "max_model_len": LIMIT},
    "custom": {"method": "tests.conformance.custom.Moody", "max_model_len": LIMIT},
    "member": {"method": "chain", "drafters": [HEAD]},
    "chain": {
        "method": "chain",
        "drafters": [{"model": EAGLE3}, {"method": "suffix"}],
        "max_model_len": LIMIT,
    },
}


@pytest.mark.parametrize("name", few(LIMITED, "head", "chain"))
def test_no_draft_stands_beyond_its_max_model_len(name: str) -> None:
    llm = engine(LIMITED[name])
    plain, state, ends = run(engine(None)), llm.engine.runner.state, list[int]()
    store = state.store_drafts

    def watched(verified: Any, proposal: Any, vocab_size: int) -> Any:
        lengths = [len(verified.history(r)) for r in range(verified.num_requests)]
        counts = [min(c, k) for c, k in zip(proposal.count_R.tolist(), verified.k_R.tolist(), strict=True)]
        ends.extend(known + count for known, count in zip(lengths, counts, strict=True) if count)
        return store(verified, proposal, vocab_size)

    state.store_drafts = watched  # type: ignore[method-assign]
    assert not compare(plain, run(llm))
    assert max(ends) <= LIMIT  # the last draft is at position LIMIT - 1
    assert max(ends) == LIMIT or name == "custom"  # which makes too few drafts to reach it
    assert llm.stats.speculation.num_accepted_tokens > 0 and llm.stats.num_drafter_faults == 0
    longest = max(len(o.prompt_token_ids) + 40 for o in plain)
    assert longest > LIMIT + 20


def test_within_its_max_model_len_it_drafts_as_without() -> None:
    limited, free = engine({**HEAD, "max_model_len": 5000}), engine({"model": EAGLE3})
    assert not compare(run(free), run(limited))
    assert limited.stats.speculation == free.stats.speculation


def test_a_member_keeps_the_smaller_of_two_limits() -> None:
    from draftproof.config import SpeculativeConfig
    from draftproof.engine.loading.plans import Files, draft_plans
    from draftproof.models.weights import RandomWeights

    for own, whole, expected in (
        (50, 80, 50),
        (80, 50, 50),
        (None, 50, 50),
        (50, None, 50),
        (None, None, None),
    ):
        member = {"method": "ngram", "max_model_len": own}
        settings = SpeculativeConfig(method="chain", drafters=(member,), max_model_len=whole)
        (plan,) = draft_plans(settings, Files(Path(), RandomWeights()))
        assert plan.settings.max_model_len == expected


def test_random_weights_for_the_drafter_alone(tmp_path: Path) -> None:
    """Only the drafter's config.json is read. Outputs are those of the target's own weights; few drafts are right."""
    shutil.copy(Path(EAGLE3) / "config.json", tmp_path)
    llm, trained = engine({"model": str(tmp_path), "load_format": "dummy"}), engine({"model": EAGLE3})
    assert not compare(run(engine(None)), run(llm))
    run(trained)
    drafted, right = llm.stats.speculation.num_draft_tokens, llm.stats.speculation.num_accepted_tokens
    assert drafted > 100 and right < trained.stats.speculation.num_accepted_tokens / 4
    with pytest.raises(ValueError, match="safetensors files: none"):
        engine({"model": str(tmp_path)})


def test_a_drafters_own_files_beside_random_weights_of_the_target(tmp_path: Path) -> None:
    shutil.copy(Path(EAGLE3) / "config.json", tmp_path)
    engine({"model": str(tmp_path)}, load_format="dummy")
    with pytest.raises(ValueError, match="safetensors files: none"):
        engine({"model": str(tmp_path), "load_format": "auto"}, load_format="dummy")


def test_members_of_a_chain_have_each_their_own_format(tmp_path: Path) -> None:
    shutil.copy(Path(MTP) / "config.json", tmp_path)
    members = [{"model": str(tmp_path), "load_format": "dummy"}, {"model": EAGLE3}]
    assert run(engine({"method": "chain", "drafters": members}))
    with pytest.raises(
        ValueError, match=r"load_format='dummy': method='chain' has no checkpoint.*its drafters"
    ):
        engine({"method": "chain", "drafters": members, "load_format": "dummy"})


def test_the_revision_is_the_draft_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, str | None]] = []

    def fetch(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return EAGLE3

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    engine({"model": "someone/head", "revision": "v2"})
    assert asked == [("someone/head", "v2")]
    engine({"method": "chain", "drafters": [{"model": "someone/head", "revision": "abc"}]}, revision="v9")
    assert asked[1:] == [("someone/head", "abc")]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": EAGLE3, "revision": 5}, "revision=5: must be a string, a name"),
        (
            {"model": EAGLE3, "load_format": "pt"},
            "load_format='pt': must be one of auto, gguf, dummy, or left out",
        ),
        ({"model": EAGLE3, "max_model_len": 0}, "max_model_len=0: must be an integer of at least 1"),
        ({"model": EAGLE3, "max_model_len": True}, "max_model_len=True: must be an integer"),
        (
            {"method": "ngram", "revision": "v2"},
            "revision='v2': method='ngram' has no checkpoint; leave it out",
        ),
        (
            {"method": "suffix", "load_format": "dummy"},
            "load_format='dummy': method='suffix' has no checkpoint",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^speculative_config: {message}"):
        engine(config)
