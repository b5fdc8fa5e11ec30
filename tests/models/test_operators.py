"""The list of operators to certify holds every operator that a target of any family calls, at every shape.

Shapes: T rows, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftproof.attention.base import FunctionBackend, PagedAttention, Rows
from draftproof.attention.chunked import TREES, ChunkedAttention
from draftproof.cache.pool import allocate
from draftproof.kernels import ops as operators
from draftproof.matmul.linear import LinearPlanner
from draftproof.models.cases import Where
from draftproof.models.config import ModelConfig, parse
from draftproof.models.decoder import Decoder
from draftproof.models.operators import target_cases
from draftproof.models.weights import RandomWeights

CPU, BLOCK = torch.device("cpu"), 16
DENSE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama"},
    "qwen3": {**DENSE, "model_type": "qwen3"},
    "windows": {**DENSE, "model_type": "mistral", "sliding_window": 20},
    "qwen3_moe": {**DENSE, **MOE, "model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "deepseek_v3": {
        **DENSE, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "gemma3": {**DENSE, "model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 20,
               "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4": {**DENSE, "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 20,
               "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
               "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0, "enable_moe_block": False,
               "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4 with experts": {
        **DENSE, "model_type": "gemma4_text", "num_hidden_layers": 2, "sliding_window": 20, "global_head_dim": 16,
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
        "moe_intermediate_size": 20, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


class Recorder:
    """Records the operator and shape of each call, named as in `target_cases`."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    def ops(self) -> operators.Ops:
        torch_ops = operators.TORCH
        noted = {
            name: self._noted(name, getattr(torch_ops, name))
            for name in ("rms_norm", "add_rms_norm", "rope_store", "silu_mul", "gelu_mul", "soft_cap")
        }
        return replace(torch_ops, **noted, experts=_Experts(self))

    def attention(self, *arguments: Any) -> torch.Tensor:
        q_THD, k_cache, v_cache, *_, window, _scale = arguments
        heads = f"{q_THD.shape[1]}/{k_cache.shape[1]} of {q_THD.shape[2]}"
        shared = ", k is v" if v_cache is k_cache else ""
        for kind in ("scores", "values"):
            self.called.add(
                f"attention {heads} float32, window {window or '-'}, block {BLOCK}{shared}, {kind}"
            )
        return ChunkedAttention(TREES)(*arguments)

    def _noted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.called.add(f"{name} {_key(name, arguments)}")
            return function(*arguments, **named)

        return call


class _Experts:
    def __init__(self, recorder: Recorder) -> None:
        self._called, self._twin = recorder.called, operators.TORCH.experts

    def route(self, logits_TE: Any, bias_E: Any, routing: Any) -> Any:
        key = f"route {routing.top_k} of {logits_TE.shape[1]}, {routing}, bias {bias_E is not None}"
        self._called.add(f"experts {key}")
        return self._twin.route(logits_TE, bias_E, routing)

    def group(self, experts_TK: Any, num_experts: int) -> Any:
        return self._twin.group(experts_TK, num_experts)

    def combine(self, y_PH: Any, place_TK: Any, weights_TK: Any, base_TH: Any, dtype: Any) -> Any:
        key = f"combine {place_TK.shape[1]} of {y_PH.shape[1]} float32, shared {base_TH is not None}"
        self._called.add(f"experts {key}")
        return self._twin.combine(y_PH, place_TK, weights_TK, base_TH, dtype)


def _key(name: str, arguments: tuple[Any, ...]) -> str:
    first = arguments[0]
    if name in ("rms_norm", "add_rms_norm"):
        return f"{first.shape[-1]} float32, weight float32"
    if name in ("silu_mul", "gelu_mul"):
        return f"{first.shape[-1] // 2} float32"
    if name == "soft_cap":
        return f"{first.shape[-1]} at {arguments[1]:g}"
    cos_sin_PD, q_norm_D, k_norm_D, _eps, k_cache, v_cache, _table, *rest = arguments[3:]
    norms = zip("qkv", (q_norm_D, k_norm_D, rest[0] if rest else None), strict=True)
    normed = "".join(letter for letter, norm_D in norms if norm_D is not None)
    _, kv_heads, block, dim = k_cache.shape
    heads = first.shape[1] // dim - kv_heads * (1 if v_cache is None else 2)
    key = f"{heads}/{kv_heads} of {dim} float32, rotary {cos_sin_PD.shape[1]}, norms {normed or '-'}, block {block}"
    return key + (", weight float32" if normed else "") + (", k is v" if v_cache is None else "")


def called_by(config: ModelConfig) -> set[str]:
    """The calls of one target pass over two rows, logits included."""
    recorder = Recorder()
    planner = LinearPlanner(CPU, exact=False, max_rows=8, library=None)
    decoder = Decoder.load(
        RandomWeights(0, CPU, torch.float32), config, recorder.ops(), planner, CPU, torch.float32
    )
    planner.certify()
    table_SB = torch.arange(1, 5, dtype=torch.int32).view(1, 4)
    cache = allocate(list(decoder.kv), table_SB, 5, BLOCK, torch.float32, CPU)
    rows = Rows(torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64), torch.tensor([1, 2]))
    backend = FunctionBackend(recorder.attention)
    out = decoder(torch.tensor([3, 4]), PagedAttention(recorder.ops(), backend, cache, rows))
    decoder.logits(out.hidden_TH)
    return recorder.called


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_operator_that_a_target_calls_is_in_the_list(name: str) -> None:
    config = parse(CONFIGS[name])
    listed = {
        case.name for case in target_cases(config, Where(device=CPU, dtype=torch.float32, block_size=BLOCK))
    }
    called = called_by(config)
    assert len(called) >= 5
    assert called <= listed, sorted(called - listed)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_no_pass_calls_is_not_certified_in_vain(name: str) -> None:
    config = parse(CONFIGS[name])
    listed = {
        case.name for case in target_cases(config, Where(device=CPU, dtype=torch.float32, block_size=BLOCK))
    }
    of_logits = {case for case in listed if case.startswith(("sample", "process", "log_normalizer"))}
    assert len(of_logits) == 3
    assert listed - of_logits <= called_by(config)
