"""Families whose prompts hold images: a table with one row a family, and the encoders that transformers has for them.

What is the families' own is where an encoder's output enters: which ids stand for an image's rows, how many there are,
and where they stand for the rotary embedding. Encoders run one image at a time, on one thread of a CPU, so that an
image's embeddings depend on nothing else.
Shapes: N rows of an image, H hidden size, X an embedding and what is added behind it (`attention.given`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof import schema
from draftproof.attention.given import NOTHING_ADDED, Added
from draftproof.models.weights import Weights, WeightSource
from draftproof.runtime.threads import own_precision, threads

Grid = np.ndarray[Any, np.dtype[np.int64]]
Tensors = Mapping[str, Tensor]  # one image's, as its processor names them
Settings = Mapping[str, Any]  # a processor's, or a config's


def _never(config: Settings) -> bool:
    return False


def _always(config: Settings) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFamily:
    """How a family sees a video: frames in groups, of which each is encoded as an image is. `placeholder`: the config
    key of the id that stands for their rows. `marks`: keys of ids around each group, which follow its time in words;
    none: the rows of all groups are one run, apart on the axis of time by `vision_config`'s `pace`, or else
    `default_pace`, a second. `frame_size`: (frames, height, width, factor, frames of a group, fewest and most pixels)
    -> height and width that frames are scaled to; `pixels`: those bounds where no file has them."""

    placeholder: str = "video_token_id"
    marks: tuple[str, ...] = ()
    pace: str = "tokens_per_second"
    default_pace: float = 4
    frame_size: Callable[[int, int, int, int, int, tuple[int, int]], tuple[int, int]]
    pixels: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """One row. `text`: the family of its language model where the config does not name one, empty where that family's
    reader takes nested configs; `flat`: a config may hold that one's keys beside the others. `placeholders`: config
    keys of the id that stands for a row of an image, the first found counts. `keys`: those of a config that are not its
    language model's. `inputs`: the processor's tensors that its encoder takes. `towers`: types of encoders that are
    understood, none: whatever is there. `is_whole`: whether an image's rows see each other, by the config;
    `windows_only`: in layers with windows alone. `marks`: config keys of the ids that stand before and after an
    image's rows; `marked`: what stands for an image in a text, and what is written in its place, of {first}, {place}
    and {last}. `num_rows`: an image's, by the config and its tensors; `most_rows`: of any image, by the config and the
    processor's settings, where an image is whole. `line`: rows of a line of an image, and `breaks`: texts of the tokens
    that stand after each line but the last, and after that; none: rows follow each other. `options`: what its processor
    is told, by the config. `places`: where its rows stand on the axes of its rotary embedding, and by how much text
    moves on; None: in a row, as text does. `added`: what goes into the stream after the first layers at its rows.
    `video`: None where it sees none. `unmade`: config keys of other encoders. `prefixes`: what names of the module's
    tensors begin with, and what files may have in its place. `text_defaults`: by the language model's type, values of
    keys that files leave out.
    """

    model_type: str
    architectures: tuple[str, ...]
    text: str
    flat: bool = False
    placeholders: tuple[str, ...] = ("image_token_id", "image_token_index")
    keys: frozenset[str]
    inputs: tuple[str, ...] = ("pixel_values",)
    towers: tuple[str, ...] = ()
    is_whole: Callable[[Settings], bool] = _never
    windows_only: bool = False
    marks: tuple[tuple[str, ...], ...] = ()
    marked: tuple[str, str] = ("", "")
    num_rows: Callable[[Settings, Tensors], int]
    most_rows: Callable[[Settings, Settings], int] | None = None
    line: Callable[[Settings, Tensors], int] | None = None
    breaks: tuple[str, ...] = ()
    options: Callable[[Settings], Settings] | None = None
    places: Callable[[Settings, Tensors], tuple[Grid, int]] | None = None
    added: Callable[[Settings], Added] = lambda config: NOTHING_ADDED
    video: VideoFamily | None = None
    unmade: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = (("", ""), ("", "model."))
    text_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def text_keys(self) -> frozenset[str]:
        """Keys of a nested config that hold for its language model too."""
        return schema.words(
            "eos_token_id bos_token_id dtype torch_dtype tie_word_embeddings quantization_config"
        )


def _rows_of_grid(config: Mapping[str, Any], tensors: Tensors) -> int:
    merge = int(config["vision_config"].get("spatial_merge_size", 2))
    return int(tensors["image_grid_thw"].prod()) // merge**2


def _places_of_grid(config: Mapping[str, Any], tensors: Tensors) -> tuple[Grid, int]:
    """Rows in order of time, height and width; text goes on past the longer side."""
    merge = int(config["vision_config"].get("spatial_merge_size", 2))
    time, height, width = (int(x) for x in tensors["image_grid_thw"].view(-1))
    sides = height // merge, width // merge
    return np.indices((time, *sides), dtype=np.int64).reshape(3, -1), max(sides)


def _deepstack(config: Mapping[str, Any]) -> Added:
    """States of so many of the encoder's layers. Taps see the stream with them, as in vLLM; transformers'
    `output_hidden_states` is without what the layer's own output is given."""
    return Added(num_layers=len(config["vision_config"].get("deepstack_visual_indexes", (8, 16, 24))))


