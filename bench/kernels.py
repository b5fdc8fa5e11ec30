"""Microseconds of each operator of a pass at 1, 2 and 8 rows: `python bench/kernels.py`.

The model: H=512, I=1536, 8 heads / 4 kv heads x 64, 8 layers, vocabulary 8192, context 300.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch

from draftproof.attention import registry
from draftproof.bench.figures import percentile
from draftproof.bench.passes import host_seconds
from draftproof.kernels import ops
from draftproof.matmul.linear import LinearPlanner, PackedLinear
from draftproof.runtime import native

H, WIDE, HEADS, KV_HEADS, D, LAYERS, VOCAB, CONTEXT = 512, 1536, 8, 4, 64, 8, 8192, 300
ROWS = (1, 2, 8)


def measure(run: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call, 10th percentile, because other programs on the machine only add time."""
    host_seconds(run, 20)
    return 1e6 * percentile([host_seconds(run, 1) for _ in range(repeats)], 10)


def operators(
    table: ops.Ops, attend: Callable[..., object], rows: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """One call of each operator with inputs as in a pass; all rows belong to one request."""
    x, gate_up = torch.randn(rows, H).to(dtype), torch.randn(rows, 2 * WIDE).to(dtype)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * D).to(dtype)
    weight, head_norm = torch.ones(H, dtype=dtype), torch.ones(D, dtype=dtype)
    cos_sin, logits = torch.randn(4096, D), torch.randn(rows, VOCAB)
    k_cache = torch.randn(64, KV_HEADS, 16, D).to(dtype)
    v_cache = torch.randn_like(k_cache)
    blocks = torch.arange(1, 41, dtype=torch.int32).view(1, 40)
    positions, slots = torch.arange(CONTEXT, CONTEXT + rows), torch.zeros(rows, dtype=torch.int64)
    ends = positions + 1
    q = torch.randn(rows, HEADS, D).to(dtype)
    return {
        "norm": lambda: table.rms_norm(x, weight, 1e-6),
        "add+norm": lambda: table.add_rms_norm(x, x, weight, 1e-6),
        "rope+store": lambda: table.rope_store(
            qkv, positions, slots, cos_sin, head_norm, head_norm, 1e-6, k_cache, v_cache, blocks
        ),
        "attention": lambda: attend(q, k_cache, v_cache, blocks, slots, ends, 0, 0.125),
        "silu*up": lambda: table.silu_mul(gate_up),
        "log normalizer": lambda: table.log_normalizer(logits),
    }


def products(planner: LinearPlanner, dtype: torch.dtype) -> dict[str, tuple[int, list[PackedLinear]]]:
    """Name -> (inputs, a packed product per layer): several layers, so that weights are not cached, as in a pass."""

    def pack(
        outputs: int, inputs: int, copies: int = LAYERS, out_dtype: torch.dtype | None = None
    ) -> tuple[int, list[PackedLinear]]:
        weights = (torch.randn(outputs, inputs).to(dtype) for _ in range(copies))
        return inputs, [planner.pack(weight, out_dtype=out_dtype) for weight in weights]

    found = {
        "qkv": pack((HEADS + 2 * KV_HEADS) * D, H),
        "o": pack(H, HEADS * D),
        "gate_up": pack(2 * WIDE, H),
        "down": pack(H, WIDE),
        "logits": pack(VOCAB, H, 4, torch.float32),
    }
    planner.certify()
    return found


def multiply(layers: Iterator[PackedLinear], x: torch.Tensor) -> torch.Tensor:
    return next(layers)(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--torch", action="store_true", help="torch twins instead of compiled operators")
    parser.add_argument("--repeats", type=int, default=400)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    library = None if args.torch else native.load()
    table = ops.select(torch.device("cpu"), library)
    attend: Any = registry.select(torch.device("cpu"), library, None)
    planner = LinearPlanner(torch.device("cpu"), exact=True, max_rows=64, library=library)
    print(f"{args.dtype}, {torch.get_num_threads()} threads, operators: {table.name}; us")
    print(f"{'':16}" + "".join(f"{rows:>9} rows" for rows in ROWS))
    per_layer = {"add+norm": 2, "rope+store": 1, "attention": 1, "silu*up": 1}
    others = dict.fromkeys(ROWS, 0.0)
    with torch.inference_mode():
        for name in operators(table, attend, 1, dtype):
            line = f"{name:16}"
            for rows in ROWS:
                us = measure(operators(table, attend, rows, dtype)[name], args.repeats)
                others[rows] += us * per_layer.get(name, 0) * LAYERS
                line += f"{us:14.1f}"
            print(line)
        total = dict.fromkeys(ROWS, 0.0)
        for name, (inputs, layers) in products(planner, dtype).items():
            line = f"{name:16}"
            for rows in ROWS:
                x, layer = torch.randn(rows, inputs).to(dtype), cycle(layers)
                us = measure(partial(multiply, layer, x), args.repeats)
                total[rows] += us * (1 if name == "logits" else LAYERS)
                line += f"{us:14.1f}"
            print(line)
    for title, figures in (("products", total), ("others", others)):
        print(f"{title:16}" + "".join(f"{figures[rows]:14.0f}" for rows in ROWS))
    print(f"{'others, share':16}" + "".join(f"{others[r] / (others[r] + total[r]):14.0%}" for r in ROWS))


if __name__ == "__main__":
    main()
