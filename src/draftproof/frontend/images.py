"""Images of prompts: from a caller's image to the encoder's input tensors, and the prompt's placeholder rows for them.

Anything wrong with an image is raised as a ValueError that says which image of the prompt it is.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import io
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
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
VIDEO = "video"  # a key of multi_modal_data
MOST_PIXELS = 1 << 26  # per image, checked before decoding: a file of a few bytes may claim any number
MOST_BYTES = 1 << 26  # per file, local or remote
MOST_FRAMES = 768  # per video
MOST_ASPECT = 200  # longer side / shorter side
# File formats, by Pillow's names. Others run programs (EPS), decode before their size can be checked (ICO), or are
# obsolete
FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # Pillow's, with <= 8 bits per channel


Parts = Sequence[
    ItemInput | list[int]
]  # what replaces a placeholder of an image or a video: items, with token ids between them


class ImageReader:
    """Makes items of images. Its only mutable state is the processor, which is loaded when it is first needed."""

    def __init__(
        self,
        vision: Vision,
        store: ItemStore,
        max_model_len: int,
        allowed: Path | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        """allowed: folder whose files messages may name; fetcher: for URLs that messages may name. None: neither is
        permitted."""
        self.vision = vision
        self.store = store
        self._max_model_len = max_model_len
        self._fetcher = fetcher
        self._allowed = None if allowed is None else allowed.resolve()

    @functools.cached_property
    def processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self.vision.directory, backend="pil")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.vision.directory}: has no image processor that can be read ({_first_line(error)}); add "
                "preprocessor_config.json"
            ) from error

    def read(self, images: Any) -> list[ItemInput]:
        """The inputs of a prompt's images, one or several. ValueError names the first that cannot be read or does not
        fit. That is checked image by image, since an input may be a thousand times as large as its file."""
        found, num_rows = list[ItemInput](), 0
        for number, image in enumerate(images if isinstance(images, (list, tuple)) else [images]):
            found.append(self._read(image, f"image {number}"))
            num_rows += found[-1].num_rows
            self.check_room(num_rows, f"image {number}")
        return found

    def check_room(self, num_rows: int, where: str) -> None:
        """ValueError if a prompt has no room for `num_rows` rows; `where`: the image that was added last."""
        if num_rows >= self._max_model_len:
            raise ValueError(
                f"{where}: with it there are {num_rows} rows of images or frames, which leave no room for an answer in "
                f"max_model_len={self._max_model_len}; scale them down or leave some out"
            )

    def _read(self, image: Any, where: str) -> ItemInput:
        seen = self.picture(image, where)
        with _errors_of(where):
            found = self.processor(images=[seen], return_tensors="pt", **self.vision.options)
        vision = self.vision
        tensors: dict[str, Tensor] = {name: torch.as_tensor(found[name]) for name in vision.family.inputs}
        places = vision.places(tensors)
        carries = vision.carries(tensors)
        num_rows = vision.num_rows(tensors) if carries is None else len(carries)
        return self.store.hold(
            ItemInput.of(IMAGE, tensors, num_rows, None if places is None else Places(*places), carries)
        )

    def place(
        self,
        token_ids: Sequence[int],
        images: Sequence[ItemInput],
        videos: Sequence[Parts] = (),
        tokenizer: Tokenizer | None = None,
    ) -> tuple[list[int], tuple[Item, ...], tuple[ItemInput, ...]]:
        """(the prompt, with each placeholder of an image or video repeated for its rows; the items; their inputs).
        ValueError if the numbers of placeholders and images differ."""
        breaks = self._breaks(tokenizer) if images else ()
        given: dict[int, Sequence[Parts]] = {self.vision.placeholder: [(image,) for image in images]}
        if self.vision.video_placeholder >= 0:
            given[self.vision.video_placeholder] = videos
        for what, (placeholder, found) in zip(("images", "videos"), given.items(), strict=False):
            num_places = list(token_ids).count(placeholder)
            if num_places != len(found):
                raise ValueError(
                    f"prompt: has {num_places} places for {what} (token id {placeholder}), but {len(found)} are given "
                    "in multi_modal_data; give one for each"
                )
        placed, items, inputs = list[int](), list[Item](), list[ItemInput]()
        left = {placeholder: iter(found) for placeholder, found in given.items()}
        tokens = list(token_ids)
        for number, token in enumerate(tokens):
            parts = next(left[token]) if token in left else ([token],)
            if token in left and isinstance(parts[0], list) and isinstance(parts[-1], list):
                around = (placed[-1:], tokens[number + 1 : number + 2])
                if around == (parts[0][-1:], parts[-1]):  # the prompt has the marks already
                    placed.pop()
                    parts = parts[:-1]
            for part in parts:
                if isinstance(part, list):
                    placed += part
                    continue
                items.append(Item(part.content, len(placed), part.num_rows, self.vision.is_whole))
                inputs.append(part)
                placed += _ids(part, token, breaks)
        return placed, tuple(items), tuple(inputs)

    def _breaks(self, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        """Ids of the tokens that end an image's lines: (after each line but the last, after the last)."""
        breaks = self.vision.family.breaks
        found = tuple(None if tokenizer is None else tokenizer.token_id(text) for text in breaks)
        if None in found:
            raise ValueError(
                f"multi_modal_data: an image of this model is written with {' and '.join(breaks)}, which its tokenizer "
                "must have; give tokenizer=..."
            )
        return tuple(i for i in found if i is not None)

    def marked(self, text: str, tokenizer: Tokenizer) -> str:
        """`text`, in which each image's mark is expanded to the family's marks around a placeholder."""
        marks = self.vision.marks
        if not marks or -1 in marks:
            return text
        first, place, last = (tokenizer.piece(i) for i in (marks[0], self.vision.placeholder, marks[1]))
        plain, full = (form.format(first=first, place=place, last=last) for form in self.vision.family.marked)
        return text if first + place in text else text.replace(plain, full)

    def of_url(self, url: str, where: str) -> Any:
        """What a message's URL names: bytes, a file in the allowed folder, or a `Remote`. ValueError for others."""
        if url.startswith("data:"):
            return _data(url, where)
        with _errors_of(where):
            parts = urllib.parse.urlsplit(url)
        if parts.scheme in PORTS and self._fetcher is not None:
            return self._fetcher.check(url, where)
        if parts.scheme not in ("", "file"):
            raise ValueError(
                f"{where}: {shown(url)}: nothing is fetched; give a data URI, a file inside allowed_local_media_path, "
                "or set allowed_media_domains"
            )
        with _errors_of(where):
            path = Path(urllib.parse.unquote(parts.path) if parts.scheme else url).resolve()
        if self._allowed is None or not path.is_relative_to(self._allowed):
            raise ValueError(
                f"{where}: {shown(url)}: is not inside allowed_local_media_path="
                f"{None if self._allowed is None else str(self._allowed)!r}; move it there, or give a data URI"
            )
        return path

    def picture(self, image: Any, where: str) -> Any:
        """A Pillow image in RGB. ValueError for anything that is not an image."""
        found = self.fetched(image)  # its errors name the URL's place themselves
        with _errors_of(where):
            return _picture(found, where)

    def fetched(self, image: Any) -> Any:
        """`image`, or its fetched bytes if it is a `Remote`."""
        if not isinstance(image, Remote):
            return image
        assert self._fetcher is not None, "it made this"
        return self._fetcher.fetch(image)


