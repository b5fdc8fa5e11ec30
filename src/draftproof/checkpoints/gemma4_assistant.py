"""Assistants of Gemma 4 as their authors publish them: `model_type: gemma4_assistant`, layers in `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftproof import schema
from draftproof.drafters.context import DraftCheckpoint
from draftproof.drafters.gemma4 import Gemma4Settings
from draftproof.models import config as model_config
from draftproof.models.gemma_config import TOWER_KEYS
from draftproof.models.reading import check_keys
from draftproof.models.weights import Weights, WeightSource
from draftproof.schema import flag, whole

_OWN_KEYS = schema.words(
    """model_type text_config backbone_hidden_size num_centroids centroid_intermediate_top_k use_ordered_embeddings
    tie_word_embeddings dtype torch_dtype"""
)


def matches(directory: Path, raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == "gemma4_assistant"


def read(directory: Path, raw: Mapping[str, Any], weights: WeightSource | None = None) -> DraftCheckpoint:
    """The assistant in `directory`. All its layers read the target's keys and values, even if the file omits that."""
    where = str(directory / "config.json")
    check_keys(raw, where, _OWN_KEYS | TOWER_KEYS)
    within = f"{where}: text_config"
    text: dict[str, Any] = {**schema.section(raw, "text_config", where)}
    num_layers = whole(text, "num_hidden_layers", within)
    shared = whole(text, "num_kv_shared_layers", within, 0, default=0) or num_layers
    if shared != num_layers:
        raise ValueError(
            f"{within}: num_kv_shared_layers={shared}, but num_hidden_layers={num_layers}: an assistant has no keys "
            "and values of its own, so the two must be equal"
        )
    size = whole(text, "hidden_size_per_layer_input", within, 0, default=0)
    if size:
        raise ValueError(f"{within}: hidden_size_per_layer_input={size}: must be 0 in an assistant")
    if flag(text, "enable_moe_block", within):
        raise ValueError(f"{within}: enable_moe_block=True: must be false in an assistant")
    text |= {"num_kv_shared_layers": num_layers, "hidden_size_per_layer_input": 0}
    tied = flag(raw, "tie_word_embeddings", where, flag(text, "tie_word_embeddings", within, True))
    layers = model_config.parse({**text, "tie_word_embeddings": tied}, where=within)
    ordered = flag(raw, "use_ordered_embeddings", where)
    num_centroids = whole(raw, "num_centroids", where, default=2048)
    num_chosen = whole(raw, "centroid_intermediate_top_k", where, default=32)
    return DraftCheckpoint(
        method="gemma4_mtp",
        where=where,
        settings=Gemma4Settings(
            layers=layers,
            backbone_hidden_size=whole(raw, "backbone_hidden_size", where, default=1536),
            num_centroids=num_centroids if ordered else 0,
            num_chosen=num_chosen if ordered else 0,
        ),
        weights=Weights.open(directory) if weights is None else weights,
        directory=directory,
    )
