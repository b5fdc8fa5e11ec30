"""transformers: `generate`, prompt lookup, continuous batching."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from draftproof.bench.peers.engine import Ids, Reach, Spec
from draftproof.models.weights import RandomWeights

LOOKUP, CONTINUOUS = "prompt lookup", "continuous batching"
NUM_LOOKUP = 5  # drafts of prompt lookup


class Transformers:
    """A transformers model with the weights of its folder, or with our engine's random weights.

    See `Engine`. Raises whatever transformers raises for a model that it cannot load.
    """

    version: str = transformers.__version__
    weight_bytes: float | None = None

    def __init__(self, spec: Spec) -> None:
        transformers.utils.logging.disable_progress_bar()
        self._device, dtype = torch.device(spec.device), getattr(torch, spec.dtype)
        self._model = (_random if spec.dummy else _stored)(spec.directory, self._device, dtype)
        self._model.eval()
        self._model.generation_config.eos_token_id = None  # never stop early
        # Lookup takes one request. Continuous batching forms its own batches, so it is measured once; on a CPU it
        # allocates most of the machine's memory, which takes seconds.
        self.ways: Mapping[str, Reach] = {LOOKUP: "single"}
        if self._device.type != "cpu":
            self.ways = {**self.ways, CONTINUOUS: "largest"}
        attention = getattr(self._model.config, "_attn_implementation", None)
        self.settings: Mapping[str, Any] = {"attention": attention, "prefix cache": False}

    def generate(self, prompts: Ids, num_new: int, way: str = "") -> tuple[Ids, float]:
        """See `Engine`. Prompts of several lengths are padded on the left."""
        if way == CONTINUOUS:
            return self._generate_batch(prompts, num_new)
        options = {"prompt_lookup_num_tokens": NUM_LOOKUP} if way == LOOKUP else {}
        start = time.perf_counter()
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        with torch.inference_mode():
            found = self._model.generate(
                padded, attention_mask=mask, generation_config=_greedy(num_new, **options)
            )
        return found[:, longest:].tolist(), time.perf_counter() - start

    def _generate_batch(self, prompts: Ids, num_new: int) -> tuple[Ids, float]:
        """Continuous batching; seconds without its startup. RuntimeError if outputs are missing."""
        found = self._model.generate_batch(inputs=prompts, generation_config=_greedy(num_new))
        by_prompt = [output.generated_tokens for output in found.values()]
        if len(by_prompt) != len(prompts) or any(len(ids) < num_new for ids in by_prompt):
            raise RuntimeError("it gave fewer outputs than it was asked for")
        start = min(output.created_time for output in found.values())
        return by_prompt, max(output.lifespan[1] for output in found.values()) - start


def _greedy(num_new: int, **options: Any) -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True, **options
    )


def _stored(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=dtype, trust_remote_code=False
    )
    return found.to(device)


def _random(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with our random weights: a parameter's name equals the file's, which determines the random tensor."""
    config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    with device:  # a CPU would take a minute to initialize weights that are overwritten next
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    weights = RandomWeights(0, device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, tuple(parameter.shape)))
    return model
