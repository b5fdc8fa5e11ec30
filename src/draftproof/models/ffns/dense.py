"""The gated MLP: down(activation(gate(x)) * up(x)).

Shapes: T rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from draftproof.kernels.exactness import Case
from draftproof.models.builder import LayerBuilder
from draftproof.models.cases import Where, gate_case
from draftproof.models.reading import Given
from draftproof.models.spec import FfnConfig, Norms, WeightCount


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """Settings of an MLP. `width`: intermediate size; `gelu`: the gate's activation is gelu instead of silu."""

    width: int
    gelu: bool = False
    bias: bool = False

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, hidden_size: int) -> MLP:
        return MLP(builder, f"{prefix}.mlp", hidden_size, self)

    def num_weights(self, hidden_size: int, rows: int) -> WeightCount:
        total = 3 * hidden_size * self.width
        return WeightCount(total, total)

    def cases(self, where: Where, norms: Norms, hidden_size: int) -> Iterator[Case]:
        yield gate_case(self.width, where, gelu=self.gelu)


class MLP:
    """down(silu(gate(x)) * up(x)), or with gelu; gate and up are one product. The stream is not read."""

    __slots__ = ("_gate_mul", "down", "gate_up")

    def __init__(self, builder: LayerBuilder, prefix: str, hidden: int, config: DenseConfig) -> None:
        self._gate_mul = builder.ops.gelu_mul if config.gelu else builder.ops.silu_mul
        self.gate_up = builder.linear(
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
            hidden,
            [config.width, config.width],
            bias=config.bias,
        )
        self.down = builder.linear(f"{prefix}.down_proj", config.width, hidden, bias=config.bias)

    def __call__(self, x_TH: Tensor, stream_TH: Tensor | None = None) -> Tensor:
        return self.down(self._gate_mul(self.gate_up(x_TH)))

    def partial_sums(self, x_TH: Tensor, stream_TH: Tensor | None = None) -> Tensor:
        return self.down.partial_sums(self._gate_mul(self.gate_up(x_TH)))


def read(given: Given) -> list[FfnConfig]:
    """The MLP settings, equal in every layer."""
    bias = given.switch(given.family.mlp_bias)
    return [DenseConfig(width=given.whole("intermediate_size"), bias=bias)] * given.num_layers
