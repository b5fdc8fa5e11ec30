"""XPress: a DFlash block whose drafts are refined together, each round reading the round before (Jacobi iteration).

Shapes: R requests, J rows of a block, H hidden, E rank, V columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.drafters.block import BlockNetwork, BlockSettings, drafter
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.parallel import Block, Decode, DrawSlot
from draftproof.models import cost
from draftproof.models.cost import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class XPressSettings:
    block: BlockSettings
    rank: int
    mlp_ratio: int
    num_rounds: int


class JacobiDecode(Decode):
    """Decoding in rounds. After round n the first n drafts equal those of drawing one by one."""

    def __init__(self, ctx: DraftContext, s: XPressSettings) -> None:
        builder = ctx.builder
        c = s.block
        hidden = c.layers.hidden_size
        rank = s.rank
        inner = s.rank * s.mlp_ratio
        size = c.block_size
        self._num_rounds = s.num_rounds
        self._block_size = size
        self._before_VE = builder.tensor("refiner_head.token_embed.weight", (c.layers.vocab_size, rank))
        self._own = builder.linear("refiner_head.down_h", hidden, rank)
        self._whole = builder.linear("refiner_head.down_g", hidden, rank)
        self._in = builder.linear("refiner_head.in_proj", 3 * rank, rank)
        self._mix_EJJ = builder.tensor("refiner_head.mix_l", (rank, size, size)).tril()
        self._gate_up = builder.linear(
            [f"refiner_head.mlp_{part}" for part in ("gate", "up")], rank, [inner, inner]
        )
        self._down = builder.linear("refiner_head.mlp_down", inner, rank)
        self._readout = builder.linear(
            "refiner_head.readout", rank, c.draft_vocab_size, out_dtype=torch.float32
        )
        self._silu_mul = builder.ops.silu_mul

    def __call__(self, block: Block, draw: DrawSlot) -> tuple[list[Tensor], None]:
        num = len(block.logits_KRV)
        first = block.first
        known = [block.before_R, block.anchor_R] if first else [block.anchor_R]
        tokens = [draw(k, block.logits_KRV[k]) for k in range(num)]
        cache_JRX = self.cache(block.hidden_JRH)[: first + num]
        for _ in range(self._num_rounds):
            before_JR = torch.stack([*known, *tokens][: first + num])
            bias_JRV = self.bias(cache_JRX, before_JR, block)
            tokens = [draw(k, block.logits_KRV[k] + bias_JRV[first + k]) for k in range(num)]
        return tokens, None

    def cost(self, num_requests: int, num_drafts: int) -> Cost:
        """Cost of a block; the weights of a round are read in every round."""
        in_rounds = (self._in, self._gate_up, self._down, self._readout)
        found = cost.linear(self._whole, num_requests)
        found += cost.linear(self._own, num_requests * self._block_size)
        for packed in in_rounds:
            found += cost.linear(packed, num_requests * num_drafts) * self._num_rounds
        return found

    def cache(self, hidden_JRH: Tensor) -> Tensor:
        """The part that is constant over rounds: each row's state and the block's mean, [J, R, 2E]."""
        num_rows, R, hidden = hidden_JRH.shape
        own = self._own(hidden_JRH.reshape(-1, hidden)).view(num_rows, R, -1)
        return torch.cat((own, self._whole(hidden_JRH.mean(0)).expand_as(own)), -1)

    def bias(self, cache_JRX: Tensor, before_JR: Tensor, block: Block) -> Tensor:
        """The bias that a round adds to the logits of the first J rows, given the token before each: [J, R, V]."""
        num_rows, R = before_JR.shape
        before_NE = block.gather(self._before_VE, before_JR.reshape(-1))
        x_NE = self._in(torch.cat((cache_JRX.flatten(0, 1), before_NE), -1))
        x_JRE = x_NE.view(num_rows, R, -1)
        mixed_JRE = torch.einsum("ekj,jre->kre", self._mix_EJJ[:, :num_rows, :num_rows], x_JRE)
        x_NE = x_NE + mixed_JRE.reshape(x_NE.shape)
        x_NE = x_NE + self._down(self._silu_mul(self._gate_up(x_NE)))
        return self._readout(x_NE).view(num_rows, R, -1)


def build(ctx: DraftContext) -> HeadDrafter:
    s = ctx.settings(XPressSettings)
    return drafter(ctx, BlockNetwork(ctx, s.block), JacobiDecode(ctx, s))
