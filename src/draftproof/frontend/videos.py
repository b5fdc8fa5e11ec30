"""Videos of prompts, as frames. Those that an encoder sees together are an item of their own, so that a long video is
encoded piece by piece and shares the prefix of another one that begins alike.

Shapes: F frames, N patches of a frame, C channels, P places of a group for a frame (its temporal patch), X numbers of
such a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftproof import schema
from draftproof.engine.items import ItemInput, Places
from draftproof.frontend.images import IMAGE, MOST_FRAMES, ImageReader, Parts
from draftproof.frontend.text import Tokenizer
from draftproof.models.vision_families import VideoFamily
from draftproof.schema import shown

MOST_PIXELS = 1 << 28  # as they are given: the bound of all frames together
SLOWEST = 1e-6  # frames a second
KNOWN = schema.words(
    "fps frames_indices total_num_frames duration video_backend do_sample_frames width height"
)


class VideoReader:
    """Makes items of videos, by the image processor of a model."""

    def __init__(self, images: ImageReader, tokenizer: Tokenizer | None) -> None:
        self._images = images
        self._tokenizer = tokenizer

    def read(self, videos: Any) -> list[Parts]:
        """What stands in a prompt for each of its videos, one or several. ValueError names the first that cannot be
        read."""
        listed = videos if isinstance(videos, list) and not _is_frame(next(iter(videos), None)) else [videos]
        found, num_rows = list[Parts](), 0
        for number, video in enumerate(listed):
            found.append(self._read(video, f"video {number}", num_rows))
            num_rows += sum(part.num_rows for part in found[-1] if isinstance(part, ItemInput))
        return found

    def _read(self, video: Any, where: str, num_before: int) -> Parts:
        """num_before: rows of the prompt's other videos so far."""
        family = self._images.vision.family.video
        if family is None:
            raise ValueError(f"{where}: this model sees no videos; give its frames as images")
        metadata: Mapping[str, Any] = {}
        if isinstance(video, tuple) and len(video) == 2 and isinstance(video[1], Mapping):
            video, metadata = video
        frames = _frames(video, self._images, where)
        sampled = _sampled(metadata, len(frames), where)
        groups = self._groups(frames, family, where, num_before)
        return (
            self._stamped(groups, sampled, family) if family.marks else self._paced(groups, sampled, family)
        )

    def _groups(
        self, frames: Sequence[Any], family: VideoFamily, where: str, num_before: int
    ) -> list[dict[str, Tensor]]:
        """The tensors of each group, as of an image."""
        processor = self._images.processor
        each, size = processor.temporal_patch_size, processor.patch_size
        width, height = frames[0].size
        pixels = _pixels(self._images.vision.directory, family)
        factor = size * processor.merge_size
        try:
            height, width = family.frame_size(len(frames), height, width, factor, each, pixels)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        num_rows = -(-len(frames) // each) * (height // factor) * (width // factor)
        self._images.check_room(num_before + num_rows, where)
        scaled = [frame.resize((width, height), resample=processor.resample) for frame in frames]
        scaled += [scaled[-1]] * (-len(scaled) % each)
        found = processor(images=scaled, do_resize=False, return_tensors="pt")
        values, grid = torch.as_tensor(found["pixel_values"]), torch.as_tensor(found["image_grid_thw"])
        # the processor fills all places of a frame's group with that frame: here each has its own
        values_FNCPX = values.view(len(scaled), -1, 3, each, size * size)
        groups = values_FNCPX.unflatten(0, (-1, each))
        mixed = torch.stack([groups[:, place, :, :, place] for place in range(each)], dim=3).flatten(2)
        return [{"pixel_values": group.clone(), "image_grid_thw": grid[:1].clone()} for group in mixed]

    def _item(self, tensors: dict[str, Tensor], places: Places) -> ItemInput:
        num_rows = self._images.vision.num_rows(tensors)
        return self._images.store.hold(ItemInput.of(IMAGE, tensors, num_rows, places))

    def _stamped(self, groups: list[dict[str, Tensor]], sampled: _Sampled, family: VideoFamily) -> Parts:
        """Groups between marks, each behind its time: that in the middle of its frames."""
        if self._tokenizer is None:
            raise ValueError("multi_modal_data: a video's times are text, and this model has no tokenizer")
        vision, each = self._images.vision, self._images.processor.temporal_patch_size
        first, last = (schema.whole(vision.config, key, "config.json", 0) for key in family.marks)
        seconds = [i / sampled.fps for i in sampled.indices]
        seconds += [seconds[-1]] * (-len(seconds) % each)
        parts = list[ItemInput | list[int]]()
        for number, tensors in enumerate(groups):
            time = (seconds[number * each] + seconds[number * each + each - 1]) / 2
            ids = self._tokenizer.encode(f"<{time:.1f} seconds>", add_special_tokens=False)
            found = vision.places(tensors)
            assert found is not None
            parts += [[*ids, first], self._item(tensors, Places(*found)), [last]]
        return parts

    def _paced(self, groups: list[dict[str, Tensor]], sampled: _Sampled, family: VideoFamily) -> Parts:
        """Groups in one run, each at its time; text goes on past what lies furthest: the last time or a side."""
        vision, each = self._images.vision, self._images.processor.temporal_patch_size
        pace = vision.config["vision_config"].get(family.pace, family.default_pace)
        times = (torch.arange(len(groups)) * (pace * (each / sampled.fps_taken))).long().tolist()
        parts = list[ItemInput]()
        for time, tensors in zip(times, groups, strict=True):
            found = vision.places(tensors)
            assert found is not None
            axes, advance = found
            is_last = len(parts) + 1 == len(groups)
            places = Places(axes + np.array([[time], [0], [0]]), max(advance, time + 1) if is_last else 0)
            parts.append(self._item(tensors, places))
        return parts


def _is_frame(given: Any) -> bool:
    """Whether an entry of a list is a frame rather than a video: a picture, or an array of one."""
    from PIL.Image import Image

    return isinstance(given, (Image, str, Path, bytes)) or getattr(given, "ndim", 0) == 3


def _frames(video: Any, images: ImageReader, where: str) -> list[Any]:
    """Pictures of one size."""
    if isinstance(video, Tensor):
        video = video.detach().cpu().numpy()
    is_array = isinstance(video, np.ndarray)
    if not (is_array and video.ndim == 4) and not isinstance(video, (list, tuple)):
        raise ValueError(
            f"{where}={shown(video)}: must be its frames: uint8 [frames, height, width, 3] or a list of images, alone "
            "or with a dict of fps and frames_indices: (frames, {...})"
        )
    if not 0 < len(video) <= MOST_FRAMES:
        raise ValueError(f"{where}: has {len(video)} frames: must be 1 to {MOST_FRAMES}; leave some out")
    frames = [images.picture(frame, f"{where}: frame {number}") for number, frame in enumerate(video)]
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        raise ValueError(
            f"{where}: has frames of {len(sizes)} sizes, such as {sorted(sizes)[:2]}; scale them alike"
        )
    if sum(frame.width * frame.height for frame in frames) > MOST_PIXELS:
        raise ValueError(f"{where}: has more than {MOST_PIXELS} pixels; leave frames out or scale them down")
    return frames


class _Sampled(NamedTuple):
    """Frames of a video: `fps` of the video that they were taken from, their places in it, and how many of them were
    taken of a second."""

    fps: float
    indices: list[int]
    fps_taken: float


def _sampled(metadata: Mapping[str, Any], num_frames: int, where: str) -> _Sampled:
    """transformers takes a video that does not say for one of 24 frames a second."""
    within = f"{where}: metadata"
    schema.check_known(metadata, within, KNOWN)
    metadata = {key: x.item() if isinstance(x, np.generic) else x for key, x in metadata.items()}
    fps = schema.number(metadata, "fps", within, above=0, default=24)
    total = schema.whole(metadata, "total_num_frames", within, default=num_frames)
    indices = metadata.get("frames_indices")
    indices = list(range(num_frames)) if indices is None else list(indices)
    if len(indices) != num_frames:
        raise ValueError(f"{within}: frames_indices: are {len(indices)}, but there are {num_frames} frames")
    if not all(isinstance(i, (int, np.integer)) and 0 <= i <= schema.MOST for i in indices):
        raise ValueError(f"{within}: frames_indices={shown(indices)}: must be numbers of frames")
    taken = fps if metadata.get("fps") is None else num_frames / total * fps
    schema.check_number(
        f"{within}: frames a second", taken, low=SLOWEST
    )  # else times are no numbers any more
    return _Sampled(fps, [int(i) for i in indices], taken)


def _pixels(directory: Path, family: VideoFamily) -> tuple[int, int]:
    """Fewest and most pixels, by the settings of the video processor, else of the image processor."""
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (directory / name).is_file():
            raw, where = schema.read_json(directory / name), str(directory / name)
            size = schema.section(raw, "size", where)
            low = size.get("shortest_edge", raw.get("min_pixels", family.pixels[0]))
            high = size.get("longest_edge", raw.get("max_pixels", family.pixels[1]))
            return int(low), int(high)
    return family.pixels
