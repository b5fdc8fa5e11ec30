"""Layers as data: a kind of mixer or feed-forward part is one file and one row of a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof.models import cost
from draftproof.models.config import ModelConfig, parse
from draftproof.models.families import FAMILIES, Family
from draftproof.models.registry import FFNS, MIXERS, MixerKind
from draftproof.models.weights import RandomWeights
from tests.helpers import Paged, greedy, load_decoder, logits_in_parts, run_rows
from tests.models import test_mla, test_moe, test_operators, toy_mixer

TEXT = [(i * 37 + 5) % 64 for i in range(90)]
RAW: dict[str, Any] = {**test_operators.DENSE, "model_type": "toy", "mean_size": 16, "mean_window": 5}
TOY = {"toy": Family(model_type="toy", architectures=("Toy",), mixer="mean")}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setitem(
        MIXERS, "mean", MixerKind(config=toy_mixer.MeanConfig, read=toy_mixer.read, keys=toy_mixer.KEYS)
    )
    return parse(RAW, {**FAMILIES, **TOY})


def test_a_mixer_of_ones_own_decodes(toy: ModelConfig) -> None:
    decoder = load_decoder(RandomWeights(3), toy)
    whole = decoder.logits(run_rows(decoder, Paged(decoder.kv), [(0, 0, TEXT)]).hidden_TH)
    assert torch.equal(logits_in_parts(decoder, Paged(decoder.kv), TEXT), whole)
    text = greedy(decoder, TEXT[:9], 12)
    again = run_rows(decoder, Paged(decoder.kv), [(0, 0, [*TEXT[:9], *text])])
    assert decoder.logits(again.hidden_TH).argmax(-1).tolist()[8:-1] == text and len(set(text)) > 3


def test_it_computes_what_it_says(toy: ModelConfig) -> None:
    decoder = load_decoder(RandomWeights(3), toy)
    layer: Any = decoder._layers[0]
    x_TH = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    positions, slots = torch.arange(8), torch.zeros(8).long()
    found = layer.mixer(x_TH, Paged(decoder.kv).attention(positions, slots))
    values_TD = layer.mixer._value(x_TH)
    means_TD = torch.stack([values_TD[max(0, i - 4) : i + 1].mean(0) for i in range(8)])
    torch.testing.assert_close(found, layer.mixer._out(means_TD))


def test_what_it_costs_is_counted(toy: ModelConfig) -> None:
    hidden, width, size = 32, 48, 16
    assert cost.layers_products(toy, 1, 1).bytes == 2 * (2 * hidden * size + 3 * hidden * width)
    near, far = (cost.attention(toy, 1, 1, context, 1).bytes for context in (5, 100))
    assert near == far == 2 * 2 * size * 5


def test_its_keys_mean_nothing_elsewhere(toy: ModelConfig) -> None:
    with pytest.raises(ValueError, match="unknown key 'mean_size'"):
        parse({**RAW, "model_type": "llama"})


def test_every_part_of_every_family_has_a_row() -> None:
    mixers, ffns = set[type](), set[type]()
    for raw in (*test_operators.CONFIGS.values(), *test_moe.RAWS.values(), test_mla.RAW):
        for layer in parse(raw).layers:
            mixers.add(type(layer.mixer))
            ffns.add(type(layer.ffn))
    assert mixers == {kind.config for kind in MIXERS.values()}
    assert ffns == {kind.config for kind in FFNS.values()}
