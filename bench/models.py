"""Models measured with random weights: published shapes, with configs in bench/shapes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

SHAPES = Path(__file__).resolve().parent / "shapes"
DUMMY = "8b"
SHAPES_OF = {DUMMY: "llama-3.1-8b", "qwen": "qwen3-8b", "moe": "glm-4-moe-2b"}
NUM_DRAFTS = 5


@dataclass(frozen=True)
class Shape:
    """A model and its EAGLE-3 head, as keywords of `LLM`. `small`: folder for shrunk versions, which are used then."""

    name: str
    device: str
    small: Path | None = None

    def target(self) -> dict[str, Any]:
        folder = str(self.folder())
        return {"model": folder, "device": self.device, "dtype": "bfloat16", "load_format": "dummy"}

    def drafter(self) -> dict[str, Any]:
        """`speculative_config` of the head, with always `NUM_DRAFTS` drafts."""
        head = str(self.folder("-eagle3"))
        return {"model": head, "num_speculative_tokens": NUM_DRAFTS, "policy": "fixed"}

    def folder(self, suffix: str = "") -> Path:
        source = SHAPES / f"{SHAPES_OF[self.name]}{suffix}"
        return source if self.small is None else shrunk(source, self.small / source.name)


def shrunk(source: Path, into: Path) -> Path:
    """Write a shrunk model or head of the same architecture into the folder `into`, to try a script on a CPU."""
    sizes = {
        **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 4096},
    }
    raw = json.loads((source / "config.json").read_text())
    if "transformer_layer_config" in raw:
        raw["transformer_layer_config"] |= sizes
        raw |= {"draft_vocab_size": 512, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    else:
        raw |= {**sizes, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2}
        raw |= {"moe_intermediate_size": 128} if "moe_intermediate_size" in raw else {}
    into.mkdir(exist_ok=True)
    (into / "config.json").write_text(json.dumps(raw))
    return into


def with_words(source: Path, into: Path) -> Path:
    """Write a model's config and a tokenizer for as many ids, with words as tokens, into the folder `into`, so that
    detokenizing is part of the measurement."""
    config = json.loads((source / "config.json").read_text())
    words = {f" {number:x}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=" 0"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(into / "tokenizer.json"))
    (into / "config.json").write_text(json.dumps(config))
    return into
