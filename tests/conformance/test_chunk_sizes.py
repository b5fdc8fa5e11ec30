"""The quick form of `tests.chunk_sizes`, and a proof that it can see a difference."""

from __future__ import annotations

import pytest
from torch import Tensor

from draftproof.attention import registry
from draftproof.attention.base import AttentionBackend
from draftproof.attention.chunked import TREES, ChunkedAttention
from draftproof.attention.registry import Entry
from tests import chunk_sizes
from tests.slow import slow

pytestmark = slow


@pytest.mark.parametrize("dtype", chunk_sizes.DTYPES)
@pytest.mark.parametrize("native", [False, True])
def test_chunks_and_batches_change_nothing(dtype: str, native: bool) -> None:
    given = chunk_sizes.prompts(6, 8192, 230)
    chunks = (33, 99) if native or dtype == "float32" else (99,)  # torch's operators take long in the others
    assert chunk_sizes.differing(given, dtype, native, chunks) == {}


class _FollowsItsNeighbours(ChunkedAttention):
    """Wrong on purpose: sums in one way with few rows in the call, and in another with many."""

    def __call__(self, q_THD: Tensor, *arguments: object) -> Tensor:  # type: ignore[override]
        if len(q_THD) < 20:
            return super().__call__(q_THD, *arguments)  # type: ignore[arg-type]
        changed_THD = q_THD.float() * (1 + 2.0**-22)
        return super().__call__(changed_THD.to(q_THD.dtype), *arguments)  # type: ignore[arg-type]


def test_a_backend_that_follows_its_neighbours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: AttentionBackend = _FollowsItsNeighbours(TREES)
    monkeypatch.setattr(registry, "BACKENDS", {"wrong": Entry(lambda _: wrong, ("cpu",))})
    given = chunk_sizes.prompts(4, 8192, 60)
    with pytest.raises(ValueError, match="no version of attention"):
        chunk_sizes.differing(given, "float32", False, (17,))
    monkeypatch.setattr("draftproof.engine.loading.operators.OperatorCertifier.verdict", lambda *_: True)
    assert chunk_sizes.differing(given, "float32", False, (17,))
