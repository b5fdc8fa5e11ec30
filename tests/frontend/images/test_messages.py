"""Messages that hold images, or name them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from draftproof import LLM
from draftproof.bench.compare import compare
from draftproof.frontend import images
from draftproof.server import protocol
from tests.frontend.images.cases import GREEDY, A, C, image_url, message
from tests.made.pictures import encoded
from tests.made.vision import IMAGE


def url_of(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image, "PNG")).decode()


def test_messages_hold_images(chatting: tuple[Path, Path]) -> None:
    folder, pictures = chatting
    words = {"type": "text", "text": "w5 w6 w7"}
    forms = [
        image_url(url_of(A)),
        image_url((pictures / "a b.png").as_uri()),
        image_url(str(pictures / "a b.png")),
        {"type": "input_image", "image_url": url_of(A)},
        {"type": "image", "image": A},
    ]
    with LLM(str(folder), dtype="float32", allowed_local_media_path=str(pictures)) as llm:
        given = {"prompt_token_ids": [IMAGE, 5, 6, 7], "multi_modal_data": {"image": A}}
        expected = llm.generate(given, GREEDY, use_tqdm=False)
        for form in forms:
            found = llm.chat(message(form, words), GREEDY, use_tqdm=False)
            assert not compare(expected, found)
            assert found[0].prompt_token_ids == expected[0].prompt_token_ids
        assert llm.requests.inputs._store.num_encoded == 1
        body = protocol.ChatBody(model="m", messages=message(image_url(url_of(A)), words))
        assert body.num_chars < 200 < len(url_of(A)), "an image is no text"
        (prompted,) = body.prompts(llm)
        assert not compare(expected, llm.generate(prompted, GREEDY, use_tqdm=False))
        texts = [[{"role": "user", "content": "w5 w6"}], message(words, image_url(url_of(C)))]
        assert [o.error for o in llm.chat(texts, GREEDY, use_tqdm=False)] == [None, None]


NOT_NAMED: list[tuple[dict[str, Any], str]] = [
    (image_url("http://127.0.0.1/a.png"), "nothing is fetched"),
    (image_url("https://example.com/a.png"), "nothing is fetched"),
    (image_url("file:///etc/hostname"), "not inside allowed_local_media_path"),
    (image_url("../../etc/hostname"), "not inside allowed_local_media_path"),
    (image_url("data:image/png;base64,!!"), "no base64"),
    (image_url("data:image/png,abc"), "in base64"),
    (image_url("http://["), r"messages.0.: content.0.: .*URL"),
    (image_url("a\0b"), r"messages.0.: content.0."),
    (
        image_url("data:image/png;base64," + "A" * (images.MOST_BYTES // 3 * 4 + 8)),
        "URI of more than 67108864",
    ),
    ({"type": "image_url"}, "must be"),
    ({"type": ["image"], "image": A}, "messages.0.: content.0.=.*must be"),
    ({"type": "audio_url", "audio_url": {"url": "data:"}}, "messages.0.: content.0."),
]


def test_messages_name_no_other_files(chatting: tuple[Path, Path]) -> None:
    folder, pictures = chatting
    with LLM(str(folder), dtype="float32", allowed_local_media_path=str(pictures)) as llm:
        for part, words in NOT_NAMED:
            with pytest.raises(ValueError, match=words):
                llm.chat(message(part, {"type": "text", "text": "w1"}), GREEDY, use_tqdm=False)
        (pictures / "out").symlink_to("/etc/hostname")
        with pytest.raises(ValueError, match="not inside"):
            llm.chat(message(image_url(str(pictures / "out"))), GREEDY, use_tqdm=False)
    with LLM(str(folder), dtype="float32") as llm, pytest.raises(ValueError, match="=None"):
        llm.chat(message(image_url(str(pictures / "a b.png"))), GREEDY, use_tqdm=False)
