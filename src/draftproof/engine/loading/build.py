"""Builds an engine from an EngineConfig: finds the files, loads the models, sizes the cache, wires the parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from draftproof.config import EngineConfig
from draftproof.engine.encoders import CertifiedEncoder, name_of
from draftproof.engine.engine import Engine
from draftproof.engine.items import ItemStore
from draftproof.engine.loading import memory, operators
from draftproof.engine.loading.base import MOST_ITEM_BYTES, Base, ProgressCallback, make_base
from draftproof.engine.loading.caches import full_layers, window_groups
from draftproof.engine.loading.drafters import load_members, together
from draftproof.engine.loading.locate import locate
from draftproof.engine.loading.plans import Files, draft_plans
from draftproof.engine.loading.wiring import make_engine
from draftproof.models.config import ModelConfig
from draftproof.models.decoder import Decoder
from draftproof.models.image_encoder import ImageEncoder
from draftproof.models.vision import Vision
from draftproof.models.weights import RandomWeights, Weights, WeightSource
from draftproof.runtime.room import give_back_freed_memory, keep_freed_memory
from draftproof.runtime.threads import own_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine, and what its front end needs to know about it."""

    engine: Engine
    items: ItemStore
    vision: Vision | None
    directory: Path
    model: ModelConfig
    max_model_len: int
    num_drafts: int  # K, 0 without a drafter
    methods: tuple[str, ...]  # of the drafter, or of a chain's members
    memory: memory.Memory
    arithmetic: str
    operators: str
    device_name: str  # "cpu", or a GPU's


@torch.inference_mode(False)  # tensors made here are written to later, inside and outside of inference mode
@own_precision()
def build(config: EngineConfig, progress: ProgressCallback | None = None) -> Loaded:
    """Build the engine. ValueError for a mistake of the user, raised before expensive work where possible."""
    config, directory = locate(config, progress)
    base = make_base(config, directory, progress)
    speculative = config.speculative_config
    random = RandomWeights(1, base.device, base.dtype)
    files = Files(directory, random, config.load_format, config.hf_overrides)
    plans = draft_plans(speculative, files) if speculative else []
    num_drafts = max((plan.num_drafts for plan in plans), default=0)
    dummy = config.load_format == "dummy"
    target_weights = RandomWeights(0, base.device, base.dtype) if dummy else Weights.open(directory)
    num_encoder_bytes = _load_encoder(base, target_weights)
    target = Decoder.load(
        target_weights, base.model, base.ops, base.planner, base.device, base.dtype,
        max_positions=base.max_model_len + num_drafts + 1,
    )  # fmt: skip
    num_target_bytes = base.planner.weight_bytes
    num_target_packed = base.planner.num_packed
    members = load_members(base, target, target_weights, plans, num_drafts)
    base.planner.certify()
    drafters = together(base, plans, members)
    groups = window_groups(base, target, drafters)
    engine, num_graph_bytes = make_engine(base, target, drafters, groups, progress)
    target_packed = base.planner.packed(0, num_target_packed)
    draft_packed = base.planner.packed(num_target_packed, base.planner.num_packed)
    used = memory.Memory(
        weights=num_target_bytes + sum(linear.held_bytes for linear in target_packed),
        unread=sum(linear.stored_bytes - linear.weight_bytes for linear in target_packed),
        encoder=num_encoder_bytes + sum(own.num_bytes for own in drafters.spec.embeds),
        items=MOST_ITEM_BYTES * (1 + len(drafters.spec.embeds)) if base.vision else 0,
        draft_weights=base.planner.weight_bytes - num_target_bytes
        + sum(linear.held_bytes for linear in draft_packed),
        kv_bytes_per_token=memory.bytes_per_token(full_layers(target.kv, groups), base.dtype),
        draft_kv_bytes_per_token=memory.bytes_per_token(drafters.spec.kv, base.dtype),
        num_blocks=engine.scheduler.pages.num_blocks, block_size=config.block_size, graphs=num_graph_bytes,
        window_kv=sum(
            pages.num_blocks * config.block_size * group.bytes_per_token
            for pages, group in zip(engine.scheduler.windows, groups, strict=True)
        ),
    )  # fmt: skip
    if base.device.type == "cpu":  # return the memory that loading freed, and keep what is freed from now on
        give_back_freed_memory()
        keep_freed_memory()
    return Loaded(
        engine=engine,
        items=base.items,
        vision=base.vision,
        directory=directory,
        model=base.model,
        max_model_len=base.max_model_len,
        num_drafts=drafters.num_drafts,
        methods=drafters.methods,
        memory=used,
        arithmetic=base.arithmetic,
        operators=operators.describe(base.library),
        device_name=torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else "cpu",
    )


def _load_encoder(base: Base, weights: WeightSource) -> int:
    """Load the image encoder into `base.items`, and return the bytes of its weights; 0 if the model has none."""
    if base.vision is None:
        return 0
    encoder = ImageEncoder(base.vision, weights, base.device, base.dtype)
    # the certificate is about the number of threads, which only a CPU has
    is_certified = base.config.exact and base.device.type == "cpu"
    base.items.encoders["image"] = (
        CertifiedEncoder(encoder, name_of(base.vision, base.dtype)) if is_certified else encoder
    )
    return encoder.num_bytes
