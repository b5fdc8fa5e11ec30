"""The sampling parameters of every slot, on the device, and the host's record of which slots need processing.

Shapes: S slots, V vocabulary, N entries of the longest list, M rows of a pass, W words of 32 bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from draftproof.kernels.process.spec import HEADER, pack_list
from draftproof.kernels.row_params import CONSTRAINED, MASKED, NUM_COLUMNS, PENALISED, RowParams, pack_row
from draftproof.runtime.transfer import upload
from draftproof.types import SamplingParams


class SamplingTable:
    """Sampling parameters per slot. A free slot is greedy and unconstrained, so padding rows may safely name it.

    `lists_SN`: each slot's bans, biases and allowed ids, in the format of `kernels.process`. A list longer than any
    before moves all to a larger table and increments `generation` (from 1); recordings made with an earlier generation
    are stale. `masks_MW`: the allowed ids of each row of the pass, set by the host; allocated when first needed.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu", *, max_rows: int = 1
    ) -> None:
        """max_rows: the most rows that a pass samples."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.max_rows = max_rows
        self.masks_MW = torch.zeros((0, -(-vocab_size // 32)), dtype=torch.int32, device=self.device)
        self._masks_on_host = self.masks_MW
        free = torch.tensor(pack_row(), dtype=torch.int64, device=self.device)
        self.params_S = RowParams(free.expand(num_slots, NUM_COLUMNS).clone())
        self.lists_SN = torch.zeros((num_slots, 16 * HEADER), dtype=torch.int32, device=self.device)
        self.generation = 1
        self._free = free
        self._processed: set[int] = set()  # slots whose requests need more than temperature and filters

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
        *,
        is_masked: bool = False,
    ) -> None:
        """Fill `slot`.

        `prompt_len`: tokens of the user's prompt, also after a preemption. `stop_ids`: EOS and stop ids that
        `min_tokens` suppresses. `bad_words_ids`: token sequences of `params.bad_words`. `is_masked`: the host sets a
        mask for each of its rows. All ids have been checked against the vocabulary.
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
        if is_masked:
            flags |= MASKED
            self._make_room_for_masks()
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
        """Reset `slot` to the values of a free slot."""
        self._processed.discard(slot)
        self.params_S.packed_MC[slot] = self._free

    def has_processing(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots' requests needs more than temperature and filters."""
        return bool(self._processed) and not self._processed.isdisjoint(slots)

    def load_masks(self, masks: Sequence[tuple[int, bytes]]) -> None:
        """Set the masks of the next pass, each entry (first row, masks of that row and the rows after it).

        The device must have finished reading the masks of an earlier pass.
        """
        host_MW = self._masks_on_host
        max_rows, num_words = host_MW.shape
        first_byte, row_bytes = host_MW.data_ptr(), 4 * num_words
        num_rows = 0
        for first, rows in masks:
            num_rows = max(num_rows, first + len(rows) // row_bytes)
            assert len(rows) % row_bytes == 0 and num_rows <= max_rows, (first, len(rows), max_rows)
            ctypes.memmove(first_byte + first * row_bytes, rows, len(rows))
        if host_MW is not self.masks_MW:
            self.masks_MW[:num_rows].copy_(host_MW[:num_rows], non_blocking=True)

    def _make_room_for_masks(self) -> None:
        if len(self.masks_MW):
            return
        self.masks_MW = self.masks_MW.new_zeros((self.max_rows, self.masks_MW.shape[1]))
        self.generation += 1
        self._masks_on_host = self.masks_MW
        if self.device.type != "cpu":
            self._masks_on_host = torch.zeros(self.masks_MW.shape, dtype=torch.int32, pin_memory=True)

    def _store_list(self, slot: int, numbers: list[int]) -> None:
        width = self.lists_SN.shape[1]
        if len(numbers) > width:
            while width < len(numbers):
                width *= 2
            larger_SN = self.lists_SN.new_zeros((self.num_slots, width))
            larger_SN[:, : self.lists_SN.shape[1]] = self.lists_SN
            self.lists_SN, self.generation = larger_SN, self.generation + 1
        self.lists_SN[slot, : len(numbers)] = upload(numbers, self.device).int()
