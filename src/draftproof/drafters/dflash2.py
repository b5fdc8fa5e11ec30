"""DFlash-2: a DFlash block with short convolutions around its sublayers, and a selector over each row's best tokens.

Shapes: R requests, N draft rows = R blocks of B rows, H hidden in G groups, W taps, E rank, C candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.attention.base import PagedAttention
from draftproof.drafters.block import BlockNetwork, BlockSettings, drafter
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter, PassSize
from draftproof.drafters.parallel import Block, Decode, DrawSlot
from draftproof.models import cost
from draftproof.models.cost import Cost
from draftproof.models.layers import DecoderLayer, SandwichLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Settings:
    block: BlockSettings
    taps: int
    group_size: int
    rank: int
    num_candidates: int


class BlockConv:
    """Causal convolutions within a block, before and after a sublayer. Each row has its own kernels: a learned kernel
    [taps, H] plus, for each tap and group, a projection of the sublayer's input."""

    def __init__(self, ctx: DraftContext, s: DFlash2Settings, prefix: str) -> None:
        hidden = s.block.layers.hidden_size
        self._size = s.block.block_size
        groups = hidden // s.group_size
        self._kernel_2WH = ctx.builder.tensor(f"{prefix}.base_kernel", (2, s.taps, hidden))
        self.projection = ctx.builder.linear(f"{prefix}.kernel_projection", hidden, 2 * s.taps * groups)
        self._shape = (2, s.taps, groups, 1)

    def before(self, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        """(convolved input of the sublayer, kernels for its output [N, W, H])."""
        added_N2WG1 = self.projection(x_NH).view(-1, *self._shape)
        groups = self._kernel_2WH.view(*self._shape[:-1], -1)
        kernels_N2WH = (added_N2WG1 + groups).view(-1, *self._kernel_2WH.shape)
        return self.convolve(x_NH, kernels_N2WH[:, 0]), kernels_N2WH[:, 1]

    def convolve(self, x_NH: Tensor, kernels_NWH: Tensor) -> Tensor:
        x_RBH = x_NH.view(-1, self._size, x_NH.shape[1])
        out_NH = x_NH * kernels_NWH[:, 0]
        for tap in range(1, kernels_NWH.shape[1]):
            earlier_RBH = torch.nn.functional.pad(x_RBH, (0, 0, tap, 0))[:, : self._size]
            out_NH = out_NH + earlier_RBH.reshape(x_NH.shape) * kernels_NWH[:, tap]
        return out_NH


class ConvLayer:
    """A decoder layer with convolutions around attention and MLP."""

    def __init__(self, layer: DecoderLayer | SandwichLayer, attention: BlockConv, mlp: BlockConv) -> None:
        self.input_norm = layer.input_norm
        self._layer = layer
        self._attention = attention
        self._mlp = mlp

    def __call__(self, x_TX: Tensor, residual_TH: Tensor, attn: PagedAttention) -> tuple[Tensor, Tensor]:
        layer = self._layer
        x_NH, kernels = self._attention.before(x_TX)
        x_NH = self._attention.convolve(layer.mixer(x_NH, attn), kernels)
        x_NH, residual_NH = layer.post_norm.add(x_NH, residual_TH)
        x_NH, kernels = self._mlp.before(x_NH)
        return self._mlp.convolve(layer.ffn(x_NH, residual_NH), kernels), residual_NH


class SelectorDecode(Decode):
    """Rescores a row's top candidates by the previous token and the row's state."""

    def __init__(self, ctx: DraftContext, s: DFlash2Settings) -> None:
        builder = ctx.builder
        size = (s.block.layers.vocab_size, s.rank)
        self._before_VE = builder.tensor("candidate_selector.predecessor_codebook", size)
        self._after_VE = builder.tensor("candidate_selector.successor_codebook", size)
        self._projection = builder.linear(
            "candidate_selector.hidden_projection", s.block.layers.hidden_size, s.rank
        )
        self._num = s.num_candidates

    def __call__(self, block: Block, draw: DrawSlot) -> tuple[list[Tensor], None]:
        tokens = list[Tensor]()
        before_R = block.anchor_R
        for k, logits_RV in enumerate(block.logits_KRV):
            ids_RC = logits_RV.topk(self._num).indices
            scores_RC = self.scores(logits_RV, block.hidden_JRH[block.first + k], before_R, ids_RC)
            tokens.append(draw(k, torch.full_like(logits_RV, -torch.inf).scatter(1, ids_RC, scores_RC)))
            before_R = tokens[-1]
        return tokens, None

    def cost(self, num_requests: int, num_drafts: int) -> Cost:
        return cost.linear(self._projection, num_requests) * num_drafts

    def scores(self, logits_RV: Tensor, hidden_RH: Tensor, before_R: Tensor, ids_RC: Tensor) -> Tensor:
        context_RE = self._before_VE[before_R.clamp(min=0)] * self._projection(hidden_RH)
        return logits_RV.gather(1, ids_RC) + (context_RE[:, None] * self._after_VE[ids_RC]).sum(-1)


class ConvNetwork(BlockNetwork):
    """The block's network with convolutions in every layer."""

    def __init__(self, ctx: DraftContext, s: DFlash2Settings) -> None:
        self._convs: list[BlockConv] = []

        def wrap(i: int, layer: DecoderLayer | SandwichLayer) -> ConvLayer:
            own = [BlockConv(ctx, s, f"layers.{i}.{part}_conv") for part in ("attention", "mlp")]
            self._convs += own
            return ConvLayer(layer, *own)

        super().__init__(ctx, s.block, wrap)

    def cost(self, size: PassSize) -> Cost:
        num_rows = size.requests * size.fed
        return sum((cost.linear(conv.projection, num_rows) for conv in self._convs), super().cost(size))


def build(ctx: DraftContext) -> HeadDrafter:
    s = ctx.settings(DFlash2Settings)
    return drafter(ctx, ConvNetwork(ctx, s), SelectorDecode(ctx, s))