def _ids(image: ItemInput, placeholder: int, breaks: Sequence[int]) -> list[int]:
    """An image's token ids in a prompt: a placeholder per row, and the tokens that end its lines."""
    if image.carries is None:
        return [placeholder] * image.num_rows
    after, end = breaks
    return [placeholder if carried else after for carried in image.carries[:-1]] + [end]


def split_messages(messages: Any, reader: ImageReader | None) -> tuple[list[Any], dict[str, list[Any]]]:
    """(messages, in which image parts are reduced to {"type": "image"} and video parts likewise; the images and videos
    in order, by kind). `reader`: None for a text-only model; then any image is a ValueError."""
    plain = list[Any]()
    found: dict[str, list[Any]] = {}
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
                kind = _PARTS[part["type"]]
                found.setdefault(kind, []).append(_given(part, reader, f"messages[{i}]: content[{j}]"))
                parts.append({"type": kind})
            else:
                parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
        plain.append({**message, "content": parts})
    return plain, found


# types of message parts -> kind of item
_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_pil"), IMAGE),
    **dict.fromkeys(("video", "video_url"), VIDEO),
}


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image, or a video."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _PARTS


def _given(part: Mapping[str, Any], reader: ImageReader, where: str) -> Any:
    """The image or video of a message's part: resolved if it is a URL, else the caller's object."""
    given = part.get(str(part["type"]))
    if part["type"] == "input_image":
        given = part.get("image_url")
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise ValueError(
            f'{where}={shown(dict(part))}: must be {{"type": "image_url", "image_url": {{"url": ...}}}}'
        )
    if _PARTS[part["type"]] == VIDEO and isinstance(given, str):
        return _frames_of_url(given, where)
    return _named(given, reader, where)


