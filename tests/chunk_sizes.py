"""Random prompts on the CPU, in chunks of many sizes, alone and in batches: equal bits.

`python -m tests.chunk_sizes --help`; the quick form runs as a test. Meant for torch's operators alone, whose libraries
choose their way by processor, and for processors imitated through the environment (tools/processors.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import click
import torch

from draftproof import LLM, SamplingParams
from draftproof.bench.compare import compare
from draftproof.types import RequestOutput

CHUNKS = (17, 33, 64, 99, 150, 2048)
DTYPES = ("float32", "bfloat16", "float16")
LONGEST = 700  # tokens of a prompt
SHORT = 64  # up to here prompts are also computed a token at a time
NUM_OUTPUT = 6


def prompts(number: int, vocab_size: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Ids of `number` prompts of 1 to `longest` tokens; the first has 1, the second `longest`."""
    generator = random.Random(seed)
    lengths = [1, longest, *(generator.randint(1, longest) for _ in range(number - 2))][:number]
    return [[generator.randrange(5, vocab_size) for _ in range(length)] for length in lengths]


def outputs(
    given: Sequence[list[int]], chunk: int, batch: int, dtype: str, native: bool
) -> list[RequestOutput]:
    """Greedy or sampled, as the prompt alone decides; log-probabilities of each token, the prompt's too."""
    llm = LLM(
        device="cpu",
        dtype=dtype,
        native=native,
        max_num_seqs=batch,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
        max_model_len=1024,
    )
    params = [
        SamplingParams(
            temperature=(sum(ids) % 2) * 0.8,
            seed=sum(ids),
            max_tokens=NUM_OUTPUT,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
            detokenize=False,
        )
        for ids in given
    ]
    prompts_of_ids = [{"prompt_token_ids": ids} for ids in given]
    return llm.generate(prompts_of_ids, params, use_tqdm=False)


def differing(given: Sequence[list[int]], dtype: str, native: bool, chunks: Sequence[int]) -> dict[str, int]:
    """Settings in which outputs differ from those of prompts alone, in one piece: {"chunk 17, batch 8": 3}."""
    alone = outputs(given, LONGEST + SHORT, 1, dtype, native)
    found: dict[str, int] = {}

    def count(name: str, expected: Sequence[RequestOutput], got: list[RequestOutput]) -> None:
        differences = compare(list(expected), got)
        if differences:
            found[name] = len(differences)

    for chunk in chunks:
        for batch in (1, 8):
            count(f"chunk {chunk}, batch {batch}", alone, outputs(given, chunk, batch, dtype, native))
    short = [i for i, ids in enumerate(given) if len(ids) <= SHORT]
    expected = [alone[i] for i in short]
    count("a token at a time", expected, outputs([given[i] for i in short], 1, 1, dtype, native))
    return found


@click.command()
@click.option("--prompts", "number", type=click.IntRange(2), default=24, show_default=True)
@click.option(
    "--seed", default=0, show_default=True, help="Of the prompts: give each of several processes its own."
)
@click.option("--longest", type=click.IntRange(2, 900), default=LONGEST, show_default=True)
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="[default: all three]")
@click.option("--native/--no-native", default=False, show_default=True)
@click.option("--chunks", default=",".join(map(str, CHUNKS)), show_default=True)
def main(number: int, seed: int, longest: int, dtypes: Sequence[str], native: bool, chunks: str) -> None:
    """Exit status 1 if any output differs."""
    given = prompts(number, 8192, longest, seed)
    sizes = [int(size) for size in chunks.split(",")]
    print(f"{number} prompts of 1 to {longest} tokens, {torch.get_num_threads()} threads, native={native}")
    different = 0
    for dtype in dtypes or DTYPES:
        found = differing(given, dtype, native, sizes)
        different += len(found)
        said = "; ".join(f"{name}: {count} differ" for name, count in found.items())
        print(f"{dtype:10} {said or f'equal in {2 * len(sizes) + 1} settings'}", flush=True)
    raise SystemExit(int(different > 0))


if __name__ == "__main__":
    main()
