"""Checks of all Triton kernels on any device: each equals its torch twin, and gives a row the same bits in any batch.

Run on a GPU by the tests beside this file, and in Triton's interpreter by `python -m tests.gpu.checks`.
Shapes: T rows, H width, D head size, M rows of logits, V columns, K inputs, N outputs.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftproof.attention.reference import reference_attention
from draftproof.attention.triton.paged import TritonAttention
from draftproof.kernels.activation import reference as activation
from draftproof.kernels.activation import triton as gpu_activation
from draftproof.kernels.experts import triton as gpu_experts
from draftproof.kernels.experts.reference import TORCH_EXPERTS
from draftproof.kernels.experts.spec import Routing
from draftproof.kernels.logits import reference as logits
from draftproof.kernels.logits import triton as gpu_logits
from draftproof.kernels.lookup import reference as lookup
from draftproof.kernels.lookup import triton as gpu_lookup
from draftproof.kernels.norm import reference as norm
from draftproof.kernels.norm import triton as gpu_norm
from draftproof.kernels.process import reference as process
from draftproof.kernels.process import triton as gpu_process
from draftproof.kernels.rope import reference as rope
from draftproof.kernels.rope import triton as gpu_rope
from draftproof.kernels.row_params import RowParams, pack_row
from draftproof.kernels.rows import reference as rows
from draftproof.kernels.rows import triton as gpu_rows
from draftproof.kernels.sample import reference as sample
from draftproof.kernels.sample import triton as gpu_sample
from draftproof.kernels.step.triton import TritonStep
from draftproof.matmul import grouped
from draftproof.matmul.spec import Shape
from draftproof.matmul.triton import grouped as gpu_grouped
from tests.gpu import process_cases, step_cases
from tests.gpu.attention_checks import (
    check_attention,
    check_attention_adds_up_many_chunks,
    check_attention_is_not_poisoned,
    check_attention_of_prompts,
    check_attention_of_unlike_layers,
    check_attention_to_broken_values,
    check_attention_weighs_alike_whatever_kernel_adds,
)
from tests.gpu.product_checks import check_products, randn
from tests.gpu.quantized_cases import check_quantized

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(found: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[expected.dtype]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected.float(), atol=bound, rtol=bound)


def same_in_any_batch(run: Callable[[Tensor], Tensor], rows: int) -> None:
    """Assert that `run`, which takes row indices, gives rows the same bits alone, in parts, shuffled and together."""
    every = torch.arange(rows)
    together = run(every)
    parts = [every[:1], every[1 : rows // 2], every[rows // 2 :], torch.randperm(rows), every[-1:]]
    for part in parts:
        assert torch.equal(run(part), together[part.to(together.device)])


def check_norm(device: torch.device, dtype: torch.dtype) -> None:
    for width in (64, 100, 2048, 4100):
        x, other = (
            randn(9, width, device=device, dtype=dtype),
            randn(9, width, device=device, dtype=dtype, seed=1),
        )
        weight = randn(width, device=device, dtype=dtype, seed=2)
        close(gpu_norm.rms_norm(x, weight, 1e-5), norm.rms_norm_torch(x, weight, 1e-5))
        for found, expected in zip(
            gpu_norm.add_rms_norm(x, other, weight, 1e-5),
            norm.add_rms_norm_torch(x, other, weight, 1e-5),
            strict=True,
        ):
            close(found, expected)
        parts = randn(4, 9, width, device=device, seed=3)
        summed = norm.add_parts_torch(parts, dtype)
        for found, whole, expected in zip(
            gpu_norm.add_rms_norm(parts, other, weight, 1e-5),
            gpu_norm.add_rms_norm(summed, other, weight, 1e-5),
            norm.add_rms_norm_torch(parts, other, weight, 1e-5),
            strict=True,
        ):
            close(found, expected)
            assert torch.equal(found, whole)
        same_in_any_batch(lambda i: gpu_norm.add_rms_norm(x[i], other[i], weight, 1e-5)[0], 9)  # noqa: B023
        shifted = torch.empty(9 * width + 1, device=device, dtype=dtype)[1:].view(9, width).copy_(x)
        assert torch.equal(gpu_norm.rms_norm(shifted, weight, 1e-5), gpu_norm.rms_norm(x, weight, 1e-5))


def check_activation(device: torch.device, dtype: torch.dtype) -> None:
    for width in (3, 64, 1500):
        x = 6 * randn(7, 2 * width, device=device, dtype=dtype)
        close(gpu_activation.silu_mul(x), activation.silu_mul_torch(x))
        same_in_any_batch(lambda i: gpu_activation.silu_mul(x[i]), 7)  # noqa: B023
        close(gpu_activation.gelu_mul(x), activation.gelu_mul_torch(x))
        same_in_any_batch(lambda i: gpu_activation.gelu_mul(x[i]), 7)  # noqa: B023


def check_soft_cap(device: torch.device, dtype: torch.dtype) -> None:
    for width in (3, 1024, 5000):
        x = 40 * randn(5, width, device=device)
        x[0] *= 1e-3
        torch.testing.assert_close(gpu_activation.soft_cap(x, 30.0), activation.soft_cap_torch(x, 30.0))
        same_in_any_batch(lambda i: gpu_activation.soft_cap(x[i], 30.0), 5)  # noqa: B023


def check_rows(device: torch.device, dtype: torch.dtype) -> None:
    """Kernels that only copy rows: results are equal."""
    for width in (1, 64, 1500):
        table = randn(11, width, device=device, dtype=dtype)
        for index in ([], [3], [10, 0, -1, 3, 3]):
            at = torch.tensor(index, dtype=torch.int64, device=device)
            assert torch.equal(gpu_rows.gather(table, at), rows.gather_torch(table, at))
        for parts in (
            [table, table + 1],
            [table, table + 1, table[:, :]],
            [table, table[:, :1]],
            [table] * 4,
        ):
            assert torch.equal(gpu_rows.concat(parts), rows.concat_torch(parts))
    params = torch.randint(-(2**60), 2**60, (11, 8), device=device)
    for index in ([], [3], [10, 0, 3, 3], [*range(11)] * 100):
        at = torch.tensor(index, dtype=torch.int64, device=device)
        assert torch.equal(gpu_rows.gather(params, at), rows.gather_torch(params, at))
    numbers = torch.arange(6, device=device)[:, None]
    assert gpu_rows.gather(numbers, numbers[::2, 0]).view(-1).tolist() == [0, 2, 4]


def check_rope(device: torch.device, dtype: torch.dtype) -> None:
    for dim, rotary, block_size, normed in ((64, 64, 16, True), (20, 12, 7, True), (32, 32, 16, False)):
        heads, kv_heads, rows = 6, 2, 9
        qkv = randn(rows, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        positions = torch.tensor([0, 5, -1, 33, 34, 35, -1, 2, 39], device=device)
        slots = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2], device=device)
        table = (
            (torch.randperm(3 * 6, generator=torch.Generator().manual_seed(0)) + 1)
            .view(3, 6)
            .int()
            .to(device)
        )
        cos_sin = randn(64, rotary, device=device)
        norms = [randn(dim, device=device, dtype=dtype, seed=s) if normed else None for s in (3, 4)]
        found, expected = [], []
        for run, out in ((gpu_rope.rope_store, found), (rope.rope_store_torch, expected)):
            k_cache = torch.zeros(19, kv_heads, block_size, dim, dtype=dtype, device=device)
            v_cache = torch.zeros_like(k_cache)
            q = run(qkv, positions, slots, cos_sin, *norms, 1e-6, k_cache, v_cache, table)
            out += [q, k_cache, v_cache]
        for a, b in zip(found, expected, strict=True):
            close(a, b)
        assert torch.equal(found[2], expected[2])  # values are only copied

        def queries(i: Tensor) -> Tensor:
            i = i.to(device)
            caches = found[1].clone(), found[2].clone()  # noqa: B023
            out = gpu_rope.rope_store(qkv[i], positions[i], slots[i], cos_sin, *norms, 1e-6, *caches, table)  # noqa: B023
            assert torch.equal(caches[0], found[1]) and torch.equal(caches[1], found[2])  # noqa: B023
            return out

        same_in_any_batch(queries, rows)
        check_rope_forms(qkv, (positions, slots, cos_sin), norms, found, table)


def check_rope_forms(
    qkv: Tensor, places: tuple[Tensor, ...], norms: list[Tensor | None], stored: list[Tensor], table: Tensor
) -> None:
    """rope_store with a norm of values, and with queries only. `stored`: q and caches without these."""
    q, k_cache, v_cache = stored
    dim, weight = q.shape[2], torch.ones(q.shape[2], device=q.device)
    caches = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    again = gpu_rope.rope_store(qkv, *places, *norms, 1e-6, *caches, table, weight)
    assert torch.equal(again, q) and torch.equal(caches[0], k_cache)
    close(caches[1].view(-1, dim), norm.rms_norm_torch(v_cache.view(-1, dim), weight, 1e-6))
    shift, found, expected = torch.tensor([2, 0, -1], device=q.device), list[Tensor](), list[Tensor]()
    for run, out in ((gpu_rope.rope_store, found), (rope.rope_store_torch, expected)):
        own = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
        out += [run(qkv, *places, *norms, 1e-6, *own, table, None, shift), *own]
    assert not torch.equal(found[0], q)
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    alone, none = qkv[:, : q.shape[1] * dim], k_cache[:, :0]
    assert torch.equal(gpu_rope.rope_store(alone, *places, norms[0], None, 1e-6, none, none, table), q)


def check_shared_keys(device: torch.device, dtype: torch.dtype) -> None:
    """Keys that are also the values: stored once, and read as both."""
    heads, dim, rotary, rows, block_size = 5, 72, 8, 9, 16
    qk = randn(rows, (heads + 1) * dim, device=device, dtype=dtype)
    positions = torch.tensor([0, 5, -1, 33, 34, 35, -1, 2, 39], device=device)
    slots = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2], device=device)
    table = (torch.arange(3 * 6, device=device) + 1).view(3, 6).int()
    cos_sin, cache = (
        randn(64, rotary, device=device),
        randn(19, 1, block_size, dim, device=device, dtype=dtype),
    )
    found, expected = [], []
    for run, out in ((gpu_rope.rope_store, found), (rope.rope_store_torch, expected)):
        keys = cache.clone()
        q = run(qk, positions, slots, cos_sin, None, None, 1e-6, keys, None, table)
        out += [q, keys]
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    ends = positions + 1

    def attend(i: Tensor) -> Tensor:
        i = i.to(device)
        q, keys = found
        return TritonAttention()(q[i], keys, keys, table, slots[i], ends[i], 0, 0.2)

    close(attend(torch.arange(rows)), reference_attention(*found, found[1], table, slots, ends, 0, 0.2))
    same_in_any_batch(attend, rows)


def check_log_normalizer(device: torch.device, dtype: torch.dtype) -> None:
    for width in (1, 37, 4096, 9001):
        x = 5 * randn(6, width, device=device)
        x[1, 0], x[2] = torch.inf, -torch.inf
        torch.testing.assert_close(gpu_logits.log_normalizer(x), logits.log_normalizer_torch(x))
        same_in_any_batch(lambda i: gpu_logits.log_normalizer(x[i]), 6)  # noqa: B023
        x[3, 0] = torch.nan
        assert gpu_logits.log_normalizer(x)[3].isnan()


SAMPLING = (
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 200, "top_p": 0.7, "min_p": 0.001},
    {"temperature": 1e6, "top_p": 0.5},
    {"temperature": 1e-30},
)


def draw_inputs(rows: int, device: torch.device, **given: float) -> tuple[RowParams, Tensor]:
    """(sampling parameters, positions of the sampled rows)."""
    full: dict[str, Any] = {"temperature": 1.0, **given}
    packed = [pack_row(seed=seed, **full) for seed in (m * 0x123456789ABCDEF - 5 for m in range(rows))]
    params = RowParams(torch.tensor(packed, device=device))
    return params, torch.arange(rows, device=device) + 40


def check_sample(device: torch.device, dtype: torch.dtype) -> None:
    small = device.type == "cpu"
    for width, scale in ((5000, 3.0), (37, 3.0), (9001, 0.01), (128256, 3.0))[: 1 if small else 4]:
        x = scale * randn(6, width, device=device)
        x[:, 3] = x[:, 7]
        x[1, 0], x[2] = torch.nan, -torch.inf
        ids = torch.randperm(2 * width, generator=torch.Generator().manual_seed(1))[:width].to(device)
        for params in SAMPLING:
            given = draw_inputs(6, device, **params)
            for mapped in (None, ids)[: 1 if small and params else 2]:
                found = gpu_sample.sample(x, *given, mapped)
                assert torch.equal(found, sample.sample_torch(x, *given, mapped)), (width, params)
            assert found[1] == found[2] == -1
            if not small or params == SAMPLING[5]:
                same_in_any_batch(
                    lambda i: gpu_sample.sample(x[i], *[c[i.to(device)] for c in given], None),  # noqa: B023
                    6,
                )
    ties = torch.zeros(2, 5000, device=device)
    ties[:, [4097, 13]] = 1.0
    given = draw_inputs(2, device, temperature=0.0)
    assert gpu_sample.sample(ties, *given, None).tolist() == [13, 13]
    none = torch.full((2, 50), -torch.inf, device=device)
    failures = torch.tensor([-2, -1], device=device)
    assert gpu_sample.sample(none, *given, None, failures).tolist() == [-2, -1]


def check_process(device: torch.device, dtype: torch.dtype) -> None:
    """Random requests with penalties, token lists, both or neither; some rows hold only NaN or -inf."""
    for width in (37, 3000) if device.type == "cpu" else (37, 3000, 128256):
        given = process_cases.case(width, device)
        found_MV, failures_M = gpu_process.process(*given)
        expected_MV, expected_M = process.process_torch(*given)
        assert torch.equal(found_MV.view(torch.int32), expected_MV.view(torch.int32)), width
        assert torch.equal(failures_M, expected_M) and set(expected_M.tolist()) == {-1, -2}


def check_step(device: torch.device, dtype: torch.dtype) -> None:
    """With blocks of 4, a request's rows, and the requests before it, take several blocks."""
    for index, case in enumerate(step_cases.CASES):
        layout = step_cases.LAYOUTS[index % len(step_cases.LAYOUTS)]
        step_cases.compare(TritonStep(block=4 if index % 2 else 512), case, layout, device)
    for seed in range(10):
        step_cases.random_accept(TritonStep(), seed, device)


