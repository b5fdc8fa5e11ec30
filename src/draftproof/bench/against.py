"""The prompts of a benchmark through transformers: `generate`, prompt lookup, continuous batching, beside ours."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftproof.models.loading import RandomWeights

Ids = list[list[int]]
GenerateFn = Callable[[Ids], tuple[Ids, float]]  # prompts -> output ids, seconds


class Transformers:
    """One model of transformers with the weights of `directory`, or the random ones that the target got.

    Raises whatever transformers raises for a model that it cannot load.
    """

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype, *, dummy: bool) -> None:
        self._device = device
        self._model = (_random if dummy else _stored)(directory, device, dtype)
        self._model.eval()

    def generate(self, prompts: Ids, num_new: int, **options: Any) -> tuple[Ids, float]:
        """Greedy, `num_new` tokens each, in one batch padded on the left; and the seconds it took."""
        start = time.perf_counter()
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        with torch.inference_mode():
            found = self._model.generate(
                padded, attention_mask=mask, generation_config=self._greedy(num_new, **options)
            )
        return found[:, longest:].tolist(), time.perf_counter() - start

    def generate_batch(self, prompts: Ids, num_new: int) -> tuple[Ids, float]:
        """Continuous batching, and its seconds without its start; RuntimeError where it loses outputs."""
        found = self._model.generate_batch(inputs=prompts, generation_config=self._greedy(num_new))
        by_prompt = [output.generated_tokens for output in found.values()]
        if len(by_prompt) != len(prompts) or any(len(ids) < num_new for ids in by_prompt):
            raise RuntimeError("it gave fewer outputs than it was asked for")
        start = min(output.created_time for output in found.values())
        return by_prompt, max(output.lifespan[1] for output in found.values()) - start

    def _greedy(self, num_new: int, **options: Any) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            **options,
        )


def _stored(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, trust_remote_code=False).to(
        device
    )


def _random(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Parameters have the names that files give them, and by its name a random tensor is drawn."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    with device:  # drawn there: a processor takes a minute for what is overwritten at once
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    weights = RandomWeights(0, device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, tuple(parameter.shape)))
    return model


def measure(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    dummy: bool,
    prompts: Sequence[list[int]],
    reference: Mapping[int, Sequence[int]],
    batch_sizes: Sequence[int],
    num_new: int,
    plain_speeds: Mapping[int, float],
    num_lookup: int,
    tell: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows for the report, and a line for each thing that was impossible. `reference`: plain output ids by prompt."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with _quiet():
        try:
            tell("transformers: loading")
            model = Transformers(directory, device, dtype, dummy=dummy)
        except Exception as error:  # what a foreign library raises is not our user's mistake
            return [], [f"transformers cannot load this model: {_short(error)}"]
        for batch in batch_sizes:
            asked = [prompts[i] for i in sorted(reference)]
            is_largest = batch == max(batch_sizes)
            for name, run in _ways(model, batch, num_new, num_lookup, is_largest).items():
                tell(f"{name}, batch {batch}")
                try:
                    run(asked[:batch])  # first use is not timed
                    outputs, seconds = _timed(run, asked, len(asked) if "continuous" in name else batch)
                except Exception as error:
                    notes.append(f"{name}, batch {batch}: {_short(error)}")
                    continue
                expected = [list(reference[i]) for i in sorted(reference)]
                speed = sum(map(len, outputs)) / seconds
                row = {"name": name, "batch_size": batch, "output_throughput": speed, "duration": seconds}
                row |= {"plain_over_it": plain_speeds[batch] / speed, "num_compared": len(expected)}
                row["num_identical"] = sum(a == b for a, b in zip(outputs, expected, strict=True))
                rows.append(row)
    return rows, notes


def _ways(
    model: Transformers, batch: int, num_new: int, num_lookup: int, is_largest: bool
) -> dict[str, GenerateFn]:
    """Prompt lookup takes one request; continuous batching chooses its batches itself, so it runs once."""
    ways: dict[str, GenerateFn] = {"transformers generate": lambda prompts: model.generate(prompts, num_new)}
    if batch == 1:
        ways["transformers generate, prompt lookup"] = lambda prompts: model.generate(
            prompts, num_new, prompt_lookup_num_tokens=num_lookup
        )
    if is_largest:
        ways["transformers continuous batching"] = lambda prompts: model.generate_batch(prompts, num_new)
    return ways


def _timed(run: GenerateFn, prompts: Ids, batch: int) -> tuple[Ids, float]:
    outputs: Ids = []
    seconds = 0.0
    for first in range(0, len(prompts), batch):
        found, took = run(prompts[first : first + batch])
        outputs += found
        seconds += took
    return outputs, seconds


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Its progress bars and warnings are not part of our output."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        import transformers.utils.logging as their_logging

        their_logging.disable_progress_bar()
    except ImportError:
        pass
    try:
        yield
    finally:
        logging.disable(before)


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"
