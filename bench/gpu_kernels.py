"""GPU kernels compared with their rooflines: `python bench/gpu_kernels.py`.

Shapes of Llama-3.1-8B, bf16; device time of calls inside one CUDA graph, weights and caches not in the L2 cache.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof.attention.triton.paged import LaunchConfig, Tiling, TritonAttention
from draftproof.bench.passes import host_seconds
from draftproof.bench.rooflines import H200
from draftproof.kernels import ops
from draftproof.kernels.row_params import RowParams
from draftproof.matmul import gpu_planner as planner
from draftproof.matmul import quantized
from draftproof.matmul.gpu_planner import TimedGraph
from draftproof.matmul.linear import LinearPlanner
from draftproof.matmul.spec import Candidate, LinearFn, Shape
from draftproof.matmul.triton import linear
from draftproof.matmul.triton import quantized as gpu_quantized
from draftproof.matmul.triton.linear import Tile
from draftproof.matmul.triton.quantized import Fp8Tile
from draftproof.runtime.triton.launch import num_processors

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
BANDWIDTH = H200.bytes / 1e6  # per microsecond, from the datasheet
LAYERS, HEADS, KV_HEADS, D = 32, 32, 8, 128
PRODUCTS = {
    "qkv": (6144, 4096, LAYERS, BF16),
    "o": (4096, 4096, LAYERS, BF16),
    "gate_up": (28672, 4096, LAYERS, BF16),
    "down": (4096, 14336, LAYERS, BF16),
    "logits": (128256, 4096, 1, torch.float32),
}
ROWS = (1, 2, 4, 6, 8, 16, 32, 64)
CASES = tuple(
    (rows, batch, context) for rows in (1, 6) for batch in (1, 16, 64) for context in (1024, 8192, 32768)
)
FEW_CASES = tuple(case for case in CASES if case[1] * case[2] in (1024, 8192, 32768, 131072, 65536, 524288))


def products() -> tuple[dict[str, dict[int, float]], int]:
    """(milliseconds by rows for "exact" and "cublas", all products of a pass in one graph; bytes of the weights)."""
    passes: dict[str, dict[int, list[Callable[[], object]]]] = {
        name: {rows: [] for rows in ROWS} for name in ("exact", "cublas")
    }
    x = {(rows, k): torch.randn(rows, k, device=DEVICE).to(BF16) for rows in ROWS for k in (4096, 14336)}
    exact = LinearPlanner(DEVICE, exact=True, max_rows=2048, library=None)
    total_bytes, start = 0, time.perf_counter()
    for outputs, inputs, copies, out_dtype in PRODUCTS.values():
        for _ in range(copies):
            weight = torch.randn(outputs, inputs, device=DEVICE, dtype=BF16)
            total_bytes += weight.nbytes
            linear_fns: dict[str, LinearFn] = {
                "exact": exact.pack(weight, out_dtype=out_dtype),
                "cublas": linear.cublas(weight, None, out_dtype),
            }
            for name, linear_fn in linear_fns.items():
                for rows in ROWS:
                    passes[name][rows].append(partial(linear_fn, x[rows, inputs]))
    exact.certify()
    print(f"certified, or read from the cache, in {time.perf_counter() - start:.0f} s")
    for row in exact.report():
        print(f"  {row.shape} {row.rows:4}: {row.candidate} {row.microseconds:.1f} us | {row.fastest_candidate} "
              f"{row.fastest_microseconds:.1f}", flush=True)  # fmt: skip
    print(f"all 129 products in one graph, ms; bytes / 4.8 TB/s: {total_bytes / BANDWIDTH / 1e3:.2f}")
    found = {
        name: {rows: TimedGraph(calls[rows]).microseconds() * len(calls[rows]) / 1e3 for rows in ROWS}
        for name, calls in passes.items()
    }
    for name, times in found.items():
        print(f"  {name:7}" + "".join(f"{rows:4}: {ms:5.2f}" for rows, ms in times.items()))
    return found, total_bytes


# Products of the EAGLE-3 head of shapes/llama-3.1-8b-eagle3.
HEAD_PRODUCTS = {
    "fc": (4096, 12288, BF16),
    "qkv": (6144, 8192, BF16),
    "o": (4096, 4096, BF16),
    "gate_up": (28672, 4096, BF16),
    "down": (4096, 14336, BF16),
    "logits": (32000, 4096, torch.float32),
}
_A8 = Tile(16, 64, 128, 4, 4, True)
FP8_FEW = (
    *(Fp8Tile(_A8, programs) for programs in (0, 2, 3, 4, 6)),
    *(Fp8Tile(Tile(16, 64, 128, 3, 4, True), 5), Fp8Tile(Tile(16, 64, 128, 6, 4, True), 3)),
    *(Fp8Tile(Tile(16, 64, 256, 3, 4, True), 2), Fp8Tile(Tile(16, 64, 256, 3, 4, True), 3)),
    *(Fp8Tile(Tile(16, 128, 128, 4, 4, True), 2), Fp8Tile(Tile(16, 128, 128, 3, 4, True), 3)),
    Fp8Tile(Tile(16, 128, 128, 4, 8, True), 2),
    *(Fp8Tile(Tile(16, 32, 256, 4, 4), 4), Fp8Tile(Tile(16, 64, 128, 6, 4), 3)),
)
FP8_SOME = (
    *(Fp8Tile(Tile(32, 64, 128, 4, 4, True), 3), Fp8Tile(Tile(32, 128, 128, 3, 4, True), 2)),
    *(Fp8Tile(Tile(64, 128, 128, 3, 8, True), 2), Fp8Tile(Tile(64, 128, 128, 3, 8, True))),
    *(Fp8Tile(Tile(64, 64, 128, 3, 4, True), 2), Fp8Tile(Tile(64, 64, 128, 5, 4, True), 3)),
)
FP8_CASES = (((1, 6, 16), FP8_FEW), ((32, 64), FP8_SOME), ((96, 512), FP8_SOME[2:4]))


def fp8() -> None:
    """A draft head's products with fp8 weights: the three best candidates of each, and the time of all six together."""

    def make(cut: Fp8Tile | None, weight: Tensor, out_dtype: torch.dtype) -> LinearFn:
        """A product with fp8 weights; `cut` None: the table's tiling."""
        made, scale = kept.setdefault(weight.data_ptr(), quantized.quantize(weight))
        return lambda x: gpu_quantized.product(x, made, scale, None, out_dtype, cut)

    for all_rows, cuts in FP8_CASES:
        best: dict[int, float] = dict.fromkeys(all_rows, 0.0)
        used, lines = dict(best), {rows: list[str]() for rows in all_rows}
        for name, (outputs, inputs, out_dtype) in HEAD_PRODUCTS.items():
            kept: dict[
                int, tuple[Tensor, Tensor]
            ] = {}  # by address: candidates share weights, which stay alive
            processors = num_processors(DEVICE)
            tried = {
                (c.tile, c.parts(all_rows[0], outputs, inputs, processors)): c for c in reversed(cuts)
            }.values()
            candidates = [Candidate(c.name, lambda w, b, out, c=c: make(c, w, out)) for c in tried]  # type: ignore[misc]
            candidates += [
                Candidate("table", lambda w, b, out: make(None, w, out)),
                Candidate("bf16 cublas", linear.cublas),
            ]
            shape = Shape(outputs, inputs, BF16, out_dtype, False)
            times = planner.times(shape, candidates, DEVICE, all_rows)
            for i, rows in enumerate(all_rows):
                us = {candidate: t[i] for candidate, t in times.items()}
                first = sorted(
                    (candidate for candidate in us if candidate not in ("table", "bf16 cublas")),
                    key=us.__getitem__,
                )
                best[rows] += min(us[first[0]], us["table"])
                used[rows] += us["table"]
                shown = "; ".join(
                    f"{candidate} {us[candidate]:.1f}" for candidate in (*first[:3], "table", "bf16 cublas")
                )
                roof = outputs * inputs / BANDWIDTH
                lines[rows].append(f"{rows:3} x {name:8} | {shown} | roof {roof:.1f}")
        for rows, found in lines.items():
            print(*found, sep="\n")
            print(f"{rows:3} rows, all six, us: best {best[rows]:.1f}; table {used[rows]:.1f}", flush=True)


