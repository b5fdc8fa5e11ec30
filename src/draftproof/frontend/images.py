"""Images of prompts: from what a caller gives to what the model's encoder reads, and the rows of the prompt for them.

Whatever is wrong with an image ends as one ValueError that says which image of the prompt it is.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.engine.interface import Item
from draftproof.engine.items import ItemInput, ItemStore, Places
from draftproof.frontend.fetching import PORTS, Fetcher, Remote
from draftproof.frontend.text import Tokenizer
from draftproof.models.vision import Vision
from draftproof.schema import shown

IMAGE = "image"  # the kind of item, and the key of multi_modal_data
MOST_PIXELS = 1 << 26  # of an image as it is stored: a file of a few bytes may claim any number
MOST_BYTES = 1 << 26  # of a file, or of a data URI
MOST_ASPECT = 200  # of its longer side to its shorter one
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # Pillow's, of 8 bits and fewer a channel


class ImageReader:
    """Makes items of images. Holds nothing that changes but the processor, which is loaded when it is first needed."""

    def __init__(
        self, vision: Vision, store: ItemStore, allowed: Path | None = None, fetcher: Fetcher | None = None
    ) -> None:
        """allowed: the folder that messages may name files of; fetcher: of what they may name elsewhere; None: they may
        not."""
        self._fetcher = fetcher
        self._vision = vision
        self._store = store
        self._allowed = None if allowed is None else allowed.resolve()

    @functools.cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self._vision.directory, backend="pil")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self._vision.directory}: has no image processor that can be read ({_first_line(error)}); add "
                "preprocessor_config.json"
            ) from error

    def read(self, images: Any) -> list[ItemInput]:
        """The inputs of the images of a prompt, one or several. ValueError names the first that cannot be read."""
        listed = list(images) if isinstance(images, (list, tuple)) else [images]
        return [self._read(image, f"image {number}") for number, image in enumerate(listed)]

    def _read(self, image: Any, where: str) -> ItemInput:
        from PIL.Image import DecompressionBombError

        try:
            picture = _picture(self.fetched(image), where)
            found = self._processor(images=[picture], return_tensors="pt", **self._vision.options)
        except ValueError as error:
            if str(error).startswith(getattr(image, "where", where)):
                raise
            raise ValueError(f"{where}: {error}") from error
        except (OSError, SyntaxError, ArithmeticError, MemoryError, DecompressionBombError) as error:
            raise ValueError(f"{where}: cannot be read: {_first_line(error)}; give another file") from error
        vision = self._vision
        tensors: dict[str, Tensor] = {name: torch.as_tensor(found[name]) for name in vision.family.inputs}
        places = vision.places(tensors)
        carries = vision.carries(tensors)
        num_rows = vision.num_rows(tensors) if carries is None else len(carries)
        return self._store.hold(
            ItemInput.of(IMAGE, tensors, num_rows, None if places is None else Places(*places), carries)
        )

    def place(
        self, token_ids: Sequence[int], inputs: Sequence[ItemInput], tokenizer: Tokenizer | None = None
    ) -> tuple[list[int], tuple[Item, ...]]:
        """The prompt with as many ids for each image as it has rows, where it had one. ValueError where there are not
        as many places as images."""
        breaks = self._breaks(tokenizer) if inputs else ()
        placeholder = self._vision.placeholder
        num_places = list(token_ids).count(placeholder)
        if num_places != len(inputs):
            raise ValueError(
                f"prompt: has {num_places} places for images (token id {placeholder}), but {len(inputs)} are given in "
                "multi_modal_data; give one for each"
            )
        placed, items = list[int](), list[Item]()
        left = iter(inputs)
        for token in token_ids:
            if token != placeholder:
                placed.append(token)
                continue
            image = next(left)
            items.append(Item(image.content, len(placed), image.num_rows, self._vision.is_whole))
            placed += _ids(image, placeholder, breaks)
        return placed, tuple(items)

    def _breaks(self, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Ids of the tokens that end an image's lines."""
        breaks = self._vision.family.breaks
        found = tuple(None if tokenizer is None else tokenizer.token_id(text) for text in breaks)
        if None in found:
            raise ValueError(
                f"multi_modal_data: an image of this model is written with {' and '.join(breaks)}, which its tokenizer "
                "must have; give tokenizer=..."
            )
        return tuple(i for i in found if i is not None)

    def marked(self, text: str, tokenizer: Tokenizer) -> str:
        """A text in which what stands for an image has the marks and the place of its rows around it."""
        marks = self._vision.marks
        if not marks or -1 in marks:
            return text
        first, place, last = (tokenizer.piece(i) for i in (marks[0], self._vision.placeholder, marks[1]))
        plain, full = (
            form.format(first=first, place=place, last=last) for form in self._vision.family.marked
        )
        return text if first + place in text else text.replace(plain, full)

    def of_url(self, url: str, where: str) -> Any:
        """What a message's part names: data, or a file in the allowed folder. ValueError for anything else."""
        if url.startswith("data:"):
            return _data(url, where)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in PORTS and self._fetcher is not None:
            return self._fetcher.check(url, where)
        if parts.scheme not in ("", "file"):
            raise ValueError(
                f"{where}: {shown(url)}: nothing is fetched; give a data URI, a file inside allowed_local_media_path, "
                "or set allowed_media_domains"
            )
        path = Path(urllib.parse.unquote(parts.path) if parts.scheme else url).resolve()
        if self._allowed is None or not path.is_relative_to(self._allowed):
            raise ValueError(
                f"{where}: {shown(url)}: is not inside allowed_local_media_path="
                f"{None if self._allowed is None else str(self._allowed)!r}; move it there, or give a data URI"
            )
        return path

    def fetched(self, image: Any) -> Any:
        """An image, its bytes where it was to be fetched."""
        if not isinstance(image, Remote):
            return image
        assert self._fetcher is not None, "it made this"
        return self._fetcher.fetch(image)


