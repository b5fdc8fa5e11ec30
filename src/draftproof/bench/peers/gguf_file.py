"""Writes a checkpoint as a GGUF file, for engines that read only these: Llama, Mistral, Qwen 2 and Qwen 3.

Names of tensors and the order of their rows are in `models/gguf/layout.py`, which the reader shares.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftproof.bench.peers.engine import Spec
from draftproof.models.config import ModelConfig, read_config
from draftproof.models.gguf.layout import (
    ARCHITECTURES,
    CONTROL,
    NORMAL,
    ROPE_DIVISORS,
    UNUSED,
    USER_DEFINED,
    interleave,
    names,
    parts,
    rotated_heads,
)
from draftproof.models.rope import inverse_frequencies
from draftproof.models.tokenizer_file import NAME as TOKENIZER_FILE
from draftproof.models.weights import RandomWeights, Weights, WeightSource, root_of
from draftproof.schema import read_json

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FILE_TYPES = {"BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16", "F32": "ALL_F32"}
PRE_TOKENIZER = "qwen2"  # any: prompts are ids, so no text is tokenized


def of(spec: Spec, kind: str) -> Path:
    """The file of an engine's model, in its scratch folder."""
    random = getattr(torch, spec.dtype) if spec.dummy else None
    return write(spec.directory, Path(spec.scratch) / f"{kind}-{os.getpid()}.gguf", kind, random)


def write(directory: Path, path: Path, kind: str, random: torch.dtype | None = None) -> Path:
    """Write the model of `directory` to `path`, matrices as `kind` ("BF16", "F16", "F32"), vectors in fp32.

    `random`: write the weights that our engine with load_format="dummy" draws in this dtype instead of the stored ones.
    Raises ValueError for a model that is not of Llama's shape.
    """
    import gguf

    config = read_config(directory)
    architecture = check(config)
    weights: WeightSource = Weights.open(directory) if random is None else RandomWeights(0, "cpu", random)
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, config, directory.name, getattr(gguf.LlamaFileType, FILE_TYPES[kind]))
    _add_tokenizer(writer, config, directory)
    for name, tensor in tensors(config, weights):
        stored = "F32" if tensor.dim() == 1 else kind
        data = tensor.to(DTYPES[stored]).contiguous()
        if stored == "BF16":
            raw = data.view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check(config: ModelConfig) -> str:
    """GGUF's name of the architecture; ValueError for a model that this module cannot write."""
    here = f"model_type={config.model_type!r}"
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"{here}: no GGUF file is made of it; can be {', '.join(MODEL_TYPES)}")
    architecture = ARCHITECTURES[config.model_type]
    windows = [layer.window for layer in config.layers]
    if any(0 < window < config.max_position_embeddings for window in windows):
        raise ValueError(
            f"{here}: layers see {max(windows)} positions; GGUF files are made of full attention"
        )
    mixer, _ = parts(config.layers[0])
    if (mixer.rope.type != "default" and architecture != "llama") or mixer.rope.type == "yarn":
        raise ValueError(f"{here}: rope_type={mixer.rope.type!r}: no GGUF file is made of it")
    if (mixer.qkv_bias and architecture == "qwen3") or (mixer.o_bias and architecture != "llama"):
        raise ValueError(f"{here}: has biases for which GGUF's {architecture} has no place")
    if architecture == "qwen2" and mixer.num_heads * mixer.head_dim != config.hidden_size:
        raise ValueError(
            f"{here}: head_dim={mixer.head_dim}: GGUF's qwen2 has hidden_size / num_attention_heads"
        )
    return architecture


def tensors(config: ModelConfig, weights: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """GGUF's name and content of every tensor, in the dtypes of the checkpoint."""
    mixer, _ = parts(config.layers[0])
    for name, ours, shape in names(config, root_of(weights)):
        tensor = weights.get(ours, shape)
        num_heads = rotated_heads(name, config)
        yield name, interleave(tensor, num_heads) if num_heads else tensor
    if mixer.rope.type != "default":  # llama.cpp divides the plain frequencies by these
        plain = dataclasses.replace(mixer.rope, type="default")
        yield ROPE_DIVISORS, inverse_frequencies(plain) / inverse_frequencies(mixer.rope)


def _describe(writer: Any, config: ModelConfig, name: str, file_type: int) -> None:
    mixer, ffn = parts(config.layers[0])
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(ffn.width)
    writer.add_head_count(mixer.num_heads)
    writer.add_head_count_kv(mixer.num_kv_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_value_length(mixer.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(mixer.rope.theta)
    writer.add_rope_dimension_count(mixer.rope.rotary_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, config: ModelConfig, directory: Path) -> None:
    """Add the folder's vocabulary and merges; if it is not BPE, declare that there is no tokenizer."""
    path = directory / TOKENIZER_FILE
    raw = read_json(path) if path.is_file() else {}
    model = raw.get("model", {})
    if model.get("type") != "BPE":
        writer.add_tokenizer_model("no_vocab")
        return
    tokens, types = vocabulary(model["vocab"], raw.get("added_tokens", []), config.vocab_size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    end = config.eos_token_ids[0] if config.eos_token_ids else 0
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)  # some readers require one
    writer.add_add_bos_token(False)


def vocabulary(
    vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]], size: int
) -> tuple[list[str], list[int]]:
    """Text and type of every id below `size`; ids without a token get a unique filler text."""
    tokens, types = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    entries = [(text, i, NORMAL) for text, i in vocab.items()]
    entries += [(a["content"], a["id"], CONTROL if a.get("special") else USER_DEFINED) for a in added]
    for text, i, kind in entries:
        if i < size:
            tokens[i], types[i] = text, kind
    return tokens, types
