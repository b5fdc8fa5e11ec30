"""Locates the target's folder; if the model given is a draft head, adapts the config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from draftproof import assets
from draftproof.checkpoints import detect
from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.drafters import vllm_names
from draftproof.engine.loading.plans import Files
from draftproof.models.loading import resolve
from draftproof.models.weights import RandomWeights
from draftproof.runtime.native import Progress


def locate(config: EngineConfig, progress: Progress | None = None) -> tuple[EngineConfig, Path]:
    """(config, the target's folder). A draft head given as `model` becomes the drafter, and names its target itself.
    ValueError if that does not fit the other settings."""
    if config.model is None:
        return config, resolve(assets.default_model().where, progress=progress)
    directory = resolve(config.model, config.revision, load_format=config.load_format, progress=progress)
    given = vllm_names.named(config.speculative_config or SpeculativeConfig())
    # otherwise hf_overrides are meant for another head
    is_drafter = given.model is None or Path(given.model) == directory
    if not detect.is_draft_head(directory, given.hf_overrides if is_drafter else None):
        return config, directory
    weights = Files(directory, RandomWeights(), config.load_format).weights(given)
    head = detect.read(directory, weights, given.hf_overrides)
    target = detect.target_of(head)
    if target is None:
        raise ValueError(
            f"model={config.model!r}: is a draft head that does not name its target; give the target as model and "
            "this folder as speculative_config['model']"
        )
    if not vllm_names.accepts(given.method, head.method):
        raise ValueError(
            f"model={config.model!r} is a draft head for {head.method!r}, but speculative_config['method']="
            f"{given.method!r}: leave the method out, or give the target as model"
        )
    if given.model is not None and Path(given.model) != directory:
        raise ValueError(
            f"model={config.model!r} is a draft head, and speculative_config['model']={given.model!r} names another; "
            "give the target as model"
        )
    config = dataclasses.replace(config, speculative_config=dataclasses.replace(given, model=str(directory)))
    return config, resolve(target)
