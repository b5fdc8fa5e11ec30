"""GGUF files of our checkpoints: names, order of rows, tokens; read back, and by llama.cpp where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import LLM, SamplingParams, assets
from draftproof.bench.peers import gguf_file
from draftproof.bench.peers.engine import Spec
from draftproof.models.config import ModelConfig, parse, read_config
from draftproof.models.gguf.layout import CONTROL, NORMAL, UNUSED, USER_DEFINED, interleave, parts, separate
from draftproof.models.weights import RandomWeights, Weights

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "head_dim": 32,
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 16}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}


def model(**changes: Any) -> ModelConfig:
    return parse({**SHAPE, **changes})


def test_pairs_that_rotate_together_lie_side_by_side() -> None:
    heads = torch.arange(8.0).repeat_interleave(3).view(8, 3)  # 2 heads of 4 rows
    assert interleave(heads, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert interleave(heads[:, 0], 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7], "a bias"
    assert torch.equal(separate(interleave(heads, 2), 2), heads)


def test_only_llama_is_interleaved() -> None:
    weights = RandomWeights()
    for changes, is_same in (({}, False), (QWEN2, True), (QWEN3, True)):
        config = model(**changes)
        mixer, _ = parts(config.layers[0])
        found = dict(gguf_file.tensors(config, weights))
        shape = (mixer.num_kv_heads * mixer.head_dim, 64)
        keys, values = (weights.get(f"model.layers.1.self_attn.{x}_proj.weight", shape) for x in "kv")
        assert torch.equal(found["blk.1.attn_k.weight"], keys) is is_same
        assert torch.equal(found["blk.1.attn_v.weight"], values)
        assert ("output.weight" in found) is not config.tie_word_embeddings
        assert ("blk.0.attn_q.bias" in found) is mixer.qkv_bias
        assert ("blk.0.attn_k_norm.weight" in found) is mixer.qk_norm


def test_stretched_positions_are_divisors_of_frequencies() -> None:
    divisors = dict(gguf_file.tensors(model(rope_parameters=STRETCHED), RandomWeights()))["rope_freqs.weight"]
    assert divisors[0] == 1 and divisors[-1] == 8 and divisors.dtype == torch.float32
    linear = {"rope_type": "linear", "factor": 4.0}
    divisors = dict(gguf_file.tensors(model(rope_parameters=linear), RandomWeights()))["rope_freqs.weight"]
    assert divisors.tolist() == [4.0] * 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**QWEN2, "head_dim": 32}, "head_dim=32: GGUF's qwen2"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, "layers see 64 positions"),
        ({**QWEN3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({**QWEN3, "attention_bias": True}, "GGUF's qwen3 has no place"),
    ],
)
def test_models_of_another_shape_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gguf_file.check(model(**changes))


def test_a_mixture_of_experts_is_refused() -> None:
    directory = Path(__file__).parents[2] / "bench" / "shapes" / "glm-4-moe-2b"
    with pytest.raises(
        ValueError, match="model_type='glm4_moe': no GGUF file is made of it; can be llama, mistral"
    ):
        gguf_file.check(read_config(directory))


def test_every_id_has_a_text_and_a_type() -> None:
    added = [
        {"id": 3, "content": "<end>", "special": True},
        {"id": 1, "content": "<tab>"},
        {"id": 9, "content": "far"},
    ]
    tokens, types = gguf_file.vocabulary({"a": 0, "b": 1}, added, 5)
    assert tokens == ["a", "<tab>", "[PAD2]", "<end>", "[PAD4]"]
    assert types == [
        NORMAL,
        USER_DEFINED,
        UNUSED,
        CONTROL,
        UNUSED,
    ]


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_what_is_written_is_read_back(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    directory = assets.path(assets.TARGET)
    config, weights = read_config(directory), Weights.open(directory)
    reader = gguf.GGUFReader(gguf_file.write(directory, tmp_path / "x.gguf", kind))
    expected = dict(gguf_file.tensors(config, weights))
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        ours = expected[tensor.name]
        stored = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).view(ours.shape)
        wanted = ours if ours.dim() == 1 else ours.to(gguf_file.DTYPES[kind])
        assert torch.equal(stored, wanted.float()), tensor.name
        assert tensor.tensor_type.name == ("F32" if ours.dim() == 1 else kind)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3" and fields["qwen3.block_count"] == config.num_layers
    assert fields["qwen3.attention.head_count_kv"] == config.caches[0].heads
    tokens = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(fields["tokenizer.ggml.tokens"]) == config.vocab_size
    assert all(fields["tokenizer.ggml.tokens"][i] == text for text, i in list(tokens.items())[::97])


@pytest.mark.parametrize(
    "changes",
    [{"rope_parameters": STRETCHED}, {"attention_bias": True, "mlp_bias": True}, QWEN2, QWEN3],
    ids=["llama", "llama with biases", "qwen2", "qwen3"],
)
def test_llama_cpp_says_what_we_say(changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from draftproof.bench.peers.llama_cpp import LlamaCpp

    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    spec = Spec(
        where="",
        model=str(tmp_path),
        dtype="float32",
        dummy=True,
        num_seqs=2,
        max_len=100,
        scratch=str(tmp_path),
    )
    prompts = [[(37 * i + n) % 320 for i in range(80)] for n in (1, 2)]
    theirs, seconds = LlamaCpp(spec).generate(prompts, 20)
    with LLM(str(tmp_path), load_format="dummy", dtype="float32", max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
        ours = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    assert theirs == ours and seconds > 0


def test_llama_cpp_says_why_it_refuses_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    from draftproof.bench.peers.llama_cpp import LlamaCpp

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    monkeypatch.setattr(gguf_file, "of", lambda spec, kind: broken)
    with pytest.raises(ValueError, match=r"llama\.cpp refused the GGUF file: \w+"):
        LlamaCpp(Spec(where="", model="", dtype="float32"))