def _named(given: Any, reader: ImageReader, where: str) -> Any:
    """Resolve URLs, also in lists of frames; other objects are returned as they are."""
    if isinstance(given, (list, tuple)):
        return type(given)(_named(each, reader, where) for each in given)
    return reader.of_url(given, where) if isinstance(given, str) else given


def _frames_of_url(url: str, where: str) -> list[bytes]:
    """The files of a video's frames. A URL may hold a video only as frames: video files are not decoded."""
    header, _, body = url.partition(",")
    if header != "data:video/jpeg;base64":
        raise ValueError(
            f"{where}: {shown(url)}: files of videos are not decoded; give frames, as 'data:video/jpeg;base64,' and a "
            'JPEG in base64 for each, commas between, or {"type": "video", "video": frames}'
        )
    if (num_frames := body.count(",") + 1) > MOST_FRAMES:
        raise ValueError(f"{where}: has {num_frames} frames: must be 1 to {MOST_FRAMES}; leave some out")
    return [_data(f"data:image/jpeg;base64,{each}", where) for each in body.split(",")]


def _data(url: str, where: str) -> bytes:
    """The bytes of a data URI."""
    header, _, body = url.partition(",")
    if len(body) > (MOST_BYTES + 2) // 3 * 4:  # base64 has four characters per three bytes
        raise ValueError(
            f"{where}: is a data URI of more than {MOST_BYTES} bytes, {len(body)} characters; give a smaller image"
        )
    if not header.endswith(";base64"):
        raise ValueError(f"{where}: {header[:40]!r}: must be a data URI in base64")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where}: is no base64 ({error})") from error


@contextlib.contextmanager
def _errors_of(where: str) -> Iterator[None]:
    """Turn any exception into a ValueError that begins with `where`."""
    try:
        yield
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from error
    except Exception as error:  # on hostile input decoders raise anything, even TypeError
        raise ValueError(f"{where}: cannot be read: {_first_line(error)}; give another file") from error


def _picture(image: Any, where: str) -> Any:
    """A Pillow image in RGB, from any supported kind of object."""
    from PIL import Image, ImageOps

    if isinstance(image, Tensor):
        image = image.detach().cpu().numpy()
    if isinstance(image, np.ndarray):
        image = Image.fromarray(_pixels(image, where))
    if isinstance(image, (str, os.PathLike)):
        image = _content(Path(image), where)
    if isinstance(image, bytes):
        image = _opened(image, where)
    if not isinstance(image, Image.Image):
        raise ValueError(
            f"{where}={shown(image)}: must be a PIL image, a path, bytes of a file, or an array or tensor of uint8"
        )
    width, height = image.size
    if not width or not height:
        raise ValueError(f"{where}: has {width} x {height} pixels; give one with some")
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"{where}: has {width} x {height} pixels, at most {MOST_PIXELS} are read; scale it down"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise ValueError(
            f"{where}: has {width} x {height} pixels: one side is more than {MOST_ASPECT} times the other; cut it"
        )
    # A photo (MPO) may contain thumbnails of itself. `n_frames` is not used: in some formats it takes quadratic time.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise ValueError(f"{where}: is animated, or has several pages; give one of them")
    if image.mode not in MODES:
        raise ValueError(f"{where}: is of mode {image.mode!r}: must be one of {', '.join(MODES)}; convert it")
    turned = ImageOps.exif_transpose(image)
    return turned.convert("RGB")


def _content(path: Path, where: str) -> bytes:
    """The bytes of a regular file; devices and pipes, which may be endless, are refused."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{where}: {shown(str(path))}: is no file; give one")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{where}: is a file of more than {MOST_BYTES} bytes; give a smaller one")
    return content


def _opened(data: bytes, where: str) -> Any:
    """The Pillow image of a file in one of `FORMATS`."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise ValueError(f"{where}: is no {', '.join(formats)} file; give one") from None


def _pixels(array: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    """[height, width, 3] of uint8, from that or from [3, height, width]."""
    if array.dtype != np.uint8 or array.ndim != 3 or 3 not in (array.shape[0], array.shape[2]):
        raise ValueError(
            f"{where}: is {array.dtype} of shape {array.shape}: must be uint8 [height, width, 3] or [3, height, width]"
        )
    return np.ascontiguousarray(array if array.shape[2] == 3 else array.transpose(1, 2, 0))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