def check_lookup(device: torch.device, dtype: torch.dtype) -> None:
    """Texts shorter than a suffix and longer than a block of positions, and unused slots."""
    generator = torch.Generator().manual_seed(0)
    for length, num_ids in ((1, 2), (2, 1), (40, 2), (40, 30), (gpu_lookup.BLOCK + 50, 9)):
        tokens_SL = torch.randint(num_ids, (5, length + 20), generator=generator).int().to(device)
        length_S = torch.tensor([length, length - 1, max(0, length - 7), 0, length], device=device)
        slots_R = torch.tensor([4, 0, 3, 1, 2, 0], device=device)
        k_R = torch.tensor([9, 3, 2, 0, 5, 1], device=device)
        for shortest, longest, most_matched, num_drafts in ((1, 1, 4, 6), (2, 5, 16, 9), (3, 64, 64, 1)):
            given = (tokens_SL, length_S, slots_R, k_R, num_drafts, shortest, longest, most_matched)
            for found, expected in zip(gpu_lookup.lookup(*given), lookup.lookup_torch(*given), strict=True):
                assert torch.equal(found, expected)


def check_draft_rows(device: torch.device, dtype: torch.dtype) -> None:
    for seed in range(27):
        step_cases.random_draft_rows(TritonStep(block=2 if seed % 2 else 512), seed, device)


