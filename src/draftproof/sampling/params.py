"""The sampling parameters of every slot, on the device, and the host's knowledge of which slots need processing.

Shapes: S slots, V vocabulary, N numbers of the longest list.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from draftproof.kernels.process.spec import HEADER, pack_list
from draftproof.kernels.row_params import CONSTRAINED, NUM_COLUMNS, PENALISED, RowParams, pack_row
from draftproof.runtime.transfer import upload
from draftproof.types import SamplingParams


class SamplingTable:
    """Parameters per slot. A free slot is greedy and unconstrained, so padding rows that name it are harmless.

    `lists_SN`: what each slot rules out and weighs, as `kernels.process` reads it. A longer list than any before moves
    all to a larger table, and `generation`, from 1, counts these: what was recorded with an earlier one is stale.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        free = torch.tensor(pack_row(), dtype=torch.int64, device=self.device)
        self.params_S = RowParams(free.expand(num_slots, NUM_COLUMNS).clone())
        self.lists_SN = torch.zeros((num_slots, 16 * HEADER), dtype=torch.int32, device=self.device)
        self.generation = 1
        self._free = free
        self._processed: set[int] = set()  # slots whose requests ask for more than temperature and filters

    @property
    def num_slots(self) -> int:
        return len(self.params_S)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        row_seed: int,
        prompt_len: int,
        stop_ids: frozenset[int] = frozenset(),
        bad_words_ids: list[list[int]] | None = None,
    ) -> None:
        """Fill `slot`. `prompt_len`: tokens of the user's prompt, also after a preemption; `stop_ids`: EOS and stop
        ids that `min_tokens` holds back; `bad_words_ids`: token sequences of `params.bad_words`. All ids have been
        checked against the vocabulary.
        """
        self.release(slot)
        held_back = [i for i in sorted(stop_ids) if 0 <= i < self.vocab_size] if params.min_tokens else []
        words = [word for word in bad_words_ids or [] if word]
        flags = 0
        if held_back or words or params.logit_bias or params.allowed_token_ids is not None:
            flags |= CONSTRAINED
            bias, allowed = params.logit_bias or {}, params.allowed_token_ids
            self._store_list(slot, pack_list(held_back, bias, words, allowed, self.vocab_size))
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0):
            flags |= PENALISED
        if flags:
            self._processed.add(slot)
        row = pack_row(
            seed=row_seed,
            top_k=max(params.top_k, 0),
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            prompt_len=prompt_len,
            flags=flags,
            held_until=prompt_len + params.min_tokens,
        )
        self.params_S.packed_MC[slot] = upload(row, self.device)

    def release(self, slot: int) -> None:
        """Give `slot` a free slot's values again."""
        self._processed.discard(slot)
        self.params_S.packed_MC[slot] = self._free

    def has_processing(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots' requests asks for more than temperature and filters."""
        return bool(self._processed) and not self._processed.isdisjoint(slots)

    def _store_list(self, slot: int, numbers: list[int]) -> None:
        width = self.lists_SN.shape[1]
        if len(numbers) > width:
            while width < len(numbers):
                width *= 2
            larger_SN = self.lists_SN.new_zeros((self.num_slots, width))
            larger_SN[:, : self.lists_SN.shape[1]] = self.lists_SN
            self.lists_SN, self.generation = larger_SN, self.generation + 1
        self.lists_SN[slot, : len(numbers)] = upload(numbers, self.device).int()