class Cache:
    """One layer's cache of 2^21 tokens; requests' blocks are scattered over all of it."""

    def __init__(self) -> None:
        blocks = (1 << 21) // 16
        self.k = torch.randn(blocks, KV_HEADS, 16, D, device=DEVICE, dtype=BF16)
        self.v = torch.randn(blocks, KV_HEADS, 16, D, device=DEVICE, dtype=BF16)
        self.order = torch.randperm(blocks, device=DEVICE).int()

    def calls(
        self, backend: TritonAttention, batch: int, rows: int, context: int, bound: int = 0
    ) -> list[Callable[[], object]]:
        """Calls over disjoint parts of the cache, together much larger than L2."""
        bound = bound or context
        copies = max(1, min((1 << 21) // (batch * bound), 1 + (400 << 20) // (batch * context * 4096)))
        slots = torch.arange(batch, device=DEVICE).repeat_interleave(rows)
        ends = context - rows + 1 + torch.arange(rows, device=DEVICE).repeat(batch)
        q = torch.randn(batch * rows, HEADS, D, device=DEVICE, dtype=BF16)
        found: list[Callable[[], object]] = []
        for part in self.order.split(batch * bound // 16)[:copies]:
            args = (q, self.k, self.v, part.view(batch, -1), slots, ends, 0, D**-0.5)
            attend = backend.begin()  # each call plans, like the first layer of a pass
            attend(*args)
            found.append(partial(attend, *args))
        return found


def attention(
    variants: Sequence[Tiling], prompts: Sequence[Tiling], cases: Sequence[tuple[int, int, int]]
) -> None:
    """Print attention times for decode and verify rows, then for a prompt."""
    cache = Cache()
    print("attention, us a layer: rows x batch at context: roof | " + " | ".join(map(_short, variants)))
    for rows, batch, context in cases:
        roof = batch * context * KV_HEADS * D * 4 / BANDWIDTH
        found = [_timed(cache, v, batch, rows, context) for v in variants]
        print(f"  {rows} x {batch:2} at {context:5}: {roof:7.1f} | " + " | ".join(found), flush=True)
    bound = _timed(cache, Tiling(), 1, 1, 1024, 131072)
    print(f"  1 x 1 at 1024, table of 131072: {bound}")
    for rows, context in ((2048, 2048), (512, 8192)):
        q = torch.randn(1, HEADS, rows, D, device=DEVICE, dtype=BF16)
        k, v = (torch.randn(1, KV_HEADS, context, D, device=DEVICE, dtype=BF16) for _ in range(2))
        found = [_timed(cache, t, 1, rows, context) for t in prompts]
        whole = TimedGraph(
            [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]  # noqa: B023
        )
        torch_us = whole.microseconds()
        print(
            f"  prompt {rows} rows at {context}: {' | '.join(found)} | torch, causal from the top: {torch_us:.0f}"
        )


def _short(t: Tiling) -> str:
    f = t.some
    return f"c{t.chunk} n{t.step} m{f.most}/{t.prompt.most} w{f.num_warps} s{f.num_stages} r{f.registers} x{f.runs}"


def _timed(cache: Cache, tiling: Tiling, batch: int, rows: int, context: int, bound: int = 0) -> str:
    """Microseconds as text, or the error."""
    try:
        calls = cache.calls(TritonAttention(tiling), batch, rows, context, bound)
        return f"{TimedGraph(calls[:64]).microseconds():8.1f}"
    except Exception as error:
        return repr(error)[:60]


def sampling() -> None:
    table, width = ops.triton_ops(), 128256
    for rows in (1, 8, 64):
        logits = 3 * torch.randn(rows, width, device=DEVICE)
        line = f"sample {rows:2} x {width}, us:"
        for title, params in (
            ("greedy", (0.0, 0, 1.0, 0.0)),
            ("T=1", (1.0, 0, 1.0, 0.0)),
            ("top-k 50", (1.0, 50, 1.0, 0.0)),
            ("top-p 0.9", (1.0, 0, 0.9, 0.0)),
            ("both", (0.7, 50, 0.9, 0.0)),
            ("T=1e6 top-p", (1e6, 0, 0.9, 0.0)),
        ):
            temperature, top_k, top_p, min_p = (torch.full((rows,), x, device=DEVICE) for x in params)
            seeds = torch.arange(rows, device=DEVICE)
            given = RowParams.of(temperature, top_k, top_p, min_p, seeds)
            call = partial(table.sample, logits, given, seeds, None)
            us = TimedGraph([call] * 4).microseconds()
            line += f" {title} {us:.1f};"
        us = TimedGraph([lambda: table.log_normalizer(logits)] * 4).microseconds()  # noqa: B023
        print(line + f" log normalizer {us:.1f}; roof {rows * width * 4 / BANDWIDTH:.1f}")


def small() -> None:
    """Print the times of operators between the products, and the host's cost of a launch."""
    table = ops.triton_ops()
    for rows in (1, 8, 64, 2048):
        x, gate_up = (
            torch.randn(rows, 4096, device=DEVICE).to(BF16),
            torch.randn(rows, 28672, device=DEVICE).to(BF16),
        )
        qkv, weight = (
            torch.randn(rows, 6144, device=DEVICE).to(BF16),
            torch.ones(4096, device=DEVICE, dtype=BF16),
        )
        k = torch.zeros(256, KV_HEADS, 16, D, device=DEVICE, dtype=BF16)
        v, blocks = torch.zeros_like(k), torch.arange(256, device=DEVICE, dtype=torch.int32).view(1, 256)
        positions, cos_sin = torch.arange(rows, device=DEVICE), torch.randn(4096, D, device=DEVICE)
        slots = torch.zeros_like(positions)
        calls: dict[str, Callable[[], object]] = {
            "norm": lambda: table.rms_norm(x, weight, 1e-6),  # noqa: B023
            "add+norm": lambda: table.add_rms_norm(x, x, weight, 1e-6),  # noqa: B023
            "silu*up": lambda: table.silu_mul(gate_up),  # noqa: B023
            "rope+store": lambda: table.rope_store(
                qkv, positions, slots, cos_sin, None, None, 1e-6, k, v, blocks  # noqa: B023
            ),
        }  # fmt: skip
        line = f"{rows:4} rows, us:"
        for name, call in calls.items():
            line += f" {name} {TimedGraph([call] * 20).microseconds():.1f};"
        if rows == 1:
            for name, call in calls.items():
                torch.cuda.synchronize()
                line += f" host {name} {host_seconds(call, 200) * 1e6:.0f};"
        print(line, flush=True)


VARIANTS = (
    Tiling(),
    *(
        Tiling(some=cut, decode=cut)
        for cut in (
            LaunchConfig(num_warps=8, registers=128),
            LaunchConfig(num_stages=3, registers=128),
            LaunchConfig(runs=4),
        )
    ),
    Tiling(chunk=128),
)
PROMPTS = (Tiling(), Tiling(prompt=LaunchConfig(most=64, num_stages=3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts: dict[str, Callable[[], object]] = {
        "small": small,
        "sampling": sampling,
        "attention": lambda: attention(VARIANTS[:1], PROMPTS[:1], CASES),
        "tilings": lambda: attention(VARIANTS, PROMPTS, FEW_CASES),
        "products": products,
        "fp8": fp8,
    }
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all but tilings and fp8")
    wanted = parser.parse_args().parts or [name for name in parts if name not in ("tilings", "fp8")]
    print(torch.cuda.get_device_name(), torch.__version__)
    with torch.inference_mode():
        for name, run in parts.items():
            if name in wanted:
                start = time.perf_counter()
                try:
                    run()
                except Exception:
                    traceback.print_exc(limit=-4)
                print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
