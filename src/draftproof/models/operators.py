"""Which operators a target calls, and at which shapes: what has to be certified on the user's machine.

Products are not in the list (the planner sees each weight), nor is what only moves bits or works on integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from draftproof.attention.exactness import AttentionShape, scores_check, values_check
from draftproof.kernels import operator_checks as checks
from draftproof.kernels.exactness import Case
from draftproof.kernels.operator_checks import RopeShape
from draftproof.models.config import ModelConfig

SPLIT_K_PARTS = 4  # on a GPU a sum over K may come in so many parts, which the norm behind it adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The device, dtype and block size that a target runs with."""

    device: torch.device
    dtype: torch.dtype
    block_size: int  # tokens of a cache block


def target_cases(model: ModelConfig, where: Where) -> list[Case]:
    """The operators of a target with their shapes, each once."""
    found = [
        *_norms(model, where),
        *_attentions(model, where),
        *_feed_forwards(model, where),
        *_logits(model, where),
    ]
    return list({case.name: case for case in found}.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weight_dtype(model: ModelConfig, where: Where) -> torch.dtype:
    """The dtype of norms' weights: fp32 where 1 is added to what is stored."""
    return torch.float32 if model.gemma is not None and model.gemma.norm_offset else where.dtype


def _norms(model: ModelConfig, where: Where) -> Iterator[Case]:
    widths = {model.hidden_size}
    weight = _weight_dtype(model, where)
    if model.mla is not None:
        widths |= {model.mla.kv_rank, *([] if model.mla.q_rank is None else [model.mla.q_rank])}
    if model.gemma is not None and model.gemma.per_layer_size:
        widths.add(model.gemma.per_layer_size)
    pairs = [(width, weight) for width in sorted(widths)]
    if model.gemma is not None and model.gemma.moe is not None:  # the router's
        pairs.append((model.hidden_size, torch.float32))
    for width, kind in pairs:
        key = f"{width} {_name(where.dtype)}, weight {_name(kind)}"
        yield Case("rms_norm", key, partial(checks.rms_norm_check, width, where.dtype, where.device, kind))
    hidden = model.hidden_size
    for parts in (0, SPLIT_K_PARTS) if where.device.type == "cuda" else (0,):
        key = f"{hidden} {_name(where.dtype)}, weight {_name(weight)}{f', {parts} parts' if parts else ''}"
        make = partial(checks.add_rms_norm_check, hidden, where.dtype, where.device, weight, parts)
        yield Case("add_rms_norm", key, make)


def _attentions(model: ModelConfig, where: Where) -> Iterator[Case]:
    weight = _weight_dtype(model, where)
    for rope, attention in _attention_shapes(model):
        block = where.block_size
        dtype = where.dtype
        device = where.device
        heads = f"{rope.num_heads}/{rope.num_kv_heads} of {rope.head_dim}"
        normed = "".join(
            n for n, on in zip("qkv", (rope.q_norm, rope.k_norm, rope.v_norm), strict=True) if on
        )
        key = f"{heads} {_name(dtype)}, rotary {rope.rotary_dim}, norms {normed or '-'}, block {block}"
        key += f", weight {_name(weight)}" if normed else ""
        make = partial(checks.rope_store_check, rope, block, dtype, device, weight)
        yield Case("rope_store", key + ", k is v" * rope.shared, make)
        heads = f"{attention.num_heads}/{attention.num_kv_heads} of {attention.head_dim}"
        key = f"{heads} {_name(dtype)}, window {attention.window or '-'}, block {block}"
        shared = ", k is v" * attention.shared
        yield Case(
            "attention", f"{key}{shared}, scores", partial(scores_check, attention, block, dtype, device)
        )
        yield Case(
            "attention", f"{key}{shared}, values", partial(values_check, attention, block, dtype, device)
        )


def _attention_shapes(model: ModelConfig) -> Iterator[tuple[RopeShape, AttentionShape]]:
    """Each layer's sizes."""
    heads = model.num_heads
    if model.gemma is not None:
        for layer in model.gemma.layers:
            own = layer.num_kv_heads if layer.owns_cache else 0
            yield (
                RopeShape(
                    num_heads=heads,
                    num_kv_heads=own,
                    head_dim=layer.head_dim,
                    rotary_dim=layer.rope.rotary_dim,
                    q_norm=True,
                    k_norm=layer.owns_cache,
                    v_norm=layer.owns_cache and model.gemma.values_normed,
                ),
                AttentionShape(
                    num_heads=heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    window=layer.window,
                ),
            )
        return
    latent = model.mla is not None
    dim = model.mla.cached_dim if model.mla is not None else model.head_dim
    kv_heads = 1 if latent else model.num_kv_heads
    rope = RopeShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rotary_dim=model.rope.rotary_dim,
        q_norm=model.qk_norm,
        k_norm=model.qk_norm,
        shared=latent,
    )
    for window in sorted(set(model.windows)):
        yield (
            rope,
            AttentionShape(
                num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, window=window, shared=latent
            ),
        )


def _feed_forwards(model: ModelConfig, where: Where) -> Iterator[Case]:
    moe = model.moe
    device = where.device
    dtype = where.dtype
    gelu = model.gemma is not None
    widths = {model.intermediate_size}
    if model.gemma is not None:
        moe = model.gemma.moe
        widths = {layer.intermediate_size for layer in model.gemma.layers}
        widths |= {model.gemma.per_layer_size} - {0}
    if moe is not None:
        if model.gemma is not None:  # experts beside the MLP
            widths.add(moe.width)
        else:
            widths = {moe.width, *({moe.shared_width} - {0})}
            widths |= {model.intermediate_size} if moe.dense_layers else set()
        key = f"route {moe.routing.top_k} of {moe.num_experts}, {moe.routing}, bias {moe.biased}"
        route = partial(checks.route_check, moe.num_experts, moe.routing, device, biased=moe.biased)
        yield Case("experts", key, route)
        shared = bool(moe.shared_width) and model.gemma is None
        key = f"combine {moe.routing.top_k} of {model.hidden_size} {_name(dtype)}, shared {shared}"
        combine = partial(
            checks.combine_check, model.hidden_size, moe.routing.top_k, dtype, device, shared=shared
        )
        yield Case("experts", key, combine)
    for width in sorted(widths):
        make = partial(checks.gate_mul_check, width, dtype, device, gelu=gelu)
        yield Case("gelu_mul" if gelu else "silu_mul", f"{width} {_name(dtype)}", make)


def _logits(model: ModelConfig, where: Where) -> Iterator[Case]:
    vocab = model.vocab_size
    device = where.device
    if model.gemma is not None and model.gemma.final_cap:
        cap = model.gemma.final_cap
        yield Case("soft_cap", f"{vocab} at {cap:g}", partial(checks.soft_cap_check, vocab, cap, device))
    yield Case("log_normalizer", str(vocab), partial(checks.log_normalizer_check, vocab, device))
    yield Case("sample", str(vocab), partial(checks.sample_check, vocab, device))
    yield Case("process", str(vocab), partial(checks.process_check, vocab, device))
