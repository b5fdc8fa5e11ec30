"""The operators that a target calls, with their shapes: what must be certified on the user's machine.

Not listed: products, which the planner certifies per weight, and operators that only move bits or compute on integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from draftproof.kernels import operator_checks as checks
from draftproof.kernels.exactness import Case
from draftproof.models.cases import Where, add_norm_cases, gate_case, norm_case, norm_dtype
from draftproof.models.config import ModelConfig
from draftproof.models.spec import LayerSpec


def target_cases(model: ModelConfig, where: Where) -> list[Case]:
    """The operators of a target with their shapes, without duplicates."""
    hidden, weight = model.hidden_size, norm_dtype(where, model.norm_offset)
    found = [norm_case(hidden, where, weight), *add_norm_cases(hidden, where, weight)]
    for layer in dict.fromkeys(model.layers):
        found += _layer(layer, hidden, where)
    found += _logits(model, where)
    return list({case.name: case for case in found}.values())


def _layer(layer: LayerSpec, hidden: int, where: Where) -> Iterator[Case]:
    yield from layer.mixer.cases(where, layer.norms)
    yield from layer.ffn.cases(where, layer.norms, hidden)
    if layer.input_size:
        yield norm_case(layer.input_size, where, norm_dtype(where, layer.norms.offset))
        yield gate_case(layer.input_size, where, gelu=True)


def _logits(model: ModelConfig, where: Where) -> Iterator[Case]:
    vocab = model.vocab_size
    device = where.device
    if model.logit_cap:
        cap = model.logit_cap
        yield Case("soft_cap", f"{vocab} at {cap:g}", partial(checks.soft_cap_check, vocab, cap, device))
    yield Case("log_normalizer", str(vocab), partial(checks.log_normalizer_check, vocab, device))
    yield Case("sample", str(vocab), partial(checks.sample_check, vocab, device))
    yield Case("process", str(vocab), partial(checks.process_check, vocab, device))