def _ids(image: ItemInput, placeholder: int, breaks: Sequence[int]) -> list[int]:
    """What stands for an image in a prompt: an id a row, and those that end its lines."""
    if image.carries is None:
        return [placeholder] * image.num_rows
    after, end = breaks
    return [placeholder if carried else after for carried in image.carries[:-1]] + [end]


def split_messages(messages: Any, reader: ImageReader | None) -> tuple[list[Any], list[Any]]:
    """(messages in which a part that is an image is {"type": "image"}, the images in order). ValueError for an image
    that no text-only model can see."""
    plain, images = list[Any](), list[Any]()
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)) or not any(map(is_image, content)):
            plain.append(message)
            continue
        if reader is None:
            first = next(j for j, part in enumerate(content) if is_image(part))
            raise ValueError(
                f"messages[{i}]: content[{first}]: is an image, and this model reads none; leave it out"
            )
        parts = list[Any]()
        for j, part in enumerate(content):
            if is_image(part):
                images.append(_image_of(part, reader, f"messages[{i}]: content[{j}]"))
                parts.append({"type": "image"})
            else:
                parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
        plain.append({**message, "content": parts})
    return plain, images


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in (
        "image",
        "image_url",
        "input_image",
        "image_pil",
    )


def _image_of(part: Mapping[str, Any], reader: ImageReader, where: str) -> Any:
    """What stands in a part of a message: an URL, or an object of the caller's."""
    given = part.get(str(part["type"]))
    if part["type"] == "input_image":
        given = part.get("image_url")
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise ValueError(
            f'{where}={shown(dict(part))}: must be {{"type": "image_url", "image_url": {{"url": ...}}}}'
        )
    return reader.of_url(given, where) if isinstance(given, str) else given


def _data(url: str, where: str) -> bytes:
    """The bytes of a data URI."""
    header, _, body = url.partition(",")
    if len(body) > 2 * MOST_BYTES:
        raise ValueError(f"{where}: is a data URI of {len(body)} characters; give a smaller image")
    if not header.endswith(";base64"):
        raise ValueError(f"{where}: {header[:40]!r}: must be a data URI in base64")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where}: is no base64 ({error})") from error


def _picture(image: Any, where: str) -> Any:
    """A Pillow image of three channels."""
    from PIL import Image, ImageOps

    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        image = Image.fromarray(_pixels(image, where))
    if isinstance(image, (str, os.PathLike)):
        size = Path(image).stat().st_size
        if size > MOST_BYTES:
            raise ValueError(
                f"{where}: is a file of {size} bytes, more than {MOST_BYTES}; give a smaller one"
            )
        image = Path(image).read_bytes()
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image))
    if not isinstance(image, Image.Image):
        raise ValueError(
            f"{where}={shown(image)}: must be a PIL image, a path, bytes of a file, or an array or tensor of uint8"
        )
    width, height = image.size
    if not width or not height or width * height > MOST_PIXELS:
        raise ValueError(
            f"{where}: has {width} x {height} pixels, at most {MOST_PIXELS} are read; scale it down"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ValueError(
            f"{where}: has {width} x {height} pixels: one side is more than {MOST_ASPECT} times the other; cut it"
        )
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1:
        raise ValueError(f"{where}: is animated, with {num_frames} frames; give one of them")
    if image.mode not in MODES:
        raise ValueError(f"{where}: is of mode {image.mode!r}: must be one of {', '.join(MODES)}; convert it")
    turned = ImageOps.exif_transpose(image)
    return turned.convert("RGB")


def _pixels(array: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    """[height, width, 3] of uint8, from that or from [3, height, width]."""
    if array.dtype != np.uint8 or array.ndim != 3 or 3 not in (array.shape[0], array.shape[2]):
        raise ValueError(
            f"{where}: is {array.dtype} of shape {array.shape}: must be uint8 [height, width, 3] or [3, height, width]"
        )
    return np.ascontiguousarray(array if array.shape[2] == 3 else array.transpose(1, 2, 0))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
