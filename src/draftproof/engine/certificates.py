"""Survey for one model: every version of every operator and product, certified and timed on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from draftproof.attention import registry
from draftproof.config import EngineConfig
from draftproof.engine.loading import operators
from draftproof.engine.loading.locate import locate
from draftproof.kernels import ops as operator_tables
from draftproof.kernels.exactness import Check, OperatorCertifier
from draftproof.matmul.linear import LinearPlanner
from draftproof.matmul.plan_cache import Choice
from draftproof.models.cases import Where
from draftproof.models.config import ModelConfig, read_config
from draftproof.models.decoder import Decoder
from draftproof.models.operators import target_cases
from draftproof.models.weights import RandomWeights
from draftproof.runtime import native
from draftproof.runtime.threads import own_precision

TIMED_ROWS = 8
GROUPED = "grouped product"
CALLS = 20


@dataclass(frozen=True, slots=True)
class Line:
    """One version of one operator or product at one shape. `exact`: share of the numbers of rows at which a row has the
    same bits as alone; a version below 1.0 is called at those numbers only, if at all. `microseconds`: of a call with
    TIMED_ROWS rows, None: not timed. `used`: whether an engine with these settings uses it."""

    operator: str
    shape: str
    version: str
    exact: float
    microseconds: float | None
    used: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """The certified versions; `operators`: name and fingerprint of the compiled operators."""

    lines: list[Line]
    operators: str


@torch.inference_mode(False)
@own_precision()
def survey(config: EngineConfig, progress: native.Progress | None = None) -> Survey:
    """Certify everything anew for the target of `config`, with random weights: of its files only config.json is read.

    ValueError for settings that cannot run here.
    """
    config, directory = locate(config, progress)
    model = read_config(directory, overrides=config.hf_overrides)
    where, library = operators.where_to_run(config, model, progress)
    device, dtype = where.device, where.dtype
    certifier = OperatorCertifier(device, library, fresh=True)
    lines = list(_operator_lines(config, model, where, library, certifier))
    planner = LinearPlanner(
        device,
        exact=True,
        max_rows=config.max_num_batched_tokens,
        library=library,
        progress=progress,
        thorough=True,
    )
    ops = operator_tables.select(device, library)
    Decoder.load(RandomWeights(0, device, dtype), model, ops, planner, device, dtype, max_positions=64)
    planner.certify()
    for shape, choice in planner.choices.items():
        lines += _product_lines(shape.key(), choice)
    for shape, exact in planner.grouped_shapes.items():
        # if it is inexact, experts use the products above, one by one
        lines.append(Line(GROUPED, shape.key(), "grouped", float(exact), None, exact))
    return Survey(lines, operators.describe(library))


def _operator_lines(
    config: EngineConfig,
    model: ModelConfig,
    where: Where,
    library: native.Library | None,
    certifier: OperatorCertifier,
) -> Iterator[Line]:
    tables = operator_tables.versions(where.device, library)
    backends = registry.versions(where.device, library, config.attention_backend)
    for operator, cases in operators.by_operator(target_cases(model, where)).items():
        versions = operators.versions_of(operator, tables, backends)
        found = [
            (case, name, certifier.verdict(case, name, version), _time(certifier.proved(case), version))
            for case in cases
            for name, version in versions.items()
        ]
        used = certifier.first_exact(cases, versions) if config.exact else next(iter(versions))
        for case, name, exact, us in found:
            yield Line(operator, case.key, name, float(exact), us, name == used)


def _product_lines(shape: str, choice: Choice) -> list[Line]:
    """A line for each candidate; several are `used` if row buckets have candidates of their own."""
    used = {*choice.by_bucket} - {""} if choice.by_bucket else {choice.candidate}
    lines = []
    for result in choice.results:
        last = len(result.rows) - 1
        i = next((i for i, rows in enumerate(result.rows) if rows >= TIMED_ROWS), last)
        us = result.microseconds[i]
        exact = 0.0 if result.exact is None else result.exact
        time_us = us if math.isfinite(us) else None
        lines.append(Line("product", shape, result.candidate, exact, time_us, result.candidate in used))
    return lines


def _time(check: Check, version: Any) -> float:
    """Fastest call in microseconds, including the gathering of its test rows."""
    rows_T = torch.arange(min(TIMED_ROWS, check.num_rows), device=check.device)
    taken = []
    for _ in range(CALLS):
        start = time.perf_counter()
        check.run(version, rows_T)
        if check.device.type == "cuda":
            torch.cuda.synchronize(check.device)
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e6