ROUTINGS = (
    (8, False, Routing(top_k=2)),
    (60, False, Routing(top_k=4, normalize=False)),
    (5, True, Routing(top_k=5, sigmoid=True)),
    (12, True, Routing(top_k=3, sigmoid=True, scale=2.5, groups=6, top_groups=2)),
    (256, True, Routing(top_k=8, sigmoid=True, scale=2.5, groups=8, top_groups=4)),
)


def check_experts(device: torch.device, dtype: torch.dtype) -> None:
    """Routing, sorting and weighted sum, including ties and NaN."""
    small = device.type == "cpu"
    triton, rows = gpu_experts.TritonExperts(), 8 if small else 300
    for num_experts, biased, routing in ROUTINGS[: 4 if small else 5]:
        logits = 2 * randn(rows, num_experts, device=device)
        logits[:2] = 0.0
        bias = 0.2 * randn(num_experts, device=device, seed=1) if biased else None
        experts, weights = triton.route(logits, bias, routing)
        expected, expected_weights = TORCH_EXPERTS.route(logits, bias, routing)
        assert torch.equal(experts, expected)
        torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
        source, place, starts = triton.group(experts, num_experts)
        for found, wanted in zip(
            (source, place, starts), TORCH_EXPERTS.group(experts, num_experts), strict=True
        ):
            assert torch.equal(found, wanted)
        y, base = randn(place.numel(), 70, device=device), randn(rows, 70, device=device, dtype=dtype, seed=2)
        for given in (None, base):
            sums = triton.combine(y, place, weights, given, dtype)
            close(sums, TORCH_EXPERTS.combine(y, place, weights, given, dtype))
        same_in_any_batch(lambda i: triton.route(logits[i], bias, routing)[1], rows)  # noqa: B023
        same_in_any_batch(lambda i: triton.combine(y, place[i], weights[i], base[i], dtype), rows)  # noqa: B023
        for bad in (torch.nan, torch.inf, -torch.inf):
            nonsense = torch.full((2, num_experts), bad, device=device)
            for row in triton.route(nonsense, bias, routing)[0].tolist():
                assert (
                    len(set(row)) == routing.top_k
                    and sorted(row) == row
                    and 0 <= row[0] <= row[-1] < num_experts
                )


