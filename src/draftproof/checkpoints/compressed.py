"""Heads with fp8 weights in compressed-tensors format: dequantized when read.

A weight X is e4m3 with scales in X_scale: one, one per row, or one per block. A scheme's settings for activations are
ignored: they are for engines that compute in fp8, and drafts from unquantized activations are no worse.
Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.models.weights import Weights, check_dense
from draftproof.schema import check_known, shown, words

_KEY = "quantization_config"
_PARTS = ("transformer_layer_config", "text_config")  # configs nested in a head's config
_FP8 = torch.float8_e4m3fn
_STRATEGIES = ("tensor", "channel", "block")
# Keys that are not read describe the calibration, or are for engines that compute in fp8.
_SCHEME_KEYS = words(
    """quant_method format config_groups ignore version quantization_status global_compression_ratio kv_cache_scheme
    sparsity_config transform_config run_compressed"""
)
_GROUP_KEYS = words("targets weights input_activations output_activations format")
_WEIGHTS_KEYS = words(
    """num_bits type symmetric group_size strategy block_structure dynamic actorder observer observer_kwargs scale_dtype
    zp_dtype"""
)
_SUPPORTED = "supported: compressed-tensors in format 'float-quantized'; or take the unquantised head"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are stored. `block`: rows and columns that share a scale; None: no blocks."""

    block: tuple[int, int] | None


def split(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Scheme | None]:
    """(a head's config without quantization keys, the scheme or None). ValueError for other schemes."""
    plain = {key: value for key, value in raw.items() if key != _KEY}
    found = raw.get(_KEY)
    for part in _PARTS:
        inner = raw.get(part)
        if isinstance(inner, Mapping):
            plain[part] = {key: value for key, value in inner.items() if key != _KEY}
            found = inner.get(_KEY) if found is None else found
    return plain, None if found is None else _scheme(found, f"{where}: {_KEY}")


def dequantized(stored: Weights, scheme: Scheme) -> Weights:
    """The weights; fp8 ones as fp32. A scale without an fp8 weight stays in the list, where the head rejects it as
    unused."""

    def read(name: str) -> Tensor:
        tensor = stored.read(name)
        if tensor.dtype != _FP8:
            return tensor
        check_dense(tensor, f"{stored.where}: tensor {stored.stored(name)!r}")
        scale = plain.get(f"{name}_scale")
        try:
            return tensor.float() * _spread(scale, tensor, scheme)
        except ValueError as error:
            raise ValueError(f"{stored.where}: {stored.stored(name)}_scale {error}") from None

    names = [name for name in stored.names() if not name.endswith(".input_scale")]
    plain = Weights(stored.where, names, read, stored.stored)
    return plain


def _scheme(found: Any, where: str) -> Scheme:
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}={shown(found)}: must be a dict")
    for key, only in (("quant_method", "compressed-tensors"), ("format", "float-quantized")):
        if found.get(key) != only:
            raise ValueError(f"{where}: {key}={shown(found.get(key))}: not supported; {_SUPPORTED}")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if found.get(key):
            raise ValueError(f"{where}: {key}={shown(found[key])}: not supported; {_SUPPORTED}")
    check_known(found, where, _SCHEME_KEYS)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{where}: config_groups={shown(groups)}: must be a dict of at least one group")
    blocks = {_block(group, f"{where}: config_groups: {name}") for name, group in groups.items()} - {None}
    if len(blocks) > 1:
        raise ValueError(
            f"{where}: config_groups: blocks of several sizes are not supported: {sorted(map(str, blocks))}"
        )
    return Scheme(next(iter(blocks), None))


def _block(group: Any, where: str) -> tuple[int, int] | None:
    """(rows, columns) that share a scale in one group of weights; None without blocks. ValueError for formats other
    than e4m3 and for other strategies."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"{where}: weights={shown(weights)}: must be a dict")
    within = f"{where}: weights"
    check_known(group, where, _GROUP_KEYS)
    check_known(weights, within, _WEIGHTS_KEYS)
    for key, only in (("type", "float"), ("num_bits", 8), ("symmetric", True), ("dynamic", False)):
        if weights.get(key, only) != only:
            raise ValueError(f"{within}: {key}={shown(weights[key])}: not supported, only {only!r}")
    strategy = weights.get("strategy")
    block = weights.get("block_structure")
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"{within}: strategy={shown(strategy)}: not supported, only {', '.join(_STRATEGIES)}"
        )
    if strategy != "block":
        return None
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(f"{within}: block_structure={shown(block)}: must be two numbers of at least 1")
    return block[0], block[1]


def _spread(scale: Tensor, weight: Tensor, scheme: Scheme) -> Tensor:
    """The scales in fp32, broadcastable to the weight. ValueError if they do not fit the weight."""
    if weight.ndim != 2:
        raise ValueError(f"is for a weight of shape {list(weight.shape)}: must be for a matrix")
    scale = scale.float()
    if not (scale.isfinite() & (scale >= 0)).all():
        raise ValueError("holds a number that is no scale: each must be finite, 0 or greater")
    num_rows, num_columns = weight.shape
    if scale.numel() == 1:
        return scale.view(1, 1)
    if tuple(scale.shape) in ((num_rows,), (num_rows, 1)):
        return scale.view(num_rows, 1)
    allowed = f"1, [{num_rows}, 1]"
    if scheme.block is not None:
        high, wide = scheme.block
        blocks = (-(-num_rows // high), -(-num_columns // wide))
        if tuple(scale.shape) == blocks:
            tall = scale.repeat_interleave(min(high, num_rows), 0)[:num_rows]
            return tall.repeat_interleave(min(wide, num_columns), 1)[:, :num_columns]
        allowed += f" or {list(blocks)}"
    raise ValueError(
        f"has shape {list(scale.shape)}: must have {allowed} for a weight of {list(weight.shape)}"
    )
