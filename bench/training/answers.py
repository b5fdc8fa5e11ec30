"""Texts to train on: the target's own answers, thousands at once, each prompt answered greedily and sampled.

Shapes: N requests, R those not dropped yet, L longest prompt, M longest answer, H hidden size, K key heads,
S positions of the cache, D size of a head, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.training.settings import Settings
from bench.training.target import DTYPE, Target, causal
from draftproof.frontend.llm import show_progress
from draftproof.train.data import LEAST_ANSWER, Texts

TEMPERATURES = (0.8, 0.8, 0.8, 0.6, 1.0)  # one is drawn for a prompt's sampled answer
READ_AT_ONCE = 256  # prompts
SAMPLED_AT_ONCE = 2048  # rows of logits
ALIGNED = 64  # attended cache positions are rounded up to this multiple
DROP_EVERY = 16  # steps between checks that drop ended requests, if they are more than a quarter


class Text(NamedTuple):
    """A prompt with its answer. `temperature` 0: greedy."""

    tokens_T: Tensor
    num_prompt: int
    temperature: float

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokens_T[: self.num_prompt].tolist())


def up_to(num: int, multiple: int) -> int:
    return -(-num // multiple) * multiple


class _Requests:
    """A batch of requests. `rows_R`: their numbers; `places_R`: position of each one's next token."""

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], max_tokens: int
    ) -> None:
        self._target = target
        device, num = target.device, len(prompts)
        self.places_R = torch.tensor([len(p) for p in prompts], device=device)
        self.rows_R = torch.arange(num, device=device)
        self.is_done_R = torch.zeros(num, dtype=torch.bool, device=device)
        self._temperatures_R = torch.tensor(temperatures, device=device)
        self.longest = up_to(max(map(len, prompts)), 8)
        shape = (
            num,
            target.mixer.num_kv_heads,
            up_to(self.longest + max_tokens, ALIGNED),
            target.mixer.head_dim,
        )
        self._caches_RKSD = [
            [torch.zeros(shape, dtype=DTYPE, device=device) for _ in "kv"] for _ in range(target.num_layers)
        ]
        self._last_RH = torch.empty(num, target.config.hidden_size, dtype=DTYPE, device=device)
        tokens_NL = torch.zeros(num, self.longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            tokens_NL[i, : len(prompt)] = torch.tensor(prompt)
        tokens_NL = tokens_NL.to(device)
        for start in range(0, num, READ_AT_ONCE):
            self._read(tokens_NL, slice(start, min(start + READ_AT_ONCE, num)))

    def _read(self, tokens_NL: Tensor, part: slice) -> None:
        """Prefill some prompts: store their keys and values, and the state after each."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._caches_RKSD[layer]
            keys[part, :, : self.longest], values[part, :, : self.longest] = k, v
            return causal(q, k, v)

        some_NL = tokens_NL[part]
        rows = torch.arange(len(some_NL), device=self._target.device)
        places = torch.arange(self.longest, device=self._target.device).expand(len(some_NL), -1)
        states_NLH, _ = self._target.run(some_NL, places, attend)
        self._last_RH[part] = states_NLH[rows, self.places_R[part] - 1]

    def sample(self) -> Tensor:
        """The next token of each: the best one, or one sampled at its temperature by the Gumbel trick."""
        new = []
        for last_RH, t_R in zip(
            self._last_RH.split(SAMPLED_AT_ONCE), self._temperatures_R.split(SAMPLED_AT_ONCE), strict=True
        ):
            logits_RV = F.linear(last_RH, self._target.unembed_VH).float()
            t_R1 = t_R[:, None]
            noise_RV = torch.empty_like(logits_RV).exponential_().clamp_(min=1e-20).log_()
            scores_RV = logits_RV / torch.where(t_R1 > 0, t_R1, 1.0) - torch.where(t_R1 > 0, noise_RV, 0.0)
            new.append(scores_RV.argmax(-1))
        return torch.cat(new)

    def drop_done(self, new_R: Tensor) -> Tensor:
        """Drop ended requests if they are more than a quarter; returns the tokens of the others."""
        live = (~self.is_done_R).nonzero()[:, 0]
        if len(live) >= 0.75 * len(self.rows_R):
            return new_R
        self.rows_R, self.places_R = self.rows_R[live], self.places_R[live]
        self._temperatures_R, self.is_done_R = self._temperatures_R[live], self.is_done_R[live]
        for pair in self._caches_RKSD:
            pair[:] = [t[live] for t in pair]
        return new_R[live]

    def step(self, new_R: Tensor, most: int) -> None:
        """Compute a token of each; `most`: tokens of the longest request, this one included."""
        num_seen = up_to(most, ALIGNED)
        is_seen = torch.arange(num_seen, device=self._target.device) <= self.places_R[:, None]
        index_R = torch.arange(len(new_R), device=self._target.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._caches_RKSD[layer]
            keys[index_R, :, self.places_R], values[index_R, :, self.places_R] = k[:, :, 0], v[:, :, 0]
            grouped = q.view(len(new_R), self._target.mixer.num_kv_heads, -1, q.shape[-1])
            mask = is_seen[:, None, None].expand(-1, *grouped.shape[1:3], -1)
            found = F.scaled_dot_product_attention(
                grouped, keys[:, :, :num_seen], values[:, :, :num_seen], attn_mask=mask
            )
            return found.reshape(q.shape)

        self._last_RH = self._target.run(new_R[:, None], self.places_R[:, None], attend)[0][:, 0]
        self.places_R = self.places_R + 1


@torch.inference_mode()
def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    ends: Sequence[int],
) -> list[list[int]]:
    """The target's answers to some prompts, including the end token if one was sampled."""
    requests = _Requests(target, prompts, temperatures, max_tokens)
    ends_E = torch.tensor(ends, device=target.device)
    out_NM = torch.full((len(prompts), max_tokens), -1, dtype=torch.int64, device=target.device)
    for step in range(max_tokens):
        new_R = requests.sample()
        out_NM[requests.rows_R, step] = torch.where(requests.is_done_R, -1, new_R)
        requests.is_done_R = requests.is_done_R | torch.isin(new_R, ends_E)
        if step % DROP_EVERY == DROP_EVERY - 1:
            new_R = requests.drop_done(new_R)
        if step == max_tokens - 1 or len(new_R) == 0:
            break
        requests.step(new_R, requests.longest + step + 1)
    return [[token for token in row if token >= 0] for row in out_NM.tolist()]


def answer_all(
    target: Target, prompts: Sequence[Sequence[int]], ends: Sequence[int], settings: Settings, path: Path
) -> None:
    """Write the texts: each prompt twice, in random order, until all are answered or the time is over."""
    rng = random.Random(settings.seed)
    jobs = [(p, t) for p in prompts for t in (0.0, rng.choice(TEMPERATURES))]
    rng.shuffle(jobs)
    size, start = settings.answers_at_once, time.perf_counter()
    pairs, temperatures = [], []
    for first in range(0, len(jobs), 8 * size):
        pool = sorted(jobs[first : first + 8 * size], key=lambda job: len(job[0]))
        for at in range(0, len(pool), size):
            if time.perf_counter() - start > settings.answer_seconds:
                break
            show_progress("answers", first + at, len(jobs))
            asked, at_temperatures = zip(*pool[at : at + size], strict=True)
            found = answer(target, asked, at_temperatures, settings.max_tokens, ends)
            for prompt, tokens, temperature in zip(asked, found, at_temperatures, strict=True):
                if len(tokens) >= LEAST_ANSWER:
                    pairs.append((prompt, tokens))
                    temperatures.append(temperature)
    if not pairs:
        raise ValueError(f"no answer has {LEAST_ANSWER} tokens: give more prompts, or more --answer-seconds")
    texts = Texts.of(pairs)
    partial = path.with_name(path.name + ".partial")
    kept = {"tokens_T": texts.tokens_T, "starts_N1": texts.starts_N1, "num_prompt_N": texts.num_prompt_N}
    save_file(kept | {"temperature_N": torch.tensor(temperatures, dtype=torch.float64)}, partial)
    partial.replace(path)


def load(path: Path) -> list[Text]:
    found = load_file(path)
    pieces = [found["tokens_T"][a:b] for a, b in pairwise(found["starts_N1"].tolist())]
    return list(map(Text, pieces, found["num_prompt_N"].tolist(), found["temperature_N"].tolist()))


def hold_back(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(training texts, held-out texts): both texts of a prompt are in the same part; held out are only temperatures 0
    and 0.8."""
    texts = list(texts)
    random.Random(1).shuffle(texts)
    prompts = {text.prompt for text in texts[: max(1, min(192, len(texts) // 40))]}
    learnt = [text for text in texts if text.prompt not in prompts]
    if not learnt:
        raise ValueError("all texts are held back: give more prompts")
    held = [text for text in texts if text.prompt in prompts and text.temperature in (0.0, 0.8)]
    return learnt, sorted(held, key=lambda text: len(text.tokens_T))
