"""A mixture of experts: each row goes through the K experts with the best scores, and through the shared ones.

Shapes: T rows, E experts, K experts per row, P = T * K pairs of row and expert, H hidden size, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftproof.kernels import operator_checks as checks
from draftproof.kernels.exactness import Case
from draftproof.kernels.experts.spec import Routing
from draftproof.matmul.grouped import GroupedLinear
from draftproof.matmul.spec import DENSE
from draftproof.models.builder import LayerBuilder
from draftproof.models.cases import Where, gate_case, name_of
from draftproof.models.families import SIGMOID_ONLY
from draftproof.models.ffns.dense import MLP, DenseConfig
from draftproof.models.reading import Given
from draftproof.models.spec import FfnConfig, Norms, WeightCount
from draftproof.schema import flag, ids, number, shown, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Settings of a layer's experts. `width`: an expert's intermediate size; `shared`: the MLP that every row also goes
    through; `biased`: routing adds a correction bias to the scores; `blocks`, `parts`, `turned`: see `MoEFamily`."""

    num_experts: int
    width: int
    routing: Routing
    biased: bool = False
    shared: DenseConfig | None = None
    gelu: bool = False
    blocks: tuple[str, ...] = ()
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    turned: bool = False

    def load(self, builder: LayerBuilder, prefix: str, norms: Norms, hidden_size: int) -> MoE:
        """The module. Router and experts stay dense: the router decides which experts run, and experts are grouped
        products."""
        shared = None
        if self.shared is not None:
            shared = MLP(builder, f"{prefix}.mlp.shared_experts", hidden_size, self.shared)
        return MoE(replace(builder, kind=DENSE), prefix, hidden_size, self, shared)

    def num_weights(self, hidden_size: int, rows: int) -> WeightCount:
        shared = 0 if self.shared is None else self.shared.width
        always = hidden_size * (3 * shared + self.num_experts)
        expert = 3 * hidden_size * self.width
        chosen = self.num_experts * (1 - (1 - self.routing.top_k / self.num_experts) ** rows)
        return WeightCount(always + chosen * expert, always + self.routing.top_k * expert)

    def cases(self, where: Where, norms: Norms, hidden_size: int) -> Iterator[Case]:
        top_k = self.routing.top_k
        device, dtype = where.device, where.dtype
        key = f"route {top_k} of {self.num_experts}, {self.routing}, bias {self.biased}"
        route = partial(checks.route_check, self.num_experts, self.routing, device, biased=self.biased)
        yield Case("experts", key, route)
        shared = self.shared is not None
        key = f"combine {top_k} of {hidden_size} {name_of(dtype)}, shared {shared}"
        combine = partial(checks.combine_check, hidden_size, top_k, dtype, device, shared=shared)
        yield Case("experts", key, combine)
        yield gate_case(self.width, where, gelu=self.gelu)
        if self.shared is not None:
            yield from self.shared.cases(where, norms, hidden_size)


