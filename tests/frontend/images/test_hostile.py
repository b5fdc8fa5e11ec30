"""Files of strangers: what is read of them, as transformers reads it, and what is refused with one clear error."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from draftproof import LLM, RequestOutput
from draftproof.bench.compare import compare
from draftproof.frontend import images
from tests.frontend.images.cases import GREEDY, PARAMS, PROMPTS, A, C, prompt, text
from tests.made.pictures import HOSTILE, encoded


def _turned(kind: str) -> bytes:
    """A photo whose camera was held upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(A, kind, exif=exif)


def test_files_are_seen_as_transformers_sees_them() -> None:
    clear = Image.merge("RGBA", (*A.split(), C.split()[0]))
    palette = A.quantize(16)
    files = {
        **{"turned JPEG": _turned("JPEG"), "turned PNG": _turned("PNG"), "turned WebP": _turned("WEBP")},
        **{"CMYK": encoded(A.convert("CMYK"), "JPEG"), "still GIF": encoded(palette, "GIF")},
        **{"clear": encoded(clear, "PNG"), "black and white": encoded(A.convert("1"), "PNG")},
        **{"clear palette": encoded(palette, "PNG", transparency=3), "BMP": encoded(A, "BMP")},
        "photo with a preview": encoded(A, "MPO", save_all=True, append_images=[C.resize((15, 25))]),
    }
    for name, data in files.items():
        theirs = transformers.image_utils.load_image(base64.b64encode(data).decode())
        assert np.array_equal(np.asarray(images._picture(data, "image 0")), np.asarray(theirs)), name
    assert images._picture(files["turned JPEG"], "image 0").size == A.size[::-1]


def test_hostile_images_get_one_error_each_and_the_others_go_on(
    made: tuple[Any, Path], plain: list[RequestOutput], tmp_path: Path
) -> None:
    hostile = {kind: (make(tmp_path), words) for kind, (make, words) in HOSTILE.items()}
    bad = [prompt([A, image], [], [], text(3, 0)) for image, _ in hostile.values()]
    given = [PROMPTS[0], *bad, PROMPTS[1]]
    with LLM(str(made[1]), dtype="float32") as llm:
        params = [PARAMS[0], *[PARAMS[0]] * len(bad), PARAMS[1]]
        first, *refused, last = llm.generate(given, params, use_tqdm=False)
        assert not compare(plain[:2], [first, last])
        for output, (kind, (_, words)) in zip(refused, hostile.items(), strict=True):
            assert output.error is not None, kind
            assert output.error.startswith("image 1") and words in output.error, kind
        for each in bad:
            with pytest.raises(ValueError, match="image 1"):
                llm.generate(each, GREEDY, use_tqdm=False)
