"""Checks of every operator and of attention at a few shapes, including edge cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftproof.attention.exactness import AttentionShape
from draftproof.kernels import operator_checks as checks
from draftproof.kernels.exactness import Check
from draftproof.kernels.experts.spec import Routing
from draftproof.kernels.operator_checks import RopeShape

FP32 = torch.float32
NORMED = RopeShape(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64, q_norm=True, k_norm=True)
PLAIN = RopeShape(num_heads=3, num_kv_heads=1, head_dim=20, rotary_dim=12, q_norm=False, k_norm=False)
QUERIES = RopeShape(num_heads=4, num_kv_heads=0, head_dim=64, rotary_dim=64, q_norm=True, k_norm=False)
SHARED = RopeShape(
    num_heads=2, num_kv_heads=1, head_dim=48, rotary_dim=16, q_norm=False, k_norm=False, shared=True
)
GROUPS = Routing(top_k=8, sigmoid=True, scale=2.5, groups=8, top_groups=4)

# operator, how its check is made for a dtype on a device
MADE: dict[str, tuple[str, Callable[[torch.dtype, torch.device], Check]]] = {
    "norm": ("rms_norm", lambda d, at: checks.rms_norm_check(256, d, at, d)),
    "narrow norm": ("rms_norm", lambda d, at: checks.rms_norm_check(20, d, at, d)),
    "wide norm": ("rms_norm", lambda d, at: checks.rms_norm_check(3000, d, at, FP32)),
    "norm of a sum": ("add_rms_norm", lambda d, at: checks.add_rms_norm_check(256, d, at, d)),
    "norm of parts": ("add_rms_norm", lambda d, at: checks.add_rms_norm_check(256, d, at, d, 4)),
    "normed rope": ("rope_store", lambda d, at: checks.rope_store_check(NORMED, 16, d, at, d)),
    "rope": ("rope_store", lambda d, at: checks.rope_store_check(PLAIN, 7, d, at, d)),
    "rope of queries": ("rope_store", lambda d, at: checks.rope_store_check(QUERIES, 16, d, at, FP32)),
    "rope, shared": ("rope_store", lambda d, at: checks.rope_store_check(SHARED, 16, d, at, d)),
    "silu": ("silu_mul", lambda d, at: checks.gate_mul_check(70, d, at)),
    "gelu": ("gelu_mul", lambda d, at: checks.gate_mul_check(70, d, at, gelu=True)),
    "soft cap": ("soft_cap", lambda d, at: checks.soft_cap_check(999, 30.0, at)),
    "log normalizer": ("log_normalizer", lambda d, at: checks.log_normalizer_check(999, at)),
    "sample": ("sample", lambda d, at: checks.sample_check(999, at)),
    "route": ("experts", lambda d, at: checks.route_check(8, Routing(top_k=2), at, biased=False)),
    "route to one": ("experts", lambda d, at: checks.route_check(1, Routing(top_k=1), at, biased=False)),
    "route by sigmoids": (
        "experts",
        lambda d, at: checks.route_check(8, Routing(top_k=2, sigmoid=True), at, biased=True),
    ),
    "route in groups": ("experts", lambda d, at: checks.route_check(256, GROUPS, at, biased=True)),
    "combine": ("experts", lambda d, at: checks.combine_check(64, 4, d, at, shared=True)),
    "combine three": ("experts", lambda d, at: checks.combine_check(64, 3, d, at, shared=False)),
    "combine one": ("experts", lambda d, at: checks.combine_check(64, 1, d, at, shared=False)),
}
ATTENTION = {
    "few heads": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64),
    "one kv head": AttentionShape(num_heads=8, num_kv_heads=1, head_dim=64),
    "window": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=32, window=40),
    "odd": AttentionShape(num_heads=3, num_kv_heads=3, head_dim=20),
    "shared": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=96, shared=True),
}
