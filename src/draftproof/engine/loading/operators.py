"""Chooses an engine's operators and attention backend: for each the first version that is certified here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from draftproof.attention import registry
from draftproof.attention.base import AttentionBackend
from draftproof.config import EngineConfig
from draftproof.engine.loading import memory
from draftproof.kernels import ops as operators
from draftproof.kernels.exactness import Case, NoPowerError, OperatorCertifier
from draftproof.kernels.ops import Ops
from draftproof.models.cases import Where
from draftproof.models.config import ModelConfig
from draftproof.models.operators import target_cases
from draftproof.runtime import native

ATTENTION = "attention"


def where_to_run(
    config: EngineConfig, model: ModelConfig, progress: native.Progress | None
) -> tuple[Where, native.Library | None]:
    """The device and dtype of an engine, and the compiled operators (None: torch's). Raises ValueError for settings and
    sizes that cannot run here."""
    device = memory.pick_device(config.device)
    registry.check_sizes(device, config.attention_backend, model.attention_shapes)
    widened = config.bf16_arithmetic == "widened"
    usable = config.native and device.type == "cpu"
    library = native.load(progress, widened=widened) if usable else None
    if widened and library is None:
        raise ValueError(
            "bf16_arithmetic='widened': only the compiled operators of a CPU have it; leave it out"
        )
    dtype = memory.pick_dtype(config.dtype, model.dtype, device, library)
    return Where(device=device, dtype=dtype, block_size=config.block_size), library


def arithmetic(where: Where, library: native.Library | None) -> str:
    """Name of the target's arithmetic: its dtype, and for bf16 in compiled operators also the instructions used. In
    fp32, and in bf16 with equal names, machines agree in every bit."""
    name = str(where.dtype).removeprefix("torch.")
    return name if library is None or where.dtype != torch.bfloat16 else f"{name}, {library.bf16_arithmetic}"


def describe(library: native.Library | None) -> str:
    """The compiled operators in use, where they come from, and their fingerprint; "torch" without any."""
    return "torch" if library is None else library.description


def versions_of(
    operator: str, tables: Mapping[str, Ops], backends: Mapping[str, AttentionBackend]
) -> Mapping[str, Any]:
    """The versions of one operator by name, in order of speed."""
    if operator == ATTENTION:
        return backends
    return {name: getattr(table, operator) for name, table in tables.items()}


def by_operator(cases: list[Case]) -> dict[str, list[Case]]:
    grouped: dict[str, list[Case]] = {}
    for case in cases:
        grouped.setdefault(case.operator, []).append(case)
    return grouped


def select(
    config: EngineConfig,
    model: ModelConfig,
    where: Where,
    library: native.Library | None,
    progress: native.Progress | None,
) -> tuple[Ops, AttentionBackend]:
    """The fastest certified version of each operator and the attention, or the fastest if `config.exact` is False.

    Raises ValueError if an operator has no exact version here, or the requested attention backend is not exact.
    """
    tables = operators.versions(where.device, library)
    backends = registry.versions(where.device, library, config.attention_backend)
    ops, backend = next(iter(tables.values())), next(iter(backends.values()))
    if not config.exact:
        return ops, backend
    name = config.attention_backend
    if name is not None and not registry.BACKENDS[name].is_exact:
        raise ValueError(
            f"attention_backend={name!r}: a row's bits may depend on its neighbours; leave it out, or give up the "
            "promise with exact=False"
        )
    certifier, show = OperatorCertifier(where.device, library), progress or (lambda what, done, total: None)
    changed: dict[str, Any] = {}
    grouped = by_operator(target_cases(model, where))
    for number, (operator, cases) in enumerate(grouped.items()):
        usable = versions_of(operator, tables, backends)
        if not certifier.knows(cases, usable):
            show("certifying operators, once for this machine", number, len(grouped))
        try:
            name = certifier.first_exact(cases, usable)
        except NoPowerError as error:
            raise ValueError(
                f"exact=True: {error}, so a model of these sizes gets no certificate; exact=False runs without the "
                "promise"
            ) from error
        if name is None:
            raise ValueError(_refusal(operator, cases, list(usable), config))
        if operator == ATTENTION:
            backend = backends[name]
        elif usable[name] is not getattr(ops, operator):
            changed[operator] = usable[name]
    return (replace(ops, **changed) if changed else ops), backend


def _refusal(operator: str, cases: list[Case], tried: list[str], config: EngineConfig) -> str:
    where = f"{operator} ({cases[0].key})"
    if operator == ATTENTION and config.attention_backend is not None:
        return (
            f"attention_backend={config.attention_backend!r}: a row's bits depend on its neighbours here, for {where}; "
            f"leave it out, or give up the promise with exact=False"
        )
    return (
        f"exact=True: no version of {where} gives a row the same bits in every batch on this machine (tried "
        f"{', '.join(tried)}); exact=False runs without the promise"
    )
