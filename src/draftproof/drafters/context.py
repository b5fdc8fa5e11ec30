"""The context that a draft method is built in: its parsed checkpoint and the engine around it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftproof.config import EngineConfig, SpeculativeConfig
from draftproof.drafters.base import Drafter
from draftproof.models.builder import LayerBuilder
from draftproof.models.decoder import Decoder
from draftproof.models.vision import Vision
from draftproof.models.weights import WeightSource, head_of, root_of

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """A draft checkpoint in the project's own terms, independent of its file format.

    `settings` is the method's dataclass; `num_drafts` the checkpoint's own K; `target` the model it was trained for, as
    the files name it; `num_target_layers`: that model's number of layers, if the files say so; `tap_shift`: the offset
    added to the files' ids of tapped layers, so that messages can show the files' own ids.
    """

    method: str
    where: str
    settings: object
    weights: WeightSource
    directory: Path
    num_drafts: int | None = None
    target: str | None = None
    num_target_layers: int | None = None
    tap_shift: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """Everything that a method may need at start. `builder` makes layers from the checkpoint, exempt from exactness.

    `own`: this drafter's settings (a chain member's too), with K resolved. `max_model_len`: maximum number of tokens;
    `max_positions`: that plus the positions of drafts beyond the end; `inner`: the drafter built from the config's
    `drafters`, for methods that run others; `vision`: the target's image settings. `notes`: what the log line says
    about the drafter: where "taps" come from, whose "embed_tokens" and "lm_head" it uses, how the "vocabulary" is
    mapped.
    """

    config: EngineConfig
    own: SpeculativeConfig
    options: Mapping[str, Any]
    num_drafts: int
    checkpoint: DraftCheckpoint | None
    target: Decoder
    target_weights: WeightSource
    target_directory: Path
    builder: LayerBuilder
    max_model_len: int
    max_positions: int
    inner: Drafter | None = None
    vision: Vision | None = None
    notes: dict[str, str] = field(default_factory=dict)

    def settings(self, kind: type[S]) -> S:
        """The checkpoint's settings; ValueError if no checkpoint was given."""
        if self.checkpoint is None:
            raise ValueError("speculative_config: this method needs 'model': the folder of its checkpoint")
        assert isinstance(self.checkpoint.settings, kind), self.checkpoint.settings
        return self.checkpoint.settings

    def takes_embeddings(self, hidden_size: int) -> bool:
        """Whether a network of this width reads the target's embeddings at rows that carry some (images). No
        checkpoint says which it was trained with, so it is a setting."""
        fits = hidden_size == self.target.config.hidden_size
        wanted = self.own.image_inputs
        if wanted == "embeddings" and not fits:
            raise ValueError(
                f"speculative_config: image_inputs='embeddings': the drafter's are {hidden_size} wide, the target's "
                f"{self.target.config.hidden_size}; use 'tokens'"
            )
        return fits and wanted != "tokens"

    @property
    def build(self) -> LayerBuilder:
        """Deprecated name of `builder`, kept for one version."""
        warnings.warn("DraftBuild.build: is DraftContext.builder now", DeprecationWarning, stacklevel=2)
        return self.builder

    @property
    def tokenizer_directory(self) -> Path:
        """The folder of the target's tokenizer."""
        named = self.config.tokenizer
        return self.target_directory if named is None else Path(named)

    @property
    def target_head_name(self) -> str:
        """Name of the target's output matrix: its own, or the embedding it is tied to."""
        tied = self.target.config.tie_word_embeddings
        return self.target_embed_name if tied else f"{head_of(self.target_weights)}.weight"

    @property
    def target_embed_name(self) -> str:
        return f"{root_of(self.target_weights)}embed_tokens.weight"

    @property
    def device(self) -> torch.device:
        return self.builder.device
