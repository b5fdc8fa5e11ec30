"""The sampler: turns logits of a pass into tokens and logprobs, using each slot's parameters.

Shapes: M rows, V vocabulary, S slots, L positions, R requests of a round, N alternatives.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftproof.kernels.ops import Ops
from draftproof.kernels.process.spec import NO_NUMBER as NO_NUMBER
from draftproof.kernels.process.spec import NONE_LEFT as NONE_LEFT
from draftproof.kernels.row_params import RowParams
from draftproof.sampling.params import SamplingTable


class Sampler:
    """Sampling by law 1 with a table of per-slot parameters. Stateless."""

    def __init__(self, table: SamplingTable, ops: Ops) -> None:
        self.table = table
        self.ops = ops

    def rows(self, slots_M: Tensor) -> RowParams:
        """The parameters of each row; slots_M int64 [M]."""
        return RowParams(self.ops.gather(self.table.params_S.packed_MC, slots_M))

    def process(
        self, logits_MV: Tensor, params: RowParams, slots_M: Tensor, positions_M: Tensor, tokens_SL: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.process.Process`."""
        lists_SN, masks_MW = self.table.lists_SN, self.table.masks_MW
        return self.ops.process(logits_MV, params, slots_M, positions_M, tokens_SL, lists_SN, masks_MW)

    def sample(
        self,
        logits_MV: Tensor,
        slots_M: Tensor,
        positions_M: Tensor,
        tokens_SL: Tensor,
        *,
        has_processing: bool,
    ) -> Tensor:
        """The token of each target row: int64 [M], `NO_NUMBER` or `NONE_LEFT` if no token is possible.

        logits_MV fp32, not modified; slots_M, positions_M int64: the slot and the position to sample; tokens_SL int32:
        known tokens, then the drafts being verified; has_processing: some row's request needs more than temperature and
        filters.
        """
        params, failures_M = self.rows(slots_M), None
        if has_processing:
            logits_MV, failures_M = self.process(logits_MV, params, slots_M, positions_M, tokens_SL)
        return self.ops.sample(logits_MV, params, positions_M, None, failures_M)

    def draw(
        self, logits_MV: Tensor, slots_M: Tensor, positions_M: Tensor, ids_V: Tensor | None = None
    ) -> Tensor:
        """The token of each draft row: the request's temperature and filters, with the noise of `sample`.

        Filters raise acceptance; unset filters cost nothing. ids_V int64: target id of each column of a reduced
        vocabulary. Returns int64 [M] target ids.
        """
        return self.ops.sample(logits_MV, self.rows(slots_M), positions_M, ids_V)

    def drawer(self, slots_R: Tensor, lengths_R: Tensor | None = None) -> RoundDraw:
        """`draw` for the requests of one round, as drafters call it: rows are indexed by request, not by slot."""
        return RoundDraw(self.ops, self.rows(slots_R))

    def logprobs(
        self, logits_MV: Tensor, tokens_M: Tensor, num: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logprob_M of each token, rank_M from 1, the `num` likeliest ids_MN, their logprobs_MN).

        Computed from raw logits; fp32 and int64. Equal logits are ordered by id, in ranks and in the list.
        """
        norm_M1 = self.ops.log_normalizer(logits_MV)[:, None]
        tokens_M1 = tokens_M.long()[:, None]
        chosen_M1 = logits_MV.gather(1, tokens_M1)
        ids_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        above_MV = (logits_MV > chosen_M1) | ((logits_MV == chosen_M1) & (ids_V < tokens_M1))
        top_ids_MN = top_ids(logits_MV, num)
        top_MN = logits_MV.gather(1, top_ids_MN) - norm_M1
        return (chosen_M1 - norm_M1)[:, 0], above_MV.sum(-1) + 1, top_ids_MN, top_MN


class Draw(Protocol):
    """A drafter's sampling function. `over(inputs)` draws from other `inputs`, so that a recorded draft pass can be
    replayed.
    """

    @property
    def inputs(self) -> tuple[Tensor, ...]: ...

    def over(self, inputs: tuple[Tensor, ...]) -> Draw: ...

    def __call__(
        self, logits_MV: Tensor, rows_M: Tensor | None, positions_M: Tensor, ids_V: Tensor | None = None
    ) -> Tensor:
        """A token for each row of draft logits, at the request's temperature and with the engine's shared noise.

        rows_M: int64 index of the request in this round (0..R-1); None: each request once, in order.
        positions_M: int64 position of the drafted token.
        ids_V: int64 target id of each column if the draft vocabulary is reduced. Returns int64 target ids.
        """
        ...


class RoundDraw:
    """A `Draw` for one round in exact mode: a pure function of its `inputs`."""

    def __init__(self, ops: Ops, params: RowParams) -> None:
        self._ops = ops
        self._params = params

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self._params.packed_MC,)

    def over(self, inputs: tuple[Tensor, ...]) -> RoundDraw:
        """This draw with other inputs."""
        return RoundDraw(self._ops, RowParams(*inputs))

    def __call__(
        self, logits_MV: Tensor, rows_M: Tensor | None, positions_M: Tensor, ids_V: Tensor | None = None
    ) -> Tensor:
        """See `Draw`."""
        params = self._params if rows_M is None else self._params[rows_M]
        return self._ops.sample(logits_MV, params, positions_M, ids_V)


def top_ids(logits_MV: Tensor, num: int) -> Tensor:
    """Ids of the `num` largest logits in descending order, int64 [M, N]; ties in order of ascending id."""
    V = logits_MV.shape[1]
    bits_MV = (logits_MV + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered_MV = (bits_MV ^ ((bits_MV >> 31) & 0x7FFFFFFF)).long()
    # Keys are unique, so the result does not depend on how topk breaks ties.
    keys_MV = (ordered_MV << 32) + torch.arange(V - 1, -1, -1, device=logits_MV.device)
    return V - 1 - (keys_MV.topk(min(num, V), dim=-1).values & 0xFFFFFFFF)
