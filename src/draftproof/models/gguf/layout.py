"""GGUF's names of a model's tensors, and how their layout differs from a checkpoint's; for reading and writing.

Shapes: D hidden size, F width of the MLP, H heads, K heads of keys, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from draftproof.models.config import ModelConfig
from draftproof.models.ffns.dense import DenseConfig
from draftproof.models.mixers.attention import AttentionConfig
from draftproof.models.spec import LayerSpec

ARCHITECTURES: Mapping[str, str] = {  # model type -> GGUF's name
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
INTERLEAVED = "llama"  # the architecture that stores rotated pairs of q and k next to each other
ROPE_DIVISORS = "rope_freqs.weight"  # divisors of the rotary embedding's plain frequencies
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens

Shape = tuple[int, ...]
Named = tuple[str, str, Shape]  # GGUF's name, ours, shape
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def names(config: ModelConfig, root: str) -> Iterator[Named]:
    """Every tensor of the model; those of a layer in order of use."""
    D, V = config.hidden_size, config.vocab_size
    yield "token_embd.weight", f"{root}embed_tokens.weight", (V, D)
    for i, layer in enumerate(config.layers):
        ours, theirs = f"{root}layers.{i}.", f"blk.{i}."
        for part, name in (_SANDWICH_NORMS if layer.norms.style == "sandwich" else _PRE_NORMS).items():
            yield f"{theirs}{part}.weight", f"{ours}{name}.weight", (D,)
        for part, name, shape in _layer(layer, D):
            yield f"{theirs}{part}", f"{ours}{name}", shape
    yield "output_norm.weight", f"{root}norm.weight", (D,)
    if not config.tie_word_embeddings:
        yield "output.weight", "lm_head.weight", (V, D)


def parts(layer: LayerSpec) -> tuple[AttentionConfig, DenseConfig]:
    """(mixer, feed-forward part), of the only kinds that these architectures have."""
    assert isinstance(layer.mixer, AttentionConfig) and isinstance(layer.ffn, DenseConfig)
    return layer.mixer, layer.ffn


def _layer(layer: LayerSpec, D: int) -> Iterator[Named]:
    """The tensors of a layer except its norms."""
    mixer, ffn = parts(layer)
    E, F = mixer.head_dim, ffn.width
    heads, kv_heads = mixer.num_heads * E, mixer.num_kv_heads * E
    if mixer.qk_norm:
        for letter in "qk":
            yield f"attn_{letter}_norm.weight", f"self_attn.{letter}_norm.weight", (E,)
    for part, name, (rows, columns), has_bias in (
        ("attn_q", "self_attn.q_proj", (heads, D), mixer.qkv_bias),
        ("attn_k", "self_attn.k_proj", (kv_heads, D), mixer.qkv_bias),
        ("attn_v", "self_attn.v_proj", (kv_heads, D), mixer.qkv_bias),
        ("attn_output", "self_attn.o_proj", (D, heads), mixer.o_bias),
        ("ffn_gate", "mlp.gate_proj", (F, D), ffn.bias),
        ("ffn_up", "mlp.up_proj", (F, D), ffn.bias),
        ("ffn_down", "mlp.down_proj", (D, F), ffn.bias),
    ):
        yield f"{part}.weight", f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{part}.bias", f"{name}.bias", (rows,)


def rotated_heads(name: str, config: ModelConfig) -> int:
    """Number of heads of GGUF's tensor `name` if its rows are interleaved, else 0."""
    if ARCHITECTURES[config.model_type] != INTERLEAVED:
        return 0
    mixer, _ = parts(config.layers[0])
    if ".attn_q." in name:
        return mixer.num_heads
    return mixer.num_kv_heads if ".attn_k." in name else 0


def interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k with rotated pairs next to each other, as llama.cpp wants Llama's: a head's halves,
    (0, 1, ..., E/2, E/2 + 1, ...), become (0, E/2, 1, E/2 + 1, ...)."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def separate(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k in a checkpoint's order: the inverse of `interleave`."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
