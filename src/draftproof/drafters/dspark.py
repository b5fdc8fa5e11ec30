"""DSpark: a DFlash block drafted left to right, each draft's logits biased (low rank) by the draft before it.

Its confidence head estimates whether a draft will be accepted, and may end a proposal early: at a threshold that the
user sets and, if the engine chooses the number of drafts, at the cost of verifying one more.
Shapes: R requests, H hidden, E rank of the bias, V columns of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from draftproof.config import parse_options
from draftproof.drafters.block import BlockNetwork, BlockSettings, drafter
from draftproof.drafters.context import DraftContext
from draftproof.drafters.head import HeadDrafter
from draftproof.drafters.parallel import Block, Decode, DrawSlot
from draftproof.matmul.linear import PackedLinear
from draftproof.models import cost
from draftproof.models.cost import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkSettings:
    """Settings of a head. `rank` 0: no bias. `confidence`: it has a confidence head; `confidence_reads_token`: that
    reads the previous token."""

    block: BlockSettings
    rank: int
    kind: Literal["vanilla", "gated", "rnn"]
    confidence: bool
    confidence_reads_token: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkOptions:
    """Settings of the method. A proposal ends before the first draft whose estimated acceptance is below
    `confidence_threshold`; 0: never."""

    confidence_threshold: float = 0.0

    def __post_init__(self) -> None:
        value = self.confidence_threshold
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise ValueError(f"speculative_config: confidence_threshold={value!r}: must be from 0 to 1")


class MarkovDecode(Decode):
    """Decoding from left to right. Only the `rnn` kind carries a state from slot to slot."""

    def __init__(self, ctx: DraftContext, s: DSparkSettings, threshold: float, *, is_auto: bool) -> None:
        builder = ctx.builder
        c = s.block
        hidden = c.layers.hidden_size
        rank = s.rank
        vocab = c.layers.vocab_size
        self._rank = rank
        self._kind = s.kind
        self._threshold = threshold
        self._products: list[PackedLinear] = []  # those computed for every draft

        def linear(name: str, num_in: int, num_out: int, **options: Any) -> PackedLinear:
            self._products.append(builder.linear(name, num_in, num_out, **options))
            return self._products[-1]

        if rank:
            self._before_VE = builder.tensor("markov_head.markov_w1.weight", (vocab, rank))
            self._bias = linear("markov_head.markov_w2", rank, c.draft_vocab_size, out_dtype=torch.float32)
        if rank and s.kind == "gated":
            self._gate = linear("markov_head.gate_proj", hidden + rank, rank, bias=True)
        elif rank and s.kind == "rnn":
            self._joint = linear("markov_head.joint_proj", 2 * rank + hidden, 3 * rank, bias=True)
        self._reads_token = s.confidence_reads_token and rank > 0
        self._confidence = None
        if threshold or (is_auto and s.confidence):
            width = hidden + self._reads_token * rank
            self._confidence = linear("confidence_head.proj", width, 1, bias=True, out_dtype=torch.float32)

    @property
    def estimates(self) -> bool:
        return self._confidence is not None

    def __call__(self, block: Block, draw: DrawSlot) -> tuple[list[Tensor], Tensor | None]:
        tokens: list[Tensor] = []
        state_RE = None
        before_R = block.anchor_R
        open_R = torch.ones_like(before_R)
        survival_R = torch.ones_like(before_R, dtype=torch.float32)
        tokens_R = torch.ones_like(survival_R)  # expected, with the drafts so far
        count_R = torch.zeros_like(before_R)
        others, rows = (None, None) if block.price is None else block.price[:2].unbind()
        for j, hidden_RH in enumerate(block.hidden_JRH[: block.first + len(block.logits_KRV)]):
            k = j - block.first  # a row without a draft of its own is still a step of the recurrence
            bias_RV, before_RE, state_RE = self.step(hidden_RH, before_R, state_RE, block)
            if k < 0:
                continue
            if self._confidence is not None:
                confidence_R = self.confidence(hidden_RH, before_RE)
                open_R = open_R * (confidence_R >= self._threshold)
                if others is not None and rows is not None:
                    survival_R = survival_R * confidence_R
                    pays_R = survival_R * (rows + k) >= others + tokens_R
                    open_R = open_R * (pays_R | (rows == 0))
                    tokens_R = tokens_R + survival_R
                count_R = count_R + open_R
            tokens.append(draw(k, block.logits_KRV[k] + bias_RV))
            before_R = tokens[-1]
        return tokens, None if self._confidence is None else count_R

    def cost(self, num_requests: int, num_drafts: int) -> Cost:
        return sum((cost.linear(packed, num_requests) for packed in self._products), Cost()) * num_drafts

    def step(
        self, hidden_RH: Tensor, before_R: Tensor, state_RE: Tensor | None, block: Block
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(bias of the logits, embedding of the token before, next state)."""
        if not self._rank:
            return hidden_RH.new_zeros(1), hidden_RH[:, :0], None
        before_RE = block.gather(self._before_VE, before_R)
        if self._kind == "vanilla":
            return self._bias(before_RE), before_RE, None
        if self._kind == "gated":
            gate_RE = torch.sigmoid(self._gate(torch.cat((hidden_RH, before_RE), -1)))
            return self._bias(gate_RE * before_RE), before_RE, None
        state_RE = torch.zeros_like(before_RE) if state_RE is None else state_RE
        joint = self._joint(torch.cat((state_RE, before_RE, hidden_RH), -1))
        gate_RE, fresh_RE, out_RE = joint.split(self._rank, -1)
        gate_RE = torch.sigmoid(gate_RE)
        state_RE = gate_RE * state_RE + (1 - gate_RE) * torch.tanh(fresh_RE)
        return self._bias(torch.tanh(out_RE)), before_RE, state_RE

    def confidence(self, hidden_RH: Tensor, before_RE: Tensor) -> Tensor:
        """Probability that the row's draft is accepted, [R]."""
        assert self._confidence is not None
        read_RX = torch.cat((hidden_RH, before_RE), -1) if self._reads_token else hidden_RH
        return torch.sigmoid(self._confidence(read_RX))[:, 0]


def build(ctx: DraftContext) -> HeadDrafter:
    options = parse_options("speculative_config", ctx.options, DSparkOptions)
    s = ctx.settings(DSparkSettings)
    if options.confidence_threshold and not s.confidence:
        raise ValueError("speculative_config: confidence_threshold: this head makes no such estimate")
    network = BlockNetwork(ctx, s.block)
    config = ctx.config.speculative_config
    is_auto = config is not None and config.is_auto
    decode = MarkovDecode(ctx, s, options.confidence_threshold, is_auto=is_auto)
    network.spec = replace(network.spec, estimates=decode.estimates)
    return drafter(ctx, network, decode)
