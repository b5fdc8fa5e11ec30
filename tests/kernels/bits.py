"""The bits of every compiled operator, as hashes that two machines can compare.

  python -m tests.kernels.bits            writes tests/data/bits.json, on a machine with fused multiply-adds
Inputs are made from whole numbers and from numbers rounded from fp64, so that they are equal on all machines. bf16 is
widened to fp32, the arithmetic that all processors have. Shapes: T rows, K inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from draftproof.attention.compiled.backend import CompiledAttention
from draftproof.attention.exactness import scores_check, values_check
from draftproof.kernels import ops
from draftproof.kernels.exactness import Check
from draftproof.matmul import certify, products
from draftproof.matmul.spec import Shape
from draftproof.runtime import native
from tests.kernels.cases import ATTENTION, MADE

FILE = Path(__file__).parents[1] / "data" / "bits.json"
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(1, 130), (33, 51), (70, 129), (257, 64)]  # outputs, inputs
ROWS = (1, 3, 8, 19, 33)
BY_TORCH = ("norm of parts",)  # only a GPU's products give partial sums; on a CPU torch's twin adds them
UNIFORMS = 12  # uniform numbers per sum, which then has variance 1


def whole_randn(*size: Any, generator: torch.Generator) -> Tensor:
    """Nearly normal numbers, made from sums of whole ones."""
    shape = torch.Size(size[0] if isinstance(size[0], (tuple, torch.Size)) else size)
    steps = torch.randint(0, 1 << 12, (UNIFORMS, *shape), generator=generator).sum(0)
    return (steps - (UNIFORMS << 11)).float() / 4096.0


def rounded(function: Any) -> Any:
    return lambda x: function(x.double()).float()


@contextlib.contextmanager
def same_inputs() -> Iterator[None]:
    """In this context torch's random numbers, sines and cosines are computed in a way that is equal on all machines."""
    with (
        mock.patch.object(torch, "randn", whole_randn),
        mock.patch.object(Tensor, "cos", rounded(torch.cos)),
        mock.patch.object(Tensor, "sin", rounded(torch.sin)),
    ):
        yield


def of_tensors(tensors: list[Tensor]) -> str:
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = hashlib.sha256()
    for one in tensors:
        digest.update(one.contiguous().view(as_int[one.element_size()]).numpy().tobytes())
    return digest.hexdigest()[:16]


def outputs(check: Check, version: Any) -> list[Tensor]:
    return list(check.run(version, torch.arange(check.num_rows)))


def hashes(library: native.Library) -> dict[str, str]:
    """Hashes by operator, case and dtype; without bf16 if `library` uses bf16 instructions."""
    dtypes = [d for d in DTYPES if d != torch.bfloat16 or library.bf16_arithmetic == "widened"]
    found = {}
    with same_inputs():
        for dtype in dtypes:
            name = str(dtype).removeprefix("torch.")
            for kind, (operator, make) in MADE.items():
                if kind in BY_TORCH:
                    continue
                version = getattr(ops.select(CPU, library), operator)
                found[f"{kind}, {name}"] = of_tensors(outputs(make(dtype, CPU), version))
            for (kind, shape), make in itertools.product(ATTENTION.items(), (scores_check, values_check)):
                check = make(shape, 16, dtype, CPU)
                label = f"attention, {kind}, {make.__name__.removesuffix('_check')}, {name}"
                found[label] = of_tensors(outputs(check, CompiledAttention(library)))
            for num_outputs, num_inputs in SIZES:
                shape = Shape(num_outputs, num_inputs, dtype, torch.float32, False)
                x_TK, weight_NK = certify.cancelling(max(ROWS), shape, seed=5)
                linear_fn = products.CompiledLinear(library, weight_NK, None, torch.float32)
                results = [linear_fn(x_TK[:rows]) for rows in ROWS]
                found[f"product, {num_outputs} x {num_inputs}, {name}"] = of_tensors(results)
    return found


if __name__ == "__main__":
    widened = native.load(widened=True)
    assert widened is not None
    FILE.write_text(json.dumps(hashes(widened), indent=1) + "\n")
