"""Allocates an engine's caches: keys and values, per-slot states, and what slots hold beside tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.attention.turns import Turns
from draftproof.cache.pool import LayerKV, PagedCache, PagedKV, allocate
from draftproof.cache.states import LayerState, StateSpec
from draftproof.drafters.base import DraftSpec, OwnEmbeddings
from draftproof.engine.items import ItemStore, SlotItems
from draftproof.engine.loading import memory
from draftproof.engine.loading.base import MOST_ITEM_BYTES, Base
from draftproof.engine.loading.drafters import Drafters
from draftproof.models.decoder import Decoder


def window_groups(base: Base, target: Decoder, drafters: Drafters) -> tuple[memory.WindowGroup, ...]:
    """The target's windowed layers, grouped by window. A drafter's layers have no groups: they keep all positions."""
    num_lookahead = max(drafters.num_drafts, drafters.spec.lookahead)
    return memory.window_groups(
        target.kv, base.dtype, base.config, base.max_model_len, num_lookahead, base.most_rows
    )


def full_layers(shapes: Sequence[PagedKV], groups: Sequence[memory.WindowGroup]) -> list[PagedKV]:
    """The layers that are in no window group."""
    windows = {group.window for group in groups}
    return [shape for shape in shapes if shape.window not in windows]


def slot_items(base: Base, spec: DraftSpec, num_drafts: int) -> SlotItems:
    """The store of what slots hold beside tokens: items, and rotary positions if the target has several axes."""
    num_slots, turns = base.config.max_num_seqs + 1, None
    if any(rope.axes for rope in base.model.ropes):
        turns = Turns(torch.zeros(num_slots, dtype=torch.int64, device=base.device))
    beyond = max(num_drafts, spec.lookahead)
    own = {each: _own_store(base, each) for each in spec.embeds}
    windows_only = base.vision is not None and base.vision.family.windows_only
    return SlotItems(
        base.items,
        num_slots,
        spec.reads_ahead,
        base.device,
        turns,
        beyond,
        own=own,
        windows_only=windows_only,
    )


def _own_store(base: Base, own: OwnEmbeddings) -> ItemStore:
    """A store for the embeddings that a drafter computes of the target's items."""
    store = ItemStore(own.hidden_size, base.device, base.dtype, MOST_ITEM_BYTES, own.added)
    store.encoders = {"image": own.encode}
    return store


def target_cache(
    base: Base, target: Decoder, groups: Sequence[memory.WindowGroup], num_blocks: int, tables_GSB: Tensor
) -> PagedCache:
    """Memory for the target's layers, each with its window's block table and number of blocks, and their states."""
    numbers = {group.window: number for number, group in enumerate(groups, 1)}
    size, layout = base.config.block_size, base.backend.layout
    layers = list[LayerKV]()
    for shape in target.kv:
        number = numbers.get(shape.window, 0)
        held = groups[number - 1].num_blocks(num_blocks) if number else num_blocks
        layers += allocate([shape], tables_GSB[number], held, size, base.dtype, base.device, layout).layers
    return PagedCache(layers, tables_GSB[0], _states(base, target.states))


def draft_cache(base: Base, spec: DraftSpec, num_blocks: int, table_SB: Tensor) -> PagedCache:
    """Memory for the drafter's own layers, all with one block table, and their states."""
    size, layout = base.config.block_size, base.backend.layout
    cache = allocate(spec.kv, table_SB, num_blocks, size, base.dtype, base.device, layout)
    cache.states = _states(base, spec.states)
    return cache


def _states(base: Base, specs: Sequence[StateSpec]) -> list[LayerState]:
    """Memory for states of all slots, the scratch slot included."""
    return [spec.allocate(base.config.max_num_seqs + 1, base.dtype, base.device) for spec in specs]
