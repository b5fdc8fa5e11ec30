"""Converts a GGUF file's metadata to the keys of a config.json: each key is read, known to be harmless, or refused.

Shapes: F frequencies of a rotary embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from draftproof.models.families import FAMILIES
from draftproof.models.gguf.file import GgufFile
from draftproof.models.gguf.layout import ARCHITECTURES, ROPE_DIVISORS
from draftproof.models.rope import RopeConfig, inverse_frequencies
from draftproof.schema import did_you_mean, shown, words

_MODEL_TYPES = {architecture: name for name, architecture in ARCHITECTURES.items() if name != "mistral"}
# GGUF key without the architecture's prefix -> key of config.json.
_NEEDED: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OTHERS = words(
    """attention.head_count_kv attention.key_length attention.value_length attention.sliding_window
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.original_context_length"""
)
_GEMMA = words("attention.sliding_window_pattern rope.freq_base_swa final_logit_softcapping")
_HARMLESS = words("vocab_size rope.scaling.finetuned attention.causal tensor_data_layout")
_ABSENT = words("expert_count expert_used_count attn_logit_softcapping")  # must be 0 or missing
_TOKENS: Mapping[str, str] = {"bos": "bos", "eos": "eos", "padding": "pad"}
_END_KEYS = ("eos", "eot", "eom")
# Control tokens that end a turn, for files whose metadata names only the end of text.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>"})
_SAMPLING: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LARGE_GEMMA = 62  # layers of the only Gemma 3 whose scores are scaled by hidden_size / num_attention_heads
_TOLERANCE = 1e-4  # relative, between stored divisors and those of a known type


def read(file: GgufFile) -> dict[str, Any]:
    """The content of config.json. ValueError for an architecture or a key that is not understood."""
    architecture = _architecture(file)
    given = _Keys(file, architecture)
    given.check(_GEMMA if architecture == "gemma3" else frozenset())
    model_type = _MODEL_TYPES[architecture]
    raw = {ours: given.needed(theirs) for theirs, ours in _NEEDED.items()}
    heads = given.needed("attention.head_count")
    raw["num_key_value_heads"] = given.get("attention.head_count_kv", heads)
    raw["head_dim"] = _head_dim(given, raw)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(
            f"{file.path}: tensor 'token_embd.weight' is missing; the file is incomplete: download it again"
        )
    raw["vocab_size"] = embedding.shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    if architecture == "gemma3":
        raw |= _gemma(given, raw)
    else:
        raw |= _llama_like(given, raw)
    if architecture == "llama" and raw.get("sliding_window") is not None:
        model_type = "mistral"
    for theirs, ours in _TOKENS.items():
        raw[f"{ours}_token_id"] = file.field(f"tokenizer.ggml.{theirs}_token_id", int)
    named = {"model_type": model_type, "architectures": [FAMILIES[model_type].architectures[0]]}
    return {**named, "dtype": "bfloat16", **raw}


def generation(file: GgufFile) -> dict[str, Any]:
    """The content of generation_config.json: all end tokens, and the author's sampling settings."""
    ends = [file.field(f"tokenizer.ggml.{name}_token_id", int) for name in _END_KEYS]
    tokens = file.field("tokenizer.ggml.tokens", list, [])
    ends += [i for i, token in enumerate(tokens) if token in _TURN_ENDS]
    found: dict[str, Any] = {}
    known = list(dict.fromkeys(token for token in ends if token is not None))
    if known:
        found["eos_token_id"] = known if len(known) > 1 else known[0]
    for theirs, ours in _SAMPLING.items():
        value = file.field(f"general.sampling.{theirs}", (int, float))
        if value is not None:
            found[ours] = value
    return found