def check_grouped_products(device: torch.device, dtype: torch.dtype) -> None:
    """Each row meets its own expert's weight; on a GPU with the same bits in any grouping, for every tile."""
    for outputs, inputs, out_dtype in ((50, 200, dtype), (64, 512, torch.float32)):
        shape = Shape(outputs, inputs, dtype, out_dtype, False)
        weights = [randn(outputs, inputs, device=device, dtype=dtype, seed=s) for s in range(5)]
        linear_fn = gpu_grouped.Groups(5, weights, shape)
        x = randn(150, inputs, device=device, dtype=dtype, seed=9)
        for split in ([0, 1, 0, 0, 0], [2, 0, 7, 8, 17], [60, 0, 33, 1, 10], [0, 0, 150, 0, 0]):
            starts = torch.tensor([0, *split], device=device).cumsum(0)
            found = linear_fn(x[: sum(split)], starts)
            parts = x[: sum(split)].double().split(split)
            expected = torch.cat([part @ w.double().T for part, w in zip(parts, weights, strict=True)])
            assert found.dtype == out_dtype
            bound = 0.5 if out_dtype == torch.bfloat16 else 0.05
            torch.testing.assert_close(found.double(), expected, atol=bound, rtol=0.02)
        assert linear_fn(x[:0], starts * 0).shape == (0, outputs)
        if device.type == "cuda":  # the interpreter sums each block of K separately
            assert grouped.is_exact(gpu_grouped.Groups, shape, device)


CHECKS = (
    *(check_norm, check_activation, check_soft_cap, check_rows),
    *(check_rope, check_log_normalizer, check_sample, check_process),
    *(check_attention, check_attention_adds_up_many_chunks, check_attention_is_not_poisoned),
    *(check_attention_of_prompts, check_attention_of_unlike_layers, check_attention_to_broken_values),
    check_attention_weighs_alike_whatever_kernel_adds,
    *(check_products, check_step, check_lookup, check_draft_rows),
    *(check_experts, check_grouped_products, check_shared_keys, check_quantized),
)


def main() -> None:
    """Print {check: error or ""} as JSON."""
    from tests.gpu import interpreter

    interpreter.install()
    found = {}
    for check in CHECKS:
        try:
            halves = check in (check_norm, check_products, check_grouped_products, check_quantized)
            dtypes = (torch.float32, torch.float16) if halves else (torch.float32,)
            for dtype in dtypes:
                check(torch.device("cpu"), dtype)
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
