"""Builds replicas from an EngineConfig: the settings and device of each, and what the front end needs of them."""

from __future__ import annotations

import logging
import os

import torch

from draftproof import assets
from draftproof.config import EngineConfig
from draftproof.engine.items import ItemStore
from draftproof.engine.loading.base import MOST_ITEM_BYTES, ProgressCallback, vision_of
from draftproof.engine.loading.build import Loaded
from draftproof.engine.loading.locate import locate
from draftproof.engine.loading.memory import Memory
from draftproof.frontend.replicas import wire
from draftproof.frontend.replicas.entry import Replicas
from draftproof.frontend.replicas.process import environment
from draftproof.models.config import read_config

VISIBLE = "CUDA_VISIBLE_DEVICES"


def build(config: EngineConfig, progress: ProgressCallback | None = None) -> Loaded:
    """Like `engine.loading.build.build`, with an engine of `data_parallel_size` replicas; this process loads no
    weights."""
    _, directory = locate(config, progress)
    model = read_config(directory, overrides=config.hf_overrides)
    vision = vision_of(config, directory)
    engine = Replicas(_setups(config), rule=config.data_parallel_routing, progress=progress)
    hello = engine.hello
    items = ItemStore(model.hidden_size, torch.device("cpu"), torch.float32, MOST_ITEM_BYTES)
    engine.items = items
    return Loaded(
        engine=engine,
        items=items,
        vision=vision,
        directory=directory,
        model=model,
        max_model_len=hello.max_model_len,
        num_drafts=hello.num_drafts,
        methods=hello.methods,
        memory=Memory(**hello.memory),
        arithmetic=hello.arithmetic,
        operators=hello.operators,
        device_name=hello.device_name,
    )


def _setups(config: EngineConfig) -> list[tuple[wire.Setup, dict[str, str]]]:
    """The settings and environment of each replica. ValueError for devices or settings that replicas cannot have."""
    number = config.data_parallel_size
    level = logging.getLogger("draftproof").getEffectiveLevel()
    num_threads = max(1, torch.get_num_threads() // number)
    setups = []
    for own, device in enumerate(devices(config)):
        kind, _, index = device.partition(":")
        changed = {VISIBLE: _visible(int(index))} if kind == "cuda" else {}
        settings = wire.settings_of(config, kind)
        settings["model"] = settings["model"] or assets.default_model().where
        wire.check_settings(settings)
        setups.append((wire.Setup(own, settings, num_threads, level), environment(**changed)))
    return setups


def devices(config: EngineConfig) -> list[str]:
    """The device of each replica: "cpu", or "cuda:N", where N counts the GPUs that this process sees."""
    number, given = config.data_parallel_size, config.device
    listed = given.split(",")
    num_gpus = torch.cuda.device_count()
    if given in ("auto", "cpu", "cuda"):
        is_cpu = given == "cpu" or (given == "auto" and not num_gpus)
        listed = ["cpu" if is_cpu else f"cuda:{own}" for own in range(number)]
    if len(listed) != number:
        raise ValueError(f"device={given!r}: names {len(listed)} devices for data_parallel_size={number}")
    for device in listed:
        kind, _, index = device.partition(":")
        if device != "cpu" and not (kind == "cuda" and index.isdecimal() and int(index) < num_gpus):
            raise ValueError(
                f"device={given!r}: {device} is not here ({num_gpus} GPUs are); replicas have a GPU each, cuda:0 and "
                f"so on, or share a CPU"
            )
    return listed


def _visible(index: int) -> str:
    """The value of `VISIBLE` with which a process sees only this process's GPU number `index`."""
    given = os.environ.get(VISIBLE)
    return str(index) if not given else given.split(",")[index].strip()
