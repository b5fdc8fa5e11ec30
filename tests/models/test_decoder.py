"""The decoder on its own: rows' independence (law 2), windows, dummy weights, taps out of range, mismatched weights."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftproof import assets
from draftproof.kernels.ops import TORCH
from draftproof.matmul.linear import LinearPlanner
from draftproof.matmul.spec import Candidate
from draftproof.models.config import ModelConfig, parse, read_config
from draftproof.models.decoder import Decoder
from draftproof.models.weights import RandomWeights, Weights
from draftproof.runtime import native
from tests.helpers import CPU, Paged, load_decoder, logits_in_parts, run_rows
from tests.models.reference import MODEL_CASES, save

TEXT = [(i * 37 + 5) % 199 for i in range(90)]
RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def random_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(RandomWeights(3), config, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_any_pass(dtype: torch.dtype) -> None:
    decoder = random_decoder(parse(RAW), dtype)
    whole = run_rows(decoder, Paged(decoder.kv, dtype=dtype), [(0, 0, TEXT)])
    paged = Paged(decoder.kv, dtype=dtype)
    assert torch.equal(logits_in_parts(decoder, paged, TEXT), decoder.logits(whole.hidden_TH))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_logits_in_fp16_are_those_of_fp32_within_its_rounding(compiled: bool) -> None:
    """fp16 has three bits more than bf16, so an eighth of its distance from fp32, on the embedded model."""
    given = native.load() if compiled else None
    if compiled and given is None:
        pytest.skip("no C++ compiler")

    def logits(dtype: torch.dtype) -> torch.Tensor:
        decoder = load_decoder(assets.path("tiny"), dtype=dtype, library=given)
        paged = Paged(decoder.kv, dtype=dtype, library=given)
        return decoder.logits(run_rows(decoder, paged, [(0, 0, TEXT)]).hidden_TH)

    exact = logits(torch.float32)
    bf16, fp16 = ((logits(dtype) - exact).square().mean().sqrt() for dtype in (torch.bfloat16, torch.float16))
    assert fp16 < 2**-9 * exact.std()
    assert bf16 / 12 < fp16 < bf16 / 5


def test_a_window_hides_what_is_older_and_only_that() -> None:
    sliding = dict(RAW, use_sliding_window=True, sliding_window=10, max_window_layers=0)
    decoder = random_decoder(parse(sliding))
    assert [layer.window for layer in decoder.config.layers] == [10, 10, 10]
    reach = 3 * (10 - 1)  # layers times how far back each attends
    last = len(TEXT) - 1

    def final_row(changed: int) -> torch.Tensor:
        text = [(t + 1) % 199 if i == changed else t for i, t in enumerate(TEXT)]
        return run_rows(decoder, Paged(decoder.kv), [(0, 0, text)]).hidden_TH[-1]

    plain = final_row(-1)
    assert torch.equal(final_row(last - reach - 1), plain)
    assert not torch.equal(final_row(last - reach), plain)


def test_padding_rows_change_nothing_and_store_nothing() -> None:
    decoder = random_decoder(parse(RAW))
    plain = run_rows(decoder, Paged(decoder.kv), [(1, 0, TEXT[:9])]).hidden_TH
    paged = Paged(decoder.kv)
    positions_T = torch.tensor([-1, *range(9), -1])
    slots_T = torch.tensor([1] * 11)
    out = decoder(torch.tensor([0, *TEXT[:9], 0]), paged.attention(positions_T, slots_T))
    assert torch.equal(out.hidden_TH[1:10], plain)
    stored = paged.cache.layers[0].k.abs().sum(dim=(1, 3)).count_nonzero()
    assert stored == 9


@pytest.mark.parametrize("taps", [(0, 4), (-1,)])
def test_a_tap_out_of_range_is_refused_with_both_numbers(taps: tuple[int, ...]) -> None:
    decoder = random_decoder(parse(RAW))
    wrong = taps[-1]
    with pytest.raises(ValueError, match=rf"layer id {wrong} .*num_layers=3"):
        run_rows(decoder, Paged(decoder.kv), [(0, 0, TEXT[:4])], taps=taps)


def test_random_weights_depend_on_seed_and_name_and_keep_the_stream_finite() -> None:
    one, two = RandomWeights(1), RandomWeights(2)
    assert torch.equal(one.get("a.weight", (4, 8)), RandomWeights(1).get("a.weight", (4, 8)))
    assert not torch.equal(one.get("a.weight", (4, 8)), one.get("b.weight", (4, 8)))
    assert not torch.equal(one.get("a.weight", (4, 8)), two.get("a.weight", (4, 8)))
    decoder = random_decoder(parse(dict(RAW, attention_bias=True)))
    logits = decoder.logits(run_rows(decoder, Paged(decoder.kv), [(0, 0, TEXT)]).hidden_TH)
    assert logits.isfinite().all()
    assert logits.argmax(dim=-1).unique().numel() > 10


def test_a_longer_table_lets_a_model_run_past_its_own_length() -> None:
    short = dataclasses.replace(parse(RAW), max_position_embeddings=32)
    longer = load_decoder(RandomWeights(3), short, max_positions=128)
    plain = random_decoder(parse(RAW))
    assert longer.rope_tables[short.ropes[0]].shape[0] == 128
    outs = [run_rows(d, Paged(d.kv), [(0, 0, TEXT)]).hidden_TH for d in (longer, plain)]
    assert torch.equal(*outs)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(MODEL_CASES["qwen3-narrow-heads-sharded"], tmp_path)
    return tmp_path


def edit(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_config_of_another_size_is_refused_with_both_shapes(saved: Path) -> None:
    edit(saved, intermediate_size=100)
    with pytest.raises(ValueError, match=r"gate_proj.weight' has shape \[112, 64\].*\[100, 64\]"):
        load_decoder(saved)


def test_a_missing_tensor_is_named(saved: Path) -> None:
    edit(saved, attention_bias=True)
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj.bias' is missing"):
        load_decoder(saved)


def test_a_tensor_without_a_place_is_refused(saved: Path) -> None:
    edit(
        saved,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        max_window_layers=None,
    )
    with pytest.raises(ValueError, match=r"4 tensors have no place.*k_norm.weight"):
        load_decoder(saved)


def test_layers_past_the_last_and_foreign_tensors_only_warn(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(saved, num_hidden_layers=1, layer_types=None)
    with caplog.at_level(logging.WARNING):
        assert load_decoder(saved).config.num_layers == 1
    assert "tensors are not used, such as model.layers.1." in caplog.text


def test_harmless_leftovers_and_a_base_model_without_prefix_load(tmp_path: Path) -> None:
    save(MODEL_CASES["qwen2-tied"], tmp_path)
    with_prefix = load_decoder(tmp_path)
    tensors = {k.removeprefix("model."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    tensors["lm_head.weight"] = torch.zeros(199, 64)  # a tied head's stale copy
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    bare = load_decoder(tmp_path)
    outs = [d.logits(run_rows(d, Paged(d.kv), [(0, 0, TEXT)]).hidden_TH) for d in (with_prefix, bare)]
    assert torch.equal(*outs)
    assert bare.config.tie_word_embeddings


def test_weights_in_memory_serve_like_files(tmp_path: Path) -> None:
    save(MODEL_CASES["qwen2-tied"], tmp_path)
    config = load_decoder(tmp_path).config
    tensors = load_file(tmp_path / "model.safetensors")
    decoder = load_decoder(Weights.of(tensors, "memory"), config)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"memory: tensor 'model.norm.weight' is missing"):
        load_decoder(Weights.of(tensors, "memory"), config)
    assert decoder.config is config


class Halves:
    """A product as on a GPU: two partial sums, which the following norm adds up."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        self._weights = [half.float() for half in weight_NK.chunk(2, dim=1)]
        self._bias_N, self._out_dtype, self.num_apart = bias_N, out_dtype, 0

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        total_TN = sum(self._parts(x_TK))
        return (total_TN if self._bias_N is None else total_TN + self._bias_N).to(self._out_dtype)

    def partial_sums(self, x_TK: torch.Tensor) -> torch.Tensor:
        self.num_apart += 1
        return torch.stack(self._parts(x_TK)) if self._bias_N is None else self(x_TK)

    def _parts(self, x_TK: torch.Tensor) -> list[torch.Tensor]:
        return [x @ w.t() for x, w in zip(x_TK.float().chunk(2, dim=1), self._weights, strict=True)]


@pytest.mark.parametrize(
    "name", ["llama-biases-sharded", "qwen2-tied", "mixtral", "deepseek-v3", "gemma3-tied"]
)
def test_products_in_parts_change_nothing(name: str, tmp_path: Path) -> None:
    save(MODEL_CASES[name], tmp_path)
    made: list[Halves] = []

    def hidden(whole: bool) -> torch.Tensor:
        def make(*args: Any) -> Any:
            made.append(Halves(*args))
            return made[-1].__call__ if whole else made[-1]

        planner = LinearPlanner(
            CPU,
            exact=False,
            max_rows=64,
            library=None,
            find_candidates=lambda *_: [Candidate("halves", make)],
        )
        decoder = Decoder.load(tmp_path, read_config(tmp_path), TORCH, planner, CPU, torch.bfloat16)
        return run_rows(decoder, Paged(decoder.kv, dtype=torch.bfloat16), [(0, 0, TEXT[:20])]).hidden_TH

    assert torch.equal(hidden(True), hidden(False))
    assert any(half.num_apart for half in made) != name.startswith("gemma")  # its norms add no parts
