"""What target and drafters have in common: device, dtype, operators, product planner, graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from draftproof.attention.base import AttentionBackend
from draftproof.attention.given import NOTHING_ADDED
from draftproof.config import EngineConfig
from draftproof.engine.items import ItemStore
from draftproof.engine.loading import memory, operators
from draftproof.kernels.ops import Ops
from draftproof.matmul import products
from draftproof.matmul.linear import LinearPlanner
from draftproof.models.config import ModelConfig, read_config, read_vision
from draftproof.models.vision import Vision, is_stored
from draftproof.models.weights import Weights
from draftproof.runtime import graphs, native
from draftproof.runtime.graphs import Graphs

log = logging.getLogger(__name__)
MOST_ITEM_BYTES = 256 << 20  # embeddings of items kept for later requests with the same items
ProgressCallback = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What target and drafters have in common."""

    config: EngineConfig
    directory: Path
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype
    arithmetic: str
    library: native.Library | None
    ops: Ops
    backend: AttentionBackend
    planner: LinearPlanner
    graphs: Graphs
    new_graphs: Callable[[], Graphs]
    items: ItemStore
    vision: Vision | None
    max_model_len: int

    @property
    def most_rows(self) -> int:
        return most_rows(self.config, self.vision)


def most_rows(config: EngineConfig, vision: Vision | None) -> int:
    """Maximum rows of a pass: the token budget, plus an item that must not be split."""
    return config.max_num_batched_tokens + (0 if vision is None else vision.most_whole_rows)


def make_base(config: EngineConfig, directory: Path, progress: ProgressCallback | None) -> Base:
    """Choose device, dtype and operators; certify operators that have no certificate on this machine yet. ValueError
    for settings that cannot run here."""
    model = read_config(directory, overrides=config.hf_overrides)
    device = memory.pick_device(config.device)
    max_model_len = _max_model_len(config, model)
    memory.check_tables(config, max_model_len, _rotary_sizes(model), device)
    where, library = operators.where_to_run(config, model, progress)
    packed_share = 1.0 if library is None else products.packed_share(library, where.dtype)
    log.info("%s", memory.forecast(directory, config, model, where, max_model_len, packed_share))
    ops, backend = operators.select(config, model, where, library, progress)
    vision = vision_of(config, directory)
    new_graphs = partial(graphs.select, device, library, eager=config.enforce_eager)
    return Base(
        config=config,
        directory=directory,
        model=model,
        device=device,
        dtype=where.dtype,
        arithmetic=operators.arithmetic(where, library),
        library=library,
        ops=ops,
        backend=backend,
        planner=LinearPlanner(
            device,
            exact=config.exact,
            max_rows=most_rows(config, vision),
            library=library,
            progress=progress,
        ),
        graphs=new_graphs(),
        new_graphs=new_graphs,
        items=ItemStore(
            model.hidden_size,
            device,
            where.dtype,
            MOST_ITEM_BYTES,
            NOTHING_ADDED if vision is None else vision.added,
        ),
        vision=vision,
        max_model_len=max_model_len,
    )


def vision_of(config: EngineConfig, directory: Path) -> Vision | None:
    """The model's image encoder; None if it has none, or if its files hold no tensors of it."""
    vision = read_vision(directory, config.hf_overrides)
    if vision is None or config.load_format == "dummy":
        return vision
    if is_stored(Weights.open(directory)):
        return vision
    log.info("%s: holds no tensors of an image encoder: the model reads text alone", directory)
    return None


def _rotary_sizes(model: ModelConfig) -> int:
    """Rotary dimensions, summed over all rotary tables of the model."""
    return sum(rope.rotary_dim for rope in model.ropes)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={wanted}: the model was made for max_position_embeddings="
            f"{model.max_position_embeddings}; ask for at most that"
        )
    if config.num_kv_blocks is None:
        return wanted
    room = (config.num_kv_blocks - 1) * config.block_size
    if room < 1 or (config.max_model_len is not None and wanted > room):
        raise ValueError(
            f"num_kv_blocks={config.num_kv_blocks}: one block is kept for scrap, the others hold {room} tokens, less "
            f"than max_model_len={wanted}; raise num_kv_blocks to {-(-wanted // config.block_size) + 1} or lower "
            "max_model_len"
        )
    return min(wanted, room)
