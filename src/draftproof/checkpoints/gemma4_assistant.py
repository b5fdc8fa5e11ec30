"""Assistants of Gemma 4 as their authors publish them: `model_type: gemma4_assistant`, layers in `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof.drafters.build import DraftCheckpoint
from draftproof.drafters.gemma4 import Gemma4Settings
from draftproof.models import config as model_config
from draftproof.models.loading import Weights, WeightSource


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == "gemma4_assistant"


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """All layers borrow keys and values, whether the file says so or leaves it out."""
    where = str(directory / "config.json")
    text: dict[str, Any] = {**(raw.get("text_config") or {})}
    num_layers, shared = text.get("num_hidden_layers"), text.get("num_kv_shared_layers") or None
    if shared not in (None, num_layers):
        raise ValueError(
            f"{where}: num_kv_shared_layers={shared}, but num_hidden_layers={num_layers}: an assistant has no keys "
            "and values of its own, so the two must be equal"
        )
    if text.get("hidden_size_per_layer_input"):
        size = text["hidden_size_per_layer_input"]
        raise ValueError(f"{where}: hidden_size_per_layer_input={size}: must be 0 in an assistant")
    if text.get("enable_moe_block"):
        raise ValueError(
            f"{where}: enable_moe_block={text['enable_moe_block']!r}: must be false in an assistant"
        )
    text |= {"num_kv_shared_layers": num_layers, "hidden_size_per_layer_input": 0}
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    layers = model_config.parse({**text, "tie_word_embeddings": tied}, where=where)
    ordered = raw.get("use_ordered_embeddings", False)
    return DraftCheckpoint(
        method="gemma4_mtp",
        where=where,
        settings=Gemma4Settings(
            layers=layers,
            backbone_hidden_size=raw.get("backbone_hidden_size", 1536),
            num_centroids=raw.get("num_centroids", 2048) if ordered else 0,
            num_chosen=raw.get("centroid_intermediate_top_k", 32) if ordered else 0,
        ),
        weights=Weights.open(directory) if weights is None else weights,
        directory=directory,
    )
