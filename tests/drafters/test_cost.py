"""Drafters' declared cost of a round: every built-in method declares it, from the weights that it was built with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from draftproof import LLM, assets
from draftproof.bench.internals import drafter_of, model_of
from draftproof.drafters.base import Drafter, RoundSize
from draftproof.drafters.registry import METHODS
from draftproof.matmul import quantized
from draftproof.matmul.linear import PackedLinear
from draftproof.models import cost
from draftproof.models.builder import LayerBuilder
from draftproof.models.config import parse
from tests.conformance.cases import CASES

WITHOUT_WEIGHTS = {"ngram", "suffix"}
USERS = {name for name in CASES if name.startswith("custom")}
OURS = [name for name in CASES if name not in USERS | WITHOUT_WEIGHTS | {"chain"}]
# methods whose round of one draft does not read every product once: experts, some centroids' tokens, rounds of drawing
NOT_ONCE = {"mtp/modules", "gemma4_mtp/centroids", "xpress"}


@contextmanager
def packed_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PackedLinear]]:
    """Drafters' products, recorded when made: they are exempt from exactness, which tells them from a target's."""
    found: list[PackedLinear] = []
    pack = LayerBuilder.pack

    def noting(self: LayerBuilder, *args: Any, **kwargs: Any) -> PackedLinear:
        made = pack(self, *args, **kwargs)
        if self.exact is False:
            found.append(made)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(LayerBuilder, "pack", noting)
        yield found


def of_round(num_drafts: int, context: int = 0, rows: int = 1, itemsize: int = 4) -> RoundSize:
    return RoundSize(requests=1, rows=rows, context=context, num_drafts=num_drafts, itemsize=itemsize)


def engine(**settings: Any) -> LLM:
    return LLM(**{"dtype": "float32", "max_model_len": 64, "max_num_seqs": 1, **settings})


def drafter(**config: Any) -> Drafter:
    found = drafter_of(engine(speculative_config={"num_speculative_tokens": 5, **config}))
    assert found is not None
    return found


def test_every_method_has_a_case() -> None:
    assert {name.partition("/")[0] for name in CASES} >= set(METHODS)


@pytest.mark.parametrize("name", OURS)
def test_a_method_that_computes_with_weights_counts_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with packed_weights(monkeypatch) as packed:
        llm = engine(**CASES[name].llm(1))
    own = drafter_of(llm)
    assert own is not None
    one, none = own.cost(of_round(1)), own.cost(of_round(0))
    assert one is not None and none is not None
    weights = 4 * sum(linear.in_features * linear.out_features for linear in packed)
    # a head without logits of its own computes them with the target's product
    config = model_of(llm)
    shared = 4 * config.vocab_size * config.hidden_size
    if name in NOT_ONCE:
        assert weights < one.bytes < 2 * llm.memory.draft_weights + shared
    else:
        assert one.bytes in (weights, weights + shared)
    assert one.flops > 0 and none.bytes < one.bytes


def test_an_eagle3_round_reads_layer_and_head_once_a_draft() -> None:
    raw = json.loads((assets.path("tiny-eagle3") / "config.json").read_text())
    layers = parse(raw["transformer_layer_config"])
    hidden, vocab = layers.hidden_size, raw["draft_vocab_size"]
    num_heads, num_kv_heads = raw["transformer_layer_config"]["num_attention_heads"], layers.caches[0].heads
    head_dim = layers.caches[0].head_dim
    layer = 2 * hidden * (num_heads + 2 * num_kv_heads) * head_dim + num_heads * head_dim * hidden
    layer += 3 * hidden * raw["transformer_layer_config"]["intermediate_size"]
    fusion = 3 * hidden * hidden
    own = drafter(model=str(assets.path("tiny-eagle3")))
    one, five = (own.cost(of_round(k, rows=6)) for k in (1, 5))
    assert one is not None and five is not None
    assert one.bytes == 4 * (layer + vocab * hidden + fusion)
    assert five.bytes - one.bytes == 4 * 4 * (layer + vocab * hidden)
    assert one.flops == 2 * (6 * (layer + fusion) + vocab * hidden)
    far = own.cost(of_round(5, context=50, rows=6))
    assert far is not None
    assert far.bytes - five.bytes == 5 * 50 * 2 * num_kv_heads * head_dim * 4


def test_weights_in_fp8_are_a_quarter_of_those_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": str(assets.path("tiny-eagle3"))}
    wide = drafter(**given).cost(of_round(2, context=50, rows=3))
    monkeypatch.setattr(quantized, "is_kept", lambda device: True)  # as on a GPU
    monkeypatch.setattr(quantized, "make_linear_fn", lambda *args: None)
    narrow = drafter(**given, quantization="fp8").cost(of_round(2, context=50, rows=3))
    assert wide is not None and narrow is not None and wide.flops == narrow.flops
    assert 0.25 < narrow.bytes / wide.bytes < 0.3, "all but keys and values"


def test_a_draft_model_costs_less_than_a_larger_target() -> None:
    llm = engine(speculative_config={**CASES["draft_model"].config, "num_speculative_tokens": 2})
    own = drafter_of(llm)
    assert own is not None
    found, target = own.cost(of_round(2, 50, 3)), cost.target_pass(model_of(llm), 2, 3, 50, 4)
    assert found is not None and 0 < found.flops < target.flops


def test_drafters_that_only_look_up_cost_nothing() -> None:
    for method in WITHOUT_WEIGHTS:
        assert drafter(method=method).cost(of_round(2, 50, 3)) == cost.Cost()


def test_what_runs_others_costs_what_they_cost() -> None:
    size, head = of_round(5, 40, 6), {"model": str(assets.path("tiny-eagle3"))}
    alone = drafter(**head).cost(size)
    assert drafter(**CASES["replay"].config).cost(size) == alone
    assert drafter(**head, max_model_len=32).cost(size) == alone
    assert drafter(method="replay", recordings=CASES["replay"].config["recordings"]).cost(size) == cost.Cost()
    model = drafter(**CASES["draft_model"].config).cost(of_round(0, 40, 6))
    chain = drafter(method="chain", drafters=[head, dict(CASES["draft_model"].config)])
    assert alone is not None and model is not None
    assert chain.cost(size) == alone + model, "the second keeps its cache in step"
    last = drafter(method="chain", drafters=[head, dict(CASES["custom_head"].config)])
    assert last.cost(size) is None, "nobody has counted what a user's network does"


def test_a_user_s_search_counts_as_nothing_and_a_network_as_unknown() -> None:
    assert drafter(**CASES["custom"].config).cost(of_round(2, 50, 3)) == cost.Cost()
    assert drafter(**CASES["custom_head"].config).cost(of_round(2, 50, 3)) is None
