"""Records the target's hidden states at tapped layers, for every token of given texts, by running the engine.

Shapes: N texts, T rows of all texts, S tapped layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from draftproof.config import EngineConfig
from draftproof.drafters.base import DraftSpec, Proposal, Taps, Verified, no_proposal
from draftproof.frontend.llm import LLM
from draftproof.types import SamplingParams

METHOD = f"{__name__}.Recorder"
_recording: dict[int, States] = {}  # by the recorder's setting "key"


class States:
    """Buffer for the states of some texts, filled as the engine computes their rows."""

    def __init__(self, texts: Sequence[Sequence[int]], num_taps: int, hidden_size: int) -> None:
        ends = torch.tensor([0, *map(len, texts)]).cumsum(0).tolist()
        self._first_row = {tuple(text): start for text, (start, _) in zip(texts, pairwise(ends), strict=True)}
        self.texts = texts
        self.starts = ends[:-1]
        self.states_TSH = torch.zeros(ends[-1], num_taps, hidden_size, dtype=torch.bfloat16)
        self.is_known_T = torch.zeros(ends[-1], dtype=torch.bool)

    def first_row_of(self, text: Sequence[int]) -> int | None:
        return self._first_row.get(tuple(text))

    def complete(self) -> Tensor:
        """The states of every row. Equal texts were recorded once and are copied here."""
        for text, start in zip(self.texts, self.starts, strict=True):
            first = self._first_row[tuple(text)]
            if first != start:
                rows = slice(first, first + len(text))
                self.states_TSH[start : start + len(text)] = self.states_TSH[rows]
                self.is_known_T[start : start + len(text)] = self.is_known_T[rows]
        assert bool(self.is_known_T.all()), "a row was never computed"
        return self.states_TSH


class Recorder:
    """A drafter that proposes nothing and records the tapped states of the wanted texts."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.speculative_config is not None
        options = config.speculative_config.options
        self.spec = DraftSpec(taps=Taps(layers=tuple(options["taps"])))
        self._key = int(options["key"])
        self._first_row: dict[int, int] = {}  # slot -> first row of its text

    def admit(self, slot: int, tokens: Sequence[int], num_cached: int) -> None:
        first = _recording[self._key].first_row_of(tokens) if self._key in _recording else None
        if first is not None:
            self._first_row[slot] = first

    def release(self, slot: int) -> None:
        self._first_row.pop(slot, None)

    def propose(self, verified: Verified, num_drafts: int) -> Proposal:
        if self._key in _recording:
            self._keep(verified, _recording[self._key])
        return no_proposal(verified)

    def _keep(self, verified: Verified, into: States) -> None:
        ends = verified.query_start_loc_R1.tolist()
        slots, live = verified.slots_R.tolist(), verified.live_R.tolist()
        places: list[int] = []
        rows: list[int] = []
        positions = verified.positions_T.tolist()
        for slot, num_live, (start, _) in zip(slots, live, pairwise(ends), strict=True):
            first = self._first_row.get(slot)
            if first is not None:
                rows += range(start, start + num_live)
                places += [first + position for position in positions[start : start + num_live]]
        if rows:
            taken_TSH = torch.stack([tap[rows] for tap in verified.taps], 1)
            into.states_TSH[places] = taken_TSH.to("cpu", torch.bfloat16)
            into.is_known_T[places] = True


class StateReader:
    """An engine that computes the states of texts. `taps`: ids of layers, as in `Taps`."""

    def __init__(self, taps: Sequence[int], engine: dict[str, Any]) -> None:
        self._key = max(_recording, default=0) + 1
        self.taps = tuple(taps)
        drafter = {"method": METHOD, "num_speculative_tokens": 1, "taps": list(taps), "key": self._key}
        self.llm = LLM(**{**engine, "speculative_config": drafter, "enable_prefix_caching": False})

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The states at every token of the texts, one text after the other: bf16 [T, S, H], on the CPU."""
        states = States(texts, len(self.taps), self.llm.model_config.hidden_size)
        _recording[self._key] = states
        try:
            params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            outputs = self.llm.generate(
                [{"prompt_token_ids": list(t)} for t in texts], params, use_tqdm=False
            )
        finally:
            del _recording[self._key]
        for output in outputs:
            if output.error:
                raise ValueError(output.error)
        return states.complete()

    def close(self) -> None:
        self.llm.close()
