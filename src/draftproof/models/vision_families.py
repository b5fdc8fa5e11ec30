"""Model families that read images: a table with one row per family.

A row says how an encoder's output enters the language model: which token ids stand for an image's rows, how many rows
there are, and their positions for the rotary embedding. `models/vision.py` applies a row to a config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from draftproof import schema
from draftproof.attention.given import NOTHING_ADDED, Added

Grid = np.ndarray[Any, np.dtype[np.int64]]
Tensors = Mapping[str, Tensor]  # one image's tensors, by the processor's names
Settings = Mapping[str, Any]  # of a processor, or a config


def _never(config: Settings) -> bool:
    return False


def _always(config: Settings) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFamily:
    """How a family reads a video: groups of frames, each encoded like an image. `placeholder`: config key of the token
    id for their rows. `marks`: config keys of the ids before and after each group, whose time stands before them as
    text; empty: the rows of all groups are contiguous, and the time axis advances per second by `vision_config`'s
    `pace`, or else `default_pace`. `frame_size`: (frames, height, width, factor, frames per group, (fewest, most)
    pixels) -> (height, width) that frames are scaled to; `pixels`: these bounds if no file has them."""

    placeholder: str = "video_token_id"
    marks: tuple[str, ...] = ()
    pace: str = "tokens_per_second"
    default_pace: float = 4
    frame_size: Callable[[int, int, int, int, int, tuple[int, int]], tuple[int, int]]
    pixels: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """One row of the table. Functions take the config, unless their arguments are named.

    The config. `text`: family of the language model if the config names none, empty if that family's reader takes
    nested configs; `flat`: the language model's keys may be at the top level. `keys`: config keys that are not the
    language model's. `text_defaults`: language model's type -> values of keys that files leave out. `towers`: supported
    types of encoders, empty: any. `unmade`: config keys of other encoders, which are not built. `prefixes`: (prefix of
    the module's tensor names, prefix that files may have instead).

    The prompt. `placeholders`: config keys of the token id for a row of an image; the first one found counts. `marks`:
    config keys of the ids before and after an image's rows; `marked`: an image's mark in a text, and its expansion,
    made of {first}, {place} and {last}. `line`: (config, tensors) -> rows per line of an image, and `breaks`: texts of
    the tokens after each line but the last, and after the last; None: no line breaks.

    The image. `inputs`: the processor's tensors that the encoder takes; `options`: further arguments of the processor.
    `num_rows`: (config, tensors) -> number of rows; `most_rows`: (config, processor's settings) -> most rows of any
    image, for whole images. `is_whole`: whether an image's rows attend to each other; `windows_only`: only in layers
    with sliding windows. `places`: (config, tensors) -> (positions on the rotary axes, advance of the text); None: as
    text. `added`: what is added to the residual stream after the first layers. `video`: None if not supported.
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
        """Keys of a nested config that also apply to its language model."""
        return schema.words(
            "eos_token_id bos_token_id dtype torch_dtype tie_word_embeddings quantization_config"
        )


def _rows_of_grid(config: Mapping[str, Any], tensors: Tensors) -> int:
    merge = int(config["vision_config"].get("spatial_merge_size", 2))
    return int(tensors["image_grid_thw"].prod()) // merge**2


def _places_of_grid(config: Mapping[str, Any], tensors: Tensors) -> tuple[Grid, int]:
    """Rows are in order of time, height and width; text continues after the longer side."""
    merge = int(config["vision_config"].get("spatial_merge_size", 2))
    time, height, width = (int(x) for x in tensors["image_grid_thw"].view(-1))
    sides = height // merge, width // merge
    return np.indices((time, *sides), dtype=np.int64).reshape(3, -1), max(sides)


def _deepstack(config: Mapping[str, Any]) -> Added:
    """Adds states of several encoder layers, one per decoder layer. Taps see the residual stream with them, as in vLLM;
    transformers' `output_hidden_states` lacks what is added after the same layer."""
    return Added(num_layers=len(config["vision_config"].get("deepstack_visual_indexes", (8, 16, 24))))


def _size_of_frame(
    num: int, height: int, width: int, factor: int, group: int, pixels: tuple[int, int]
) -> tuple[int, int]:
    """The size of a frame by bounds per frame, like an image's."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    found: tuple[int, int] = smart_resize(height, width, factor, *pixels)
    return found


def _size_in_video(
    num: int, height: int, width: int, factor: int, group: int, pixels: tuple[int, int]
) -> tuple[int, int]:
    """The size of a frame by bounds of all frames together."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    found: tuple[int, int] = smart_resize(max(num, group), height, width, group, factor, *pixels)
    return found


def _rows_of_square(config: Mapping[str, Any], tensors: Tensors) -> int:
    """A row per patch, in CLIP after one for the whole image; the first row is left out unless the config says
    "full"."""
    patch = int(config["vision_config"].get("patch_size", 14))
    height, width = tensors["pixel_values"].shape[-2:]
    is_whole = config.get("vision_feature_select_strategy", "default") == "full"
    has_own = str(config["vision_config"].get("model_type")) == "clip_vision_model"
    return (height // patch) * (width // patch) + has_own - (not is_whole)


def _rows_as_told(config: Settings, _: Settings) -> int:
    return int(config.get("mm_tokens_per_image", 256))


def _rows_of_patches(config: Settings, tensors: Tensors) -> int:
    """A row per square of patches; patches that are padding have no position and no row."""
    side = int(config["vision_config"].get("pooling_kernel_size", 3))
    return int((tensors["image_position_ids"] >= 0).all(-1).sum()) // side**2


def _most_soft_tokens(config: Settings, processor: Settings) -> int:
    return int(processor.get("max_soft_tokens", 280))


def _side_of_row(config: Settings) -> int:
    """Side, in pixels, of the square that a row shows."""
    return int(config["vision_config"].get("patch_size", 16)) * int(config.get("spatial_merge_size", 1))


def _rows_of_lines(config: Settings, tensors: Tensors) -> int:
    return int((tensors["image_sizes"].view(-1) // _side_of_row(config)).prod())


def _row_of_lines(config: Settings, tensors: Tensors) -> int:
    return int(tensors["image_sizes"].view(-1)[1]) // _side_of_row(config)


def _whole_rows_of_pixels(config: Settings) -> Settings:
    return {"patch_size": _side_of_row(config)}


def _sees_images_whole(config: Settings) -> bool:
    return (config.get("text_config") or {}).get("use_bidirectional_attention") == "vision"


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
# Images of any size, as lines of rows.
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
