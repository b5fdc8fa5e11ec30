"""Small GGUF files, written with the gguf library: random weights of several quantisations, and a real vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from draftproof import assets
from draftproof.models.config import ModelConfig, parse
from draftproof.models.gguf.layout import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, names, parts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ("Q8_0", "F16", "BF16", "Q4_0", "F32", "Q5_0")  # used by the matrices in turn
SHAPE = {
    "vocab_size": 0, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 5e5},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6},
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 32, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256, "head_dim": 256,
    },
}  # fmt: skip
Tokens = tuple[list[str], list[int], Mapping[str, Any]]  # texts, types, further fields


def byte_level(pre: str) -> Tokens:
    """The embedded model's vocabulary, and one user-defined token."""
    raw = json.loads((assets.path(assets.TARGET) / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = dict(sorted(raw["model"]["vocab"].items(), key=lambda pair: pair[1]))
    special = {token["id"] for token in raw["added_tokens"]}
    tokens = [*vocab, "<think>"]
    types = [*(CONTROL if i in special else NORMAL for i in vocab.values()), USER_DEFINED]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
    ids = {"bos": vocab["<|im_start|>"], "eos": vocab["<|im_end|>"], "padding": vocab["<|pad|>"]}
    return (
        tokens,
        types,
        {"model": "gpt2", "pre": pre, "merges": merges, "ids": ids, "add_bos": pre == "llama-bpe"},
    )


def sentencepiece(texts: Sequence[str], *, gemma: bool) -> Tokens:
    """A vocabulary with bytes and scores, trained on `texts`; Gemma's has runs of spaces, and meaningless scores."""
    trained: Any = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="never" if gemma else "first")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    pieces = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] if gemma else ["<unk>", "<s>", "</s>"]
    control += ["<|im_start|>", "<|im_end|>"]
    spaces = [" " * n for n in range(2, 9)] if gemma else []
    single = [piece for piece, _ in pieces if len(piece) == 1]
    longer = [piece for piece, _ in pieces if len(piece) > 1]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, *spaces, *data, *longer, *single]
    types = [UNKNOWN if token == "<unk>" and not gemma else CONTROL for token in control]
    types += [USER_DEFINED] * len(spaces) + [BYTE] * len(data) + [NORMAL] * len(pieces)
    scores = [0.0 if gemma else -float(i) for i in range(len(tokens))]
    names_of = ("<bos>", "<eos>", "<unk>", "<pad>") if gemma else ("<s>", "</s>", "<unk>", None)
    keys = ("bos", "eos", "unknown", "padding")
    ids = {key: tokens.index(name) for key, name in zip(keys, names_of, strict=True) if name}
    more = {"model": "llama", "pre": "default", "scores": scores, "ids": ids, "add_bos": True}
    return tokens, types, {**more, "add_space_prefix": not gemma}


def write(path: Path, architecture: str, tokens: Tokens, seed: int = 0, **fields: Any) -> ModelConfig:
    """Write a file, and return its model's config. fields: further metadata, without the architecture's prefix."""
    import gguf

    config = parse({**SHAPE, **FAMILIES[architecture], "vocab_size": len(tokens[0])})
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer, config, architecture)
    for key, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{architecture}.{key}", value)
    add_tokens(writer, tokens)
    for name, kind, numbers in tensors(config, seed):
        quantised = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16"):
            writer.add_tensor(name, numbers.astype(np.float32 if kind == "F32" else np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(numbers, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def describe(writer: Any, config: ModelConfig, architecture: str) -> None:
    """Add the metadata of the model."""
    mixer, ffn = parts(config.layers[0])
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(ffn.width)
    writer.add_head_count(mixer.num_heads)
    writer.add_head_count_kv(mixer.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    full, *_ = (rope for layer in config.layers if not layer.window for rope in layer.mixer.ropes)
    writer.add_rope_freq_base(full.theta)
    if architecture != "qwen2":
        writer.add_key_length(mixer.head_dim)
        writer.add_value_length(mixer.head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(mixer.head_dim)
        writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma3":
        writer.add_sliding_window(config.layers[0].window)


def add_tokens(writer: Any, tokens: Tokens) -> None:
    """Add the metadata of the tokenizer."""
    texts, types, more = tokens
    writer.add_tokenizer_model(more["model"])
    writer.add_tokenizer_pre(more["pre"])
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if "merges" in more:
        writer.add_token_merges(more["merges"])
    if "scores" in more:
        writer.add_token_scores(more["scores"])
    for key, token_id in more["ids"].items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)
    writer.add_add_bos_token(more["add_bos"])
    if "add_space_prefix" in more:
        writer.add_add_space_prefix(more["add_space_prefix"])
    writer.add_chat_template(TEMPLATE)


def tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, str, np.ndarray[Any, Any]]]:
    """(name, kind, numbers) of each tensor: matrices in all kinds that fit, vectors in fp32, like llama.cpp."""
    numbers = np.random.default_rng(seed)
    for i, (name, _, shape) in enumerate(names(config, "model.")):
        drawn = numbers.standard_normal(shape, np.float32) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            drawn += 1
        yield name, KINDS[i % len(KINDS)] if len(shape) > 1 else "F32", drawn
