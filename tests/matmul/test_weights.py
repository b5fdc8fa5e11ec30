"""Kinds of weights: one file and one row make one, with certificates of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof.kernels.ops import select
from draftproof.matmul.linear import LinearPlanner
from draftproof.matmul.quantized import Fp8
from draftproof.matmul.spec import Candidate, LinearFn, Shape
from draftproof.matmul.weights import KINDS, Dense
from draftproof.models.config import parse
from draftproof.models.decoder import Decoder
from draftproof.models.weights import RandomWeights
from draftproof.runtime import native
from tests.helpers import Paged, logits_in_parts, run_rows
from tests.matmul import toy_weight
from tests.models.test_operators import DENSE as RAW

CPU = torch.device("cpu")
TEXT = [(i * 37 + 5) % 64 for i in range(90)]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, toy_weight.KIND, toy_weight.ROW)


def planner(folder: Path) -> LinearPlanner:
    return LinearPlanner(CPU, exact=True, max_rows=64, library=native.load(), cache_dir=folder)


@pytest.mark.usefixtures("toy")
def test_a_kind_of_ones_own_gets_certificates_of_its_own(tmp_path: Path) -> None:
    made = planner(tmp_path)
    weight_NK = torch.randn(48, 64)
    stored = toy_weight.Int8.store(weight_NK)
    dense, own = made.pack(weight_NK), made.pack(stored)
    made.certify()
    keys = {shape.key(): choice.candidate for shape, choice in made.choices.items()}
    assert keys.keys() == {"48x64 float32>float32", "48x64 float32>float32 int8"}
    assert keys["48x64 float32>float32 int8"].startswith("integers")
    x_TK = torch.randn(33, 64)
    alone = torch.cat([own(row) for row in x_TK.split(1)])
    assert torch.equal(own(x_TK), alone) and not torch.equal(own(x_TK), dense(x_TK))
    torch.testing.assert_close(own(x_TK), x_TK @ stored.numbers().t())
    assert (own.weight_itemsize, dense.weight_itemsize) == (1, 4)


@pytest.mark.usefixtures("toy")
def test_a_target_of_that_kind_decodes_exactly(tmp_path: Path) -> None:
    made = planner(tmp_path)
    library = native.load()
    config = parse({**RAW, "model_type": "llama", "max_position_embeddings": 128})
    ops = select(CPU, library)
    decoder = Decoder.load(RandomWeights(3), config, ops, made, CPU, torch.float32, kind=toy_weight.KIND)
    made.certify()
    assert {shape.kind for shape in made.choices} == {toy_weight.KIND}
    whole = decoder.logits(run_rows(decoder, Paged(decoder.kv, library=library), [(0, 0, TEXT)]).hidden_TH)
    assert torch.equal(logits_in_parts(decoder, Paged(decoder.kv, library=library), TEXT), whole)
    plain = planner(tmp_path)
    other = Decoder.load(RandomWeights(3), config, ops, plain, CPU, torch.float32)
    plain.certify()
    theirs = other.logits(run_rows(other, Paged(other.kv, library=library), [(0, 0, TEXT)]).hidden_TH)
    assert not torch.equal(theirs, whole)


def test_a_candidate_gets_only_weights_of_the_kinds_that_it_takes(tmp_path: Path) -> None:
    given: list[str] = []

    def noted(name: str, kind: str) -> Candidate:
        def make(parts: object, bias: torch.Tensor | None, out: torch.dtype) -> LinearFn:
            given.append(f"{name} {type(parts).__name__}")
            return lambda x_TK: x_TK

        return Candidate(name, make, takes=frozenset({kind}))

    made = LinearPlanner(
        CPU,
        exact=False,
        max_rows=8,
        library=None,
        cache_dir=tmp_path,
        find_candidates=lambda *_: [noted("first", "dense"), noted("second", "fp8")],
    )
    made.pack(torch.randn(4, 8))
    made.pack(Dense(torch.randn(4, 8)))
    made.pack(Fp8.store(torch.randn(4, 8)))
    assert given == ["first Tensor", "first Tensor", "second Fp8"]


def test_the_kind_is_in_the_key_and_dense_keys_are_what_they_were() -> None:
    dense = Shape(3, 4, torch.bfloat16, torch.float32, True)
    assert dense.key() == "3x4 bfloat16>float32 bias"
    assert Shape(3, 4, torch.bfloat16, torch.float32, True, "fp8").key() == "3x4 bfloat16>float32 bias fp8"
