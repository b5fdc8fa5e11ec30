"""The vision part of a model, read from its config by its family's row in `models/vision_families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftproof import schema
from draftproof.attention.given import Added
from draftproof.models.vision_families import FAMILIES, Grid, Settings, Tensors, VisionFamily
from draftproof.models.weights import Weights, WeightSource

# Keys of a config or of its vision_config on which the processor's tensors and the number of rows depend.
_PROCESSED_BY = (
    *("patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels", "image_size"),
    *("pooling_kernel_size", "mm_tokens_per_image", "vision_feature_select_strategy"),
)
# Fields of `VisionFamily` on which they depend; equal for a family's dense and mixture-of-experts models.
_READ_BY = ("inputs", "num_rows", "line", "breaks", "options", "places", "video")


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """The vision part of a model, as data. `config`: content of config.json; `placeholder`: token id that stands for a
    row of an image; `directory`: holds the processor's settings; `marks`: see `VisionFamily`, -1 if the config has
    none."""

    family: VisionFamily
    config: Mapping[str, Any]
    placeholder: int
    directory: Path
    marks: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether an image's rows attend to each other in both directions."""
        return self.family.is_whole(self.config)

    @property
    def processor(self) -> Settings:
        """The processor's settings in the files; empty if there are none."""
        for name in ("preprocessor_config.json", "processor_config.json"):
            path = self.directory / name
            if path.is_file():
                found = schema.read_json(path)
                return schema.section(found, "image_processor", str(path)) or found
        return {}

    @property
    def video_placeholder(self) -> int:
        """The token id that stands for a row of a video; -1: videos are not supported."""
        video = self.family.video
        return -1 if video is None else schema.whole(self.config, video.placeholder, "config.json", 0)

    @property
    def placeholders(self) -> tuple[int, int]:
        """Token ids that stand for rows of items."""
        return self.placeholder, self.video_placeholder

    def num_rows(self, tensors: Tensors) -> int:
        return self.family.num_rows(self.config, tensors)

    @property
    def most_whole_rows(self) -> int:
        """Rows by which a pass may exceed its limit, because the rows of a whole image are computed in one pass."""
        most = self.family.most_rows
        return 0 if most is None or not self.is_whole else most(self.config, self.processor)

    def carries(self, tensors: Tensors) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """For families whose lines of rows end with a token: which of an image's positions have an embedding, bool [N];
        None: all."""
        if self.family.line is None:
            return None
        length = self.family.line(self.config, tensors)
        return np.arange(self.num_rows(tensors) // length * (length + 1)) % (length + 1) < length

    @property
    def options(self) -> Settings:
        """Arguments for the processor beside its own settings."""
        return {} if self.family.options is None else self.family.options(self.config)

    @property
    def added(self) -> Added:
        """What is added to the residual stream after the first layers at an image's rows."""
        return self.family.added(self.config)

    def reads_as(self, other: Vision) -> bool:
        """Whether its encoder takes the tensors of the other's processor, and makes as many rows of them."""
        read = [[getattr(v.family, name) for name in _READ_BY] for v in (self, other)]
        sizes = [
            [part.get(key) for part in (v.config, v.config["vision_config"]) for key in _PROCESSED_BY]
            for v in (self, other)
        ]
        return read[0] == read[1] and sizes[0] == sizes[1]

    def places(self, tensors: Tensors) -> tuple[Grid, int] | None:
        """See `VisionFamily`."""
        return None if self.family.places is None else self.family.places(self.config, tensors)


def family_of(raw: Mapping[str, Any]) -> VisionFamily | None:
    """The row for a config, by its model_type and, if that is ambiguous, its encoder's; None for a text model."""
    kind, encoder = raw.get("model_type"), raw.get("vision_config")
    own = f"{kind}/{encoder.get('model_type')}" if isinstance(encoder, Mapping) else ""
    return FAMILIES.get(own) or FAMILIES.get(str(kind))


def read(raw: Mapping[str, Any], where: str, directory: Path) -> Vision | None:
    """The vision part of a config; None for a text model."""
    family = family_of(raw)
    if family is None or (not family.text and raw.get("vision_config") is None):
        return None
    key = next((key for key in family.placeholders if raw.get(key) is not None), None)
    if key is None and not family.text:
        return None
    if key is None or not isinstance(raw.get("vision_config"), Mapping):
        raise ValueError(f"{where}: must hold {family.placeholders[0]!r} and 'vision_config'; add them")
    tower = raw["vision_config"].get("model_type")
    if family.towers and tower not in family.towers:
        known = " or ".join(family.towers)
        raise ValueError(
            f"{where}: vision_config: model_type={schema.shown(tower)}: not supported, only {known}"
        )
    marks = tuple(
        next((schema.whole(raw, name, where, 0) for name in names if raw.get(name) is not None), -1)
        for names in family.marks
    )
    return Vision(family, raw, schema.whole(raw, key, where, 0), directory, marks)


def is_stored(weights: WeightSource) -> bool:
    """Whether the files contain an image encoder; random weights always do."""
    return not isinstance(weights, Weights) or any(
        "vision_tower." in name or "visual." in name for name in weights.names()
    )


def text_part(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The language model's config in that of a vision model; any other config unchanged."""
    family = family_of(raw)
    if family is None or not family.text:
        return raw
    if "text_config" not in raw and family.flat:
        return {**{k: v for k, v in raw.items() if k not in family.keys}, "model_type": family.text}
    inner = schema.section(raw, "text_config", where)
    outer = {k: v for k, v in raw.items() if k in family.text_keys and v is not None}
    known = (
        family.keys
        | family.text_keys
        | {"text_config", "model_type", "architectures", "transformers_version"}
    )
    strange = next((k for k in raw if k not in known), None)
    if strange is not None:
        raise schema.unknown_key(strange, raw[strange], where, known)
    kind = str(inner.get("model_type", family.text))
    return {"model_type": kind, **family.text_defaults.get(kind, {}), **inner, **outer}
