"""Mixtures of experts as config.json states them: a family's part in the table, and the constants read from a
config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftproof.kernels.experts import Routing
from draftproof.schema import flag, ids, number, shown, whole

# How a row chooses its experts:
#   softmax         the likeliest ones
#   biased_sigmoid  as DeepSeek-V3 does: sigmoid scores, of which a correction bias decides the choice but not the
#                   weight; groups of experts, of which the best are looked at; weights scaled; shared experts
Scoring = Literal["softmax", "biased_sigmoid"]

# Losses, noise and layout of training; the modules that draft are read by whoever drafts.
_HARMLESS = frozenset(
    {
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "num_nextn_predict_layers",
    }
)
_SIGMOID_ONLY: Mapping[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_SIGMOID_KEYS = frozenset(
    {
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "n_shared_experts",
        "first_k_dense_replace",
        *_SIGMOID_ONLY,
    }
)
_SOFTMAX_KEYS = frozenset({"decoder_sparse_step", "mlp_only_layers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEFamily:
    """A family's part in the table: names of config keys and of tensors, and the kind of routing.

    `count`: keys for the number of experts, the first found counts. `normalized`: chosen weights sum to 1; a constant
    or the key that says so. `parts`: gate, up and down of an expert, a tensor each. `blocks`: where in a layer the
    experts are, the first found counts.
    """

    scoring: Scoring
    count: tuple[str, ...]
    width: str = "moe_intermediate_size"
    normalized: bool | str = "norm_topk_prob"
    blocks: tuple[str, ...] = ("mlp",)
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def keys(self) -> frozenset[str]:
        """Config keys that mean something, or are known to mean nothing for the logits."""
        own = frozenset({*self.count, self.width, "num_experts_per_tok"})
        if isinstance(self.normalized, str):
            own |= {self.normalized}
        return own | _HARMLESS | (_SIGMOID_KEYS if self.scoring == "biased_sigmoid" else _SOFTMAX_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The experts of one model. Layers in `dense_layers` have an ordinary MLP, all others experts.

    `width`: an expert's intermediate size; `shared_width`: that of the experts which every row goes to, 0 = none;
    `biased`: routing adds a correction to the scores.
    """

    num_experts: int
    width: int
    routing: Routing
    biased: bool
    shared_width: int
    dense_layers: frozenset[int]
    blocks: tuple[str, ...]
    parts: tuple[str, str, str]


def parse_moe(raw: Mapping[str, Any], family: MoEFamily, num_layers: int, where: str) -> MoEConfig:
    """The experts of a config. Raises ValueError for a missing or impossible value, with key and fix."""
    count_key = next((key for key in family.count if raw.get(key) is not None), family.count[0])
    num_experts = whole(raw, count_key, where)
    top_k = whole(raw, "num_experts_per_tok", where)
    if top_k > num_experts:
        raise ValueError(f"{where}: num_experts_per_tok={top_k}: must be at most {count_key}={num_experts}")
    normalized = family.normalized
    if isinstance(normalized, str):
        if raw.get(normalized) is None:
            raise ValueError(
                f"{where}: {normalized} is missing: it decides how experts are weighted; add true or false"
            )
        normalized = flag(raw, normalized, where)
    sigmoid = family.scoring == "biased_sigmoid"
    groups, top_groups = _groups(raw, num_experts, top_k, where) if sigmoid else (1, 1)
    width = whole(raw, family.width, where)
    return MoEConfig(
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
        shared_width=width * whole(raw, "n_shared_experts", where, low=0) if sigmoid else 0,
        dense_layers=_first_dense(raw, num_layers, where)
        if sigmoid
        else _listed_dense(raw, num_layers, where),
        blocks=family.blocks,
        parts=family.parts,
    )


def parse_gemma_moe(raw: Mapping[str, Any], where: str) -> MoEConfig | None:
    """Gemma 4's experts, beside the MLP of every layer; None where it has none. Raises as `parse_moe` does."""
    if not flag(raw, "enable_moe_block", where):
        return None
    num_experts = whole(raw, "num_experts", where)
    top_k = whole(raw, "top_k_experts", where)
    if top_k > num_experts:
        raise ValueError(f"{where}: top_k_experts={top_k}: must be at most num_experts={num_experts}")
    return MoEConfig(
        num_experts=num_experts,
        width=whole(raw, "moe_intermediate_size", where),
        routing=Routing(top_k=top_k),
        biased=False,
        shared_width=whole(raw, "intermediate_size", where),
        dense_layers=frozenset(),
        blocks=(),
        parts=("gate_proj", "up_proj", "down_proj"),
    )


def _groups(raw: Mapping[str, Any], num_experts: int, top_k: int, where: str) -> tuple[int, int]:
    for key, only in _SIGMOID_ONLY.items():
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