def _size_of_frame(
    num: int, height: int, width: int, factor: int, group: int, pixels: tuple[int, int]
) -> tuple[int, int]:
    """The bounds are of a frame, as those of an image are."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    found: tuple[int, int] = smart_resize(height, width, factor, *pixels)
    return found


def _size_in_video(
    num: int, height: int, width: int, factor: int, group: int, pixels: tuple[int, int]
) -> tuple[int, int]:
    """The bounds are of all frames together."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    found: tuple[int, int] = smart_resize(max(num, group), height, width, group, factor, *pixels)
    return found


def _rows_of_square(config: Mapping[str, Any], tensors: Tensors) -> int:
    """A row a patch; CLIP's own row, which is about the whole image, is left out unless the config says otherwise."""
    patch = int(config["vision_config"].get("patch_size", 14))
    height, width = tensors["pixel_values"].shape[-2:]
    is_whole = config.get("vision_feature_select_strategy", "default") == "full"
    has_own = str(config["vision_config"].get("model_type")) == "clip_vision_model"
    return (height // patch) * (width // patch) + (is_whole and has_own)


def _rows_as_told(config: Settings, _: Settings) -> int:
    return int(config.get("mm_tokens_per_image", 256))


def _rows_of_patches(config: Settings, tensors: Tensors) -> int:
    """A row a square of patches; a patch that only fills up has no position."""
    side = int(config["vision_config"].get("pooling_kernel_size", 3))
    return int((tensors["image_position_ids"] >= 0).all(-1).sum()) // side**2


def _most_soft_tokens(config: Settings, processor: Settings) -> int:
    return int(processor.get("max_soft_tokens", 280))


def _side_of_row(config: Settings) -> int:
    """Pixels of a side of what a row shows."""
    return int(config["vision_config"].get("patch_size", 16)) * int(config.get("spatial_merge_size", 1))


def _rows_of_lines(config: Settings, tensors: Tensors) -> int:
    return int((tensors["image_sizes"].view(-1) // _side_of_row(config)).prod())


def _row_of_lines(config: Settings, tensors: Tensors) -> int:
    return int(tensors["image_sizes"].view(-1)[1]) // _side_of_row(config)


def _whole_rows_of_pixels(config: Settings) -> Settings:
    return {"patch_size": _side_of_row(config)}


def _sees_images_whole(config: Settings) -> bool:
    return (config.get("text_config") or {}).get("use_bidirectional_attention") == "vision"


# Keys of a config or of its encoder's part that say what a processor makes of an image, and how many rows it has.
_PROCESSED_BY = (
    *("patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels", "image_size"),
    *("pooling_kernel_size", "mm_tokens_per_image", "vision_feature_select_strategy"),
)

_LLAMA = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_MISTRAL3 = {
    **{"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None},
}
_LLAVA_KEYS = schema.words(
    """vision_config image_token_id image_token_index image_seq_length multimodal_projector_bias projector_hidden_act
    vision_feature_layer vision_feature_select_strategy ignore_index pad_token_id vocab_size"""
)
# An image of any size, as lines of rows.
_PIXTRAL = VisionFamily(
    model_type="llava/pixtral",
    architectures=("LlavaForConditionalGeneration",),
    text="mistral",
    keys=_LLAVA_KEYS,
    inputs=("pixel_values", "image_sizes"),
    towers=("pixtral",),
    num_rows=_rows_of_lines,
    line=_row_of_lines,
    breaks=("[IMG_BREAK]", "[IMG_END]"),
    options=_whole_rows_of_pixels,
    text_defaults={"mistral": _MISTRAL},
)

_QWEN3_VL = VisionFamily(
    model_type="qwen3_vl",
    architectures=("Qwen3VLForConditionalGeneration",),
    text="qwen3_vl_text",
    keys=schema.words(
        "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id"
    ),
    inputs=("pixel_values", "image_grid_thw"),
    num_rows=_rows_of_grid,
    places=_places_of_grid,
    added=_deepstack,
    video=VideoFamily(
        marks=("vision_start_token_id", "vision_end_token_id"),
        frame_size=_size_in_video,
        pixels=(128 * 32 * 32, 768 * 32 * 32),
    ),
)

FAMILIES: Mapping[str, VisionFamily] = {
    row.model_type: row
    for row in (
        VisionFamily(
            model_type="qwen2_5_vl",
            architectures=("Qwen2_5_VLForConditionalGeneration",),
            text="qwen2_5_vl_text",
            flat=True,
            keys=schema.words(
                "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id"
            ),
            inputs=("pixel_values", "image_grid_thw"),
            num_rows=_rows_of_grid,
            places=_places_of_grid,
            video=VideoFamily(frame_size=_size_of_frame, pixels=(128 * 28 * 28, 768 * 28 * 28)),
        ),
        _QWEN3_VL,
        replace(
            _QWEN3_VL,
            model_type="qwen3_vl_moe",
            architectures=("Qwen3VLMoeForConditionalGeneration",),
            text="qwen3_vl_moe_text",
        ),
        VisionFamily(
            model_type="llava",
            architectures=("LlavaForConditionalGeneration",),
            text="llama",
            keys=_LLAVA_KEYS,
            towers=("clip_vision_model", "siglip_vision_model"),
            num_rows=_rows_of_square,
            prefixes=(("", ""), ("", "model."), ("vision_tower.", "vision_tower.vision_model.")),
            text_defaults={"llama": _LLAMA, "mistral": _MISTRAL},
        ),
        _PIXTRAL,
        replace(
            _PIXTRAL,
            model_type="mistral3",
            architectures=("Mistral3ForConditionalGeneration",),
            keys=_LLAVA_KEYS | {"spatial_merge_size"},
            text_defaults={"mistral": _MISTRAL3},
        ),
        VisionFamily(
            model_type="gemma3",
            architectures=("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
            text="",
            keys=frozenset(),
            num_rows=_rows_as_told,
            most_rows=_rows_as_told,
            is_whole=_always,
            marks=(("boi_token_id", "boi_token_index"), ("eoi_token_id", "eoi_token_index")),
            marked=("{first}", "\n\n{first}{place}{last}\n\n"),
            prefixes=(
                ("", ""),
                ("", "model."),
                ("vision_tower.", "vision_tower.vision_model."),
                ("vision_tower.", "model.vision_tower.vision_model."),
            ),
        ),
        VisionFamily(
            model_type="gemma4",
            architectures=("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
            text="",
            keys=frozenset(),
            inputs=("pixel_values", "image_position_ids"),
            num_rows=_rows_of_patches,
            most_rows=_most_soft_tokens,
            is_whole=_sees_images_whole,
            windows_only=True,
            marks=(("boi_token_id",), ("eoi_token_id",)),
            marked=("{place}", "{first}{place}{last}"),
            unmade=("audio_config",),
        ),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """The part of a model that reads images, as data. `config`: the file's content; `placeholder`: the id that stands
    for a row of an image; `directory`: where its processor's settings are; `marks`: see `VisionFamily`, -1 where the
    config names none."""

    family: VisionFamily
    config: Mapping[str, Any]
    placeholder: int
    directory: Path
    marks: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether an image's rows see each other."""
        return self.family.is_whole(self.config)

    @property
    def processor(self) -> Settings:
        """What the files say of the processor; nothing where they do not."""
        for name in ("preprocessor_config.json", "processor_config.json"):
            path = self.directory / name
            if path.is_file():
                found = schema.read_json(path)
                return schema.section(found, "image_processor", str(path)) or found
        return {}

    @property
    def video_placeholder(self) -> int:
        """The id that stands for a row of a video; -1: it sees none."""
        video = self.family.video
        return -1 if video is None else schema.whole(self.config, video.placeholder, "config.json", 0)

    @property
    def placeholders(self) -> tuple[int, int]:
        """Ids that stand for no token."""
        return self.placeholder, self.video_placeholder

    def num_rows(self, tensors: Tensors) -> int:
        return self.family.num_rows(self.config, tensors)

    @property
    def most_whole_rows(self) -> int:
        """Rows by which a pass may be longer than it is allowed to be, since an image's rows are computed together."""
        most = self.family.most_rows
        return 0 if most is None or not self.is_whole else most(self.config, self.processor)

    def carries(self, tensors: Tensors) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Which of an image's places carry its rows, where lines of them end with a token; None: all."""
        if self.family.line is None:
            return None
        length = self.family.line(self.config, tensors)
        return np.arange(self.num_rows(tensors) // length * (length + 1)) % (length + 1) < length

    @property
    def options(self) -> Settings:
        """What the processor is told beside its own settings."""
        return {} if self.family.options is None else self.family.options(self.config)

    @property
    def added(self) -> Added:
        """What goes into the stream after the first layers at an image's rows."""
        return self.family.added(self.config)

    def reads_as(self, other: Vision) -> bool:
        """Whether its encoder takes the tensors that the other's processor gives, and makes as many rows of them."""
        sizes = [
            [part.get(key) for part in (v.config, v.config["vision_config"]) for key in _PROCESSED_BY]
            for v in (self, other)
        ]
        return self.family == other.family and sizes[0] == sizes[1]

    def places(self, tensors: Tensors) -> tuple[Grid, int] | None:
        """See `VisionFamily`."""
        return None if self.family.places is None else self.family.places(self.config, tensors)


def family_of(raw: Mapping[str, Any]) -> VisionFamily | None:
    """The row for a config, by its type and perhaps its encoder's; None for a model of text."""
    kind, encoder = raw.get("model_type"), raw.get("vision_config")
    own = f"{kind}/{encoder.get('model_type')}" if isinstance(encoder, Mapping) else ""
    return FAMILIES.get(own) or FAMILIES.get(str(kind))


def read(raw: Mapping[str, Any], where: str, directory: Path) -> Vision | None:
    """The part of a config that concerns images; None for a model that reads none."""
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
    """Whether the files hold an encoder of images; random weights are whatever is asked for."""
    return not isinstance(weights, Weights) or any(
        "vision_tower." in name or "visual." in name for name in weights.names()
    )


def text_part(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config of the language model in a config that reads images; any other as it is."""
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


class ImageEncoder:
    """transformers' encoder of a model's images, with what takes its output to the language model's width."""

    def __init__(
        self, vision: Vision, weights: WeightSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        """ValueError where the files lack one of its tensors, or hold one of another shape."""
        self._module = _module(vision, dtype)
        self._inputs = vision.family.inputs
        self._device = device
        named = {**dict(self._module.named_parameters()), **_stored_buffers(self._module)}
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(
                    weights.get(_name_in(weights, name, vision.family.prefixes), tuple(tensor.shape))
                )
        self._module.to(device)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._module.parameters())

    def __call__(self, tensors: Tensors) -> Tensor:
        """The embeddings of one image, and behind each what else its row is given, [N, X], whatever else is computed
        beside it and however torch is set."""
        # libraries choose by how memory is aligned; arrays of others lie anywhere
        given = {name: tensors[name].to(self._device, copy=True) for name in self._inputs}
        with torch.inference_mode(), threads(1), own_precision():
            found = self._module.get_image_features(**given)
            parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
            return torch.cat([_flat(part) for part in parts], dim=1)


def _flat(found: Tensor | Sequence[Tensor]) -> Tensor:
    """The rows of one image, which some encoders give in several pieces."""
    pieces = [found] if isinstance(found, Tensor) else found
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])


# What the smallest language model says of itself in its config.
_STUMP: Settings = {
    **{"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": None, "intermediate_size": 8},
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
    **{"moe_intermediate_size": 8},
}


def _module(vision: Vision, dtype: torch.dtype) -> Any:
    """The model without its language model, of which a stump is made and dropped."""
    from transformers import AutoConfig, AutoModel

    raw = {k: v for k, v in vision.config.items() if k not in ("quantization_config", "torch_dtype", "dtype")}
    config = AutoConfig.for_model(**raw)
    for key in vision.family.unmade:
        setattr(config, key, None)
    text = config.get_text_config()
    for key, least in _STUMP.items():
        if hasattr(text, key):
            setattr(text, key, least)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    module = AutoModel.from_config(config, dtype=dtype)
    del module.language_model
    return module.eval().requires_grad_(False)


def _stored_buffers(module: Any) -> dict[str, Tensor]:
    """Buffers that checkpoints hold."""
    state = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in state}


def _name_in(weights: WeightSource, name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """What files call a tensor of the module."""
    names = (theirs + name.removeprefix(own) for own, theirs in prefixes if name.startswith(own))
    return next((each for each in names if each in weights), name)
