"""Without compiled operators (no compiler, or another processor) the engine is slower, but output is the same."""

from __future__ import annotations

import pytest

from draftproof import SamplingParams
from draftproof.attention.compiled.backend import CompiledAttention
from draftproof.bench.compare import compare
from draftproof.kernels import ops
from draftproof.matmul import linear, products
from draftproof.matmul.spec import Candidate
from draftproof.runtime.graphs import EAGER
from tests.conformance.cases import EAGLE3, REPEATS, Requests, prompts, run
from tests.slow import slow

pytestmark = slow

REQUESTS = Requests(
    [*prompts()[:3], REPEATS],
    [SamplingParams(temperature=t, seed=7, max_tokens=20, logprobs=1) for t in (0, 0.8, 0, 0)],
)
HEAD = {"model": EAGLE3, "num_speculative_tokens": 4, "policy": "fixed"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_operators_are_as_exact(dtype: str) -> None:
    settings = {"dtype": dtype, "native": False}
    plain, _ = run(REQUESTS, **settings, max_num_seqs=1, enable_prefix_caching=False)
    for changes in ({}, {"max_num_batched_tokens": 9}):
        outputs, llm = run(REQUESTS, **settings, **changes, speculative_config=HEAD)
        assert not compare(plain, outputs)
        assert llm.stats.speculation.num_accepted_tokens > 0
    parts = llm.engine.runner
    assert parts.ops is ops.TORCH and parts.graphs is EAGER
    assert not isinstance(parts.backend, CompiledAttention)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_processor_without_packed_products_is_as_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, dtype: str
) -> None:
    """The planner has only torch's plain product, as on processors for which oneDNN cannot pack weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    original = products.candidates
    found: list[str] = []

    def plain_only(*args: object) -> list[Candidate]:
        candidates = [candidate for candidate in original(*args) if candidate.name == "plain"]  # type: ignore[arg-type]
        found.extend(candidate.name for candidate in candidates)
        return candidates

    defaults = linear.LinearPlanner.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "find_candidates", plain_only)
    settings = {"dtype": dtype, "native": False}
    plain, _ = run(REQUESTS, **settings, max_num_seqs=1, enable_prefix_caching=False)
    outputs, llm = run(REQUESTS, **settings, speculative_config=HEAD)
    assert found and not compare(plain, outputs)
    assert llm.stats.speculation.num_accepted_tokens > 0
