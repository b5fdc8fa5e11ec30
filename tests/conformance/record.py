"""Writes tests/data/recordings.json, plain greedy outputs of the prompts in the conformance tests:
`python -m tests.conformance.record`. They only decide how many drafts are accepted there."""

from __future__ import annotations

from typing import Any

from draftproof import LLM, SamplingParams
from draftproof.drafters import recordings
from tests.conformance.cases import RECORDINGS, REPEATS, prompts


def main() -> None:
    llm = LLM(dtype="float32", max_num_seqs=8)
    texts = prompts()
    listed: list[Any] = [*texts, *(p * 2 for p in texts[:4])]
    ids = llm.tokenizer.encode(REPEATS * 3)
    listed += [ids[: 48 - n] for n in range(1, 9)]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    long = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    recordings.save(RECORDINGS, llm.generate([*listed, REPEATS], [greedy] * len(listed) + [long]))


if __name__ == "__main__":
    main()