class _Keys:
    """The fields that begin with the architecture's name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._start = f"{architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.fields.get(self._start + key, default)

    def needed(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(
                f"{self.file.path}: {self._start}{key} is missing; the file is incomplete: download it again"
            )
        return value

    def wrong(self, key: str, why: str) -> ValueError:
        return ValueError(
            f"{self.file.path}: {self._start}{key}={shown(self.get(key))}: {why}; take the checkpoint that this file "
            "was made of"
        )

    def check(self, own: frozenset[str]) -> None:
        """Raise ValueError for an unknown key, which may change the arithmetic."""
        known = {*_NEEDED, *_OTHERS, *own, *_HARMLESS}
        for name, value in self.file.fields.items():
            key = name.removeprefix(self._start)
            if key == name or key in known or (key in _ABSENT and not value):
                continue
            hint = did_you_mean(key, known)
            raise self.wrong(key, f"is not understood, so results might be wrong{hint and '; ' + hint}")


def _architecture(file: GgufFile) -> str:
    found = file.field("general.architecture", str)
    if found is None:
        raise ValueError(f"{file.path}: general.architecture is missing; the file holds no model")
    if found not in _MODEL_TYPES:
        raise file.unsupported("general.architecture", _MODEL_TYPES)
    return str(found)


def _head_dim(given: _Keys, raw: Mapping[str, Any]) -> Any:
    """Head size. ValueError if heads do not rotate as a whole, or values have another size."""
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        raise given.wrong("attention.head_count", "must be one number of at least 1")
    rotated = given.get("rope.dimension_count")
    size = given.get("attention.key_length", hidden // heads if rotated is None else rotated)
    for key in ("rope.dimension_count", "attention.value_length"):
        if given.get(key, size) != size:
            raise given.wrong(key, f"heads of {size} sizes that all rotate are supported, and no others")
    return size


def _llama_like(given: _Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for positions and biases, for architectures like Llama."""
    tensors = given.file.tensors
    window, length = given.get("attention.sliding_window"), raw["max_position_embeddings"]
    found: dict[str, Any] = {"rope_theta": given.get("rope.freq_base", 10000.0)}
    scaling = _scaling(given, raw)
    if scaling:
        found["rope_scaling"] = scaling
    if given.file.fields["general.architecture"] != "qwen2":  # its config has no such key
        found["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if given.file.fields["general.architecture"] == "llama":
        found["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if isinstance(window, int) and isinstance(length, int) and 0 < window < length:
        if given.file.fields["general.architecture"] != "llama":
            raise given.wrong("attention.sliding_window", "is supported for llama and gemma3")
        found["sliding_window"] = window
    return found


def _gemma(given: _Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys for layers of Gemma 3. The scale of scores is not in the file; as in llama.cpp, the number of layers decides
    it."""
    found: dict[str, Any] = {
        "rope_theta": given.needed("rope.freq_base"),
        "rope_local_base_freq": given.get("rope.freq_base_swa", 10000.0),
        "sliding_window": given.needed("attention.sliding_window"),
        "query_pre_attn_scalar": raw["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }
    if raw["num_hidden_layers"] == _LARGE_GEMMA:
        found["query_pre_attn_scalar"] = raw["hidden_size"] // raw["num_attention_heads"]
    pattern = given.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):  # True for each layer that slides
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    else:
        found["sliding_window_pattern"] = pattern
    if given.get("final_logit_softcapping"):
        found["final_logit_softcapping"] = given.get("final_logit_softcapping")
    scaling = _scaling(given, raw)
    if scaling:
        found["rope_scaling"] = scaling
    return found


def _scaling(given: _Keys, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scaling of the rotary embedding, or None."""
    if ROPE_DIVISORS in given.file.tensors:
        return _of_divisors(given, raw)
    kind = given.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise given.wrong("rope.scaling.type", "supported are none, linear and yarn")
    found = {"rope_type": kind, "factor": given.needed("rope.scaling.factor")}
    if kind == "yarn":
        original = given.get("rope.scaling.original_context_length")
        found |= {} if original is None else {"original_max_position_embeddings": original}
    return found


def _of_divisors(given: _Keys, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The type of rotary embedding whose frequencies are the plain ones divided by the file's `rope_freqs.weight`.

    A file holds only the computed divisors, so known settings are tried: Llama 3's factors 1 and 4, and an original
    length that is a power of two.
    """
    plain = RopeConfig(theta=given.get("rope.freq_base", 10000.0), rotary_dim=raw["head_dim"])
    file, plain_F = given.file, inverse_frequencies(plain)
    stored_F = file.read(ROPE_DIVISORS, tuple(plain_F.shape), torch.float32)
    factor = float(stored_F.max())
    if factor == 1:
        return None
    if torch.equal(stored_F, stored_F[:1].expand_as(stored_F)):
        return {"rope_type": "linear", "factor": factor}
    for length in (1 << power for power in range(5, 25)):
        tried = dataclasses.replace(plain, type="llama3", factor=factor, original_max_positions=length)
        if torch.allclose(plain_F / inverse_frequencies(tried), stored_F, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": tried.low_freq_factor,
                "high_freq_factor": tried.high_freq_factor,
                "original_max_position_embeddings": length,
            }
    raise ValueError(
        f"{file.path}: tensor {ROPE_DIVISORS!r}: is neither of rope_type 'llama3' nor 'linear'; take the checkpoint "
        "that this file was made of"
    )
