"""Image files, and hostile ones."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from draftproof.frontend.images import MOST_BYTES
from tests.made.vision import picture

A, C = picture(30, 50, 1), picture(30, 50, 3)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _truncated(tmp: Path) -> Any:
    return encoded(picture(200, 200, 0), "PNG")[:900]


def _claiming(width: int, height: int) -> bytes:
    """A small PNG that claims width x height pixels."""
    data = bytearray(encoded(Image.new("L", (8, 8)), "PNG"))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def _bomb(tmp: Path) -> Any:
    return _claiming(30000, 30000)


def _large(tmp: Path) -> Any:
    """A file that claims fewer pixels than Pillow itself refuses, and more than we read."""
    return _claiming(9000, 9000)


def _icon(tmp: Path) -> Any:
    """An image in a format (ICO) that Pillow decodes while opening, before its size can be checked."""
    inner = _claiming(12000, 12000)
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22) + inner


def _paged(tmp: Path) -> Any:
    """A TIFF with so many pages that counting them, as Pillow's `n_frames` does, takes minutes."""
    data = bytearray(encoded(Image.new("RGB", (8, 8)), "TIFF"))
    first = int.from_bytes(data[4:8], "little")
    end = first + 2 + 12 * int.from_bytes(data[first : first + 2], "little")
    page = bytes(data[first:end])
    data[end : end + 4] = len(data).to_bytes(4, "little")
    for left in range(20000, 0, -1):
        data += page + (len(data) + len(page) + 4 if left > 1 else 0).to_bytes(4, "little")
    return bytes(data)


def _pipe(tmp: Path) -> Any:
    """A named pipe: reading it blocks until there is a writer, and may never end."""
    os.mkfifo(tmp / "pipe")
    return tmp / "pipe"


def _long(tmp: Path) -> Any:
    with (tmp / "long").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    return tmp / "long"


def _animated(tmp: Path) -> Any:
    return encoded(A, "GIF", save_all=True, append_images=[C])


def _mistyped(tmp: Path) -> Any:
    """A TIFF whose pixel offset is text, for which Pillow raises a TypeError."""
    data = encoded(A, "TIFF")
    tag, number, letters = (
        (0x0111).to_bytes(2, "little"),
        (4).to_bytes(2, "little"),
        (2).to_bytes(2, "little"),
    )
    assert data.count(tag + number) == 1
    return data.replace(tag + number, tag + letters)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bomb": (_bomb, "900000000 pixels"),
    "truncated": (_truncated, "cannot be read"),
    "thin": (lambda tmp: Image.new("RGB", (1, 100000)), "more than 200 times"),
    "mode": (lambda tmp: Image.new("F", (8, 8)), "mode 'F'"),
    "animated": (_animated, "is animated"),
    "large": (_large, "at most 67108864 are read"),
    "icon": (_icon, "is no PNG, JPEG"),
    "pages": (_paged, "several pages"),
    "pipe": (_pipe, "is no file"),
    "folder": (lambda tmp: tmp, "is no file"),
    "long": (_long, "is a file of more than"),
    "text": (lambda tmp: b"no image", "is no PNG, JPEG"),
    "missing": (lambda tmp: tmp / "none.png", "cannot be read"),
    "number": (lambda tmp: 5, "must be a PIL image"),
    "floats": (lambda tmp: np.zeros((8, 8, 3)), "must be uint8"),
    "empty": (lambda tmp: np.zeros((0, 8, 3), dtype=np.uint8), "has 8 x 0 pixels; give one with some"),
    "16 bits": (lambda tmp: encoded(Image.new("I;16", (8, 8)), "PNG"), "mode 'I;16'"),
    "letters": (_mistyped, "cannot be read: TypeError"),
    "program": (lambda tmp: encoded(A, "EPS"), "is no PNG, JPEG"),
}