class MoE:
    """Router, experts and the shared expert."""

    __slots__ = (
        "_bias_E",
        "_experts",
        "_route",
        "_router",
        "_routing",
    )

    def __init__(
        self,
        builder: LayerBuilder,
        layer: str,
        hidden: int,
        config: ExpertsConfig,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """layer: prefix of the layer's tensors; shared: see `Experts`."""
        blocks = [f"{layer}.{name}" for name in config.blocks]
        block = next((name for name in blocks if f"{name}.gate.weight" in builder.weights), blocks[0])
        self._routing = config.routing
        self._route = builder.ops.experts.route
        self._router = builder.linear(f"{block}.gate", hidden, config.num_experts, out_dtype=torch.float32)
        self._bias_E = None
        if config.biased:  # never rounded: it decides which of two close experts is chosen
            name = f"{block}.gate.e_score_correction_bias"
            bias_E = builder.weights.get(name, (config.num_experts,), "finite")
            self._bias_E = bias_E.to(builder.device, torch.float32, copy=True)
        self._experts = Experts(builder, f"{block}.experts", hidden, config, shared)

    def __call__(self, x_TH: Tensor, stream_TH: Tensor | None = None) -> Tensor:
        experts_TK, weights_TK = self._route(self._router(x_TH), self._bias_E, self._routing)
        return self._experts(x_TH, experts_TK, weights_TK)

    def partial_sums(self, x_TH: Tensor, stream_TH: Tensor | None = None) -> Tensor:
        """Always a full sum: the experts' outputs are added here."""
        return self(x_TH)


class Experts:
    """The experts of one layer: each row's output is the sum over the experts chosen for it."""

    __slots__ = ("_down", "_gate_mul", "_gate_up", "_gather", "_num_experts", "_ops", "_shared")

    def __init__(
        self,
        builder: LayerBuilder,
        prefix: str,
        hidden: int,
        config: ExpertsConfig,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """shared: [T, H] -> [T, H], added to the experts' sum."""
        self._ops = builder.ops.experts
        self._gather = builder.ops.gather
        self._gate_mul = builder.ops.gelu_mul if config.gelu else builder.ops.silu_mul
        self._num_experts = config.num_experts
        self._shared = shared
        gate, up, down = config.parts
        weights = ExpertWeights(builder, prefix, config.num_experts, config.turned)
        self._gate_up = weights.load((gate, up), "gate_up_proj", config.width, hidden)
        self._down = weights.load((down,), "down_proj", hidden, config.width, out_dtype=torch.float32)

    def __call__(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        source_P, place_TK, starts_E1 = self._ops.group(experts_TK, self._num_experts)
        inner_PI2 = self._gate_up(self._gather(x_TH, source_P), starts_E1)
        y_PH = self._down(self._gate_mul(inner_PI2), starts_E1)
        base_TH = None if self._shared is None else self._shared(x_TH)
        return self._ops.combine(y_PH, place_TK, weights_TK, base_TH, x_TH.dtype)


class ExpertWeights:
    """Reads experts' weights: one tensor per part and expert, or one tensor for all experts, as some files have."""

    def __init__(self, builder: LayerBuilder, prefix: str, num_experts: int, turned: bool = False) -> None:
        """turned: see `MoEFamily`."""
        self._builder = builder
        self._prefix = prefix
        self._num_experts = num_experts
        self._turned = turned

    def load(
        self,
        parts: Sequence[str],
        packed: str,
        out_size: int,
        in_size: int,
        out_dtype: torch.dtype | None = None,
    ) -> GroupedLinear:
        """The product with `parts` stacked, each of `out_size`; `packed`: name of the tensor with all of them."""
        builder = self._builder
        rows = len(parts) * out_size

        def each() -> Iterator[Tensor]:
            for expert in range(self._num_experts):
                names = [f"{self._prefix}.{expert}.{part}.weight" for part in parts]
                found = [builder.tensor(name, (out_size, in_size)) for name in names]
                yield found[0] if len(found) == 1 else torch.cat(found)

        whole = f"{self._prefix}.{packed}"
        is_packed = f"{self._prefix}.0.{parts[0]}.weight" not in builder.weights and whole in builder.weights
        weights = self._packed(whole, (self._num_experts, rows, in_size)).unbind() if is_packed else each()
        return builder.planner.pack_experts(
            self._num_experts, weights, out_dtype=out_dtype, exact=builder.exact
        )

    def _packed(self, name: str, shape: tuple[int, int, int]) -> Tensor:
        """The weights of all experts; if `turned`, a tensor of another shape is read transposed."""
        turned = (shape[0], shape[2], shape[1])
        if self._turned and self._builder.weights.shape(name, 3) not in (shape, None):
            return self._builder.tensor(name, turned).mT.contiguous()
        return self._builder.tensor(name, shape)


def read(given: Given) -> list[FfnConfig]:
    """Each layer's settings: experts, or an MLP in layers that the config makes dense."""
    raw, where, family = given.raw, given.where, given.family.moe
    assert family is not None, "a family with experts says how its configs name them"
    count_key = next((key for key in family.count if raw.get(key) is not None), family.count[0])
    num_experts = whole(raw, count_key, where)
    top_k = whole(raw, "num_experts_per_tok", where)
    if top_k > num_experts:
        raise ValueError(f"{where}: num_experts_per_tok={top_k}: must be at most {count_key}={num_experts}")
    normalized = family.normalized
    if isinstance(normalized, str):
        if raw.get(normalized) is None and family.default_normalized is None:
            raise ValueError(
                f"{where}: {normalized} is missing: it decides how experts are weighted; add true or false"
            )
        normalized = flag(raw, normalized, where, default=bool(family.default_normalized))
    sigmoid = family.scoring == "biased_sigmoid"
    groups, top_groups = _groups(raw, num_experts, top_k, where) if sigmoid else (1, 1)
    width = whole(raw, family.width, where)
    bias = given.switch(given.family.mlp_bias)
    num_shared = whole(raw, "n_shared_experts", where, low=0) if sigmoid else 0
    experts = ExpertsConfig(
        num_experts=num_experts,
        width=width,
        routing=Routing(
            top_k=top_k,
            sigmoid=sigmoid,
            normalize=normalized,
            scale=number(raw, "routed_scaling_factor", where, above=0) if sigmoid else 1.0,
            groups=groups,
            top_groups=top_groups,
        ),
        biased=sigmoid,
        shared=DenseConfig(width=width * num_shared, bias=bias) if num_shared else None,
        blocks=family.blocks,
        parts=family.parts,
        turned=family.turned,
    )
    dense = DenseConfig(width=given.whole("intermediate_size"), bias=bias)
    num_layers = given.num_layers
    dense_layers = (_first_dense if sigmoid else _listed_dense)(raw, num_layers, where)
    return [dense if i in dense_layers else experts for i in range(num_layers)]


def _groups(raw: Mapping[str, Any], num_experts: int, top_k: int, where: str) -> tuple[int, int]:
    for key, only in SIGMOID_ONLY.items():
        if raw.get(key, only) not in (None, only):
            raise ValueError(f"{where}: {key}={shown(raw[key])}: not supported, only {only!r}")
    groups = whole(raw, "n_group", where)
    top_groups = whole(raw, "topk_group", where)
    size = num_experts // groups
    if num_experts % groups or (groups > 1 and size < 2):
        raise ValueError(
            f"{where}: n_group={groups}: must divide the {num_experts} experts into groups of at least 2"
        )
    if top_groups > groups:
        raise ValueError(f"{where}: topk_group={top_groups}: must be at most n_group={groups}")
    if top_k > top_groups * size:
        raise ValueError(
            f"{where}: num_experts_per_tok={top_k}: topk_group={top_groups} groups of {size} experts hold only "
            f"{top_groups * size}"
        )
    return groups, top_groups


def _first_dense(raw: Mapping[str, Any], num_layers: int, where: str) -> frozenset[int]:
    return frozenset(range(min(whole(raw, "first_k_dense_replace", where, low=0), num_layers)))


def _listed_dense(raw: Mapping[str, Any], num_layers: int, where: str) -> frozenset[int]:
    """The dense layers: `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed = () if raw.get("mlp_only_layers") in (None, []) else ids(raw, "mlp_only_layers", where)
    step = whole(raw, "decoder_sparse_step", where) if raw.get("decoder_sparse_step") is not None else 1
    return frozenset(i for i in range(num_layers) if i in listed or (i + 1) % step)
