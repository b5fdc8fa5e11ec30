"""Ask a model that reads images about pictures, with drafts: python examples/images.py MODEL PICTURE...

Drafts do not change the answers; the line below each answer counts the drafts that were right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from draftproof import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or hub id, such as Qwen/Qwen2.5-VL-3B-Instruct")
    parser.add_argument("pictures", nargs="+")
    parser.add_argument("--question", default="What is in the picture?")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--video", action="store_true", help="the pictures are the frames of a video, one per second"
    )
    parser.add_argument("--draft", help="a small model of the same family to draft with; left out: n-grams")
    given = parser.parse_args()
    seen = {path: {"type": "image", "image": Path(path).read_bytes()} for path in given.pictures}
    if given.video:
        seen = {
            "video": {
                "type": "video",
                "video": ([Path(path).read_bytes() for path in given.pictures], {"fps": 1}),
            }
        }
    text = {"type": "text", "text": given.question}
    chats = [[{"role": "user", "content": [part, text]}] for part in seen.values()]
    params = SamplingParams(temperature=0, max_tokens=given.max_tokens)
    config = {"model": given.draft} if given.draft else {"method": "ngram"}
    with LLM(given.model, speculative_config=config) as llm:
        for name, output in zip(seen, llm.chat(chats, params), strict=True):
            print(f"{name}: {output.outputs[0].text.strip() or output.error}")
            speculation = output.metrics.speculation
            print(f"  {speculation.num_accepted_tokens} of {speculation.num_draft_tokens} drafts were right")


if __name__ == "__main__":
    main()
