"""Certificates: at which numbers of rows a candidate gives every row the reference's bits.

Random data hides a change of order: most sums round to the same number. Here every sum cancels, so that only the
rounding errors of partial sums remain, and any other order gives other bits. `prove_power` verifies this.
Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from draftproof.kernels.exactness import NoPowerError
from draftproof.matmul.spec import Candidate, LinearFn, Shape
from draftproof.matmul.weights import parts
from draftproof.runtime.threads import threads

BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (1024, 2048)  # for GPUs, whose matrix units fewer rows do not fill
# outputs of a language model head, which computes the sampled rows only
WIDE = 1 << 15
MAX_WIDE_ROWS = 64
SAMPLED_BUCKETS = (1, 2, 3, 5, 8, 10, 16, 24, 48, 64, 128)  # for candidates that are exact by construction
REFERENCE_ROWS = (8, 64)
SEEDS = (11, 12)
LARGE = 1 << 26  # elements of a weight; weights this large are checked with the first seed only
SHIFT = 3  # rows are also checked starting at this one, so that each has two places in the bucket
SPREAD = 6  # inputs differ in magnitude by up to 2^12, so that short sums round too
MIN_POWER = 0.05  # least share of sums that a changed order must change; on random data it is 0.0002 in bf16
PERIOD = 256  # number of different rows in the test weight; more would only take time


def bucket_table(shape: Shape, max_rows: int, device: torch.device) -> tuple[int, ...]:
    """The numbers of rows to certify; calls with more rows than the last are split.

    On a CPU it depends on the shape alone, not on settings: another table might lead to another reference. On a GPU the
    reference has the same bits at any number of rows, so the table may end where `max_rows` (a setting) is covered.
    """
    if device.type == "cpu":
        return tuple(rows for rows in BUCKETS if rows <= MAX_WIDE_ROWS or shape.outputs <= WIDE)
    table = (*BUCKETS, *PROMPT_BUCKETS)
    kept = [rows for rows in table if rows < max_rows]
    return (*kept, *[rows for rows in table if rows >= max_rows][:1])


def cancelling(rows: int, shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
    """x [rows, K] and weight [N, K] whose products cancel in pairs, scattered over K, of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    half = shape.inputs // 2
    scale_K = 2.0 ** torch.randint(-SPREAD, SPREAD + 1, (half,), generator=generator)
    x_TK = torch.randn(rows, half, generator=generator) * scale_K
    weight_NK = torch.randn(min(shape.outputs, PERIOD), half, generator=generator)
    order_K = torch.randperm(shape.inputs, generator=generator)
    first = order_K[:half]
    second = order_K[half : 2 * half]
    x = torch.zeros(rows, shape.inputs)
    weight = torch.zeros(weight_NK.shape[0], shape.inputs)
    x[:, first] = x_TK
    x[:, second] = x_TK
    weight[:, first] = weight_NK
    weight[:, second] = -weight_NK
    weight = weight.to(shape.dtype).repeat(-(-shape.outputs // PERIOD), 1)[: shape.outputs]
    return x.to(shape.dtype), weight.contiguous()


def prove_power(shape: Shape, seed: int) -> None:
    """Raise NoPowerError unless splitting K in two changes many sums of the data of `seed`.

    Both versions add one product at a time in fp32; they differ only in the split.
    """
    if shape.inputs < 16:
        return  # sums this short may round alike in any order, and there is nothing to split
    x_TK, weight_NK = cancelling(REFERENCE_ROWS[0], dataclasses.replace(shape, outputs=PERIOD), seed)
    x_TK = x_TK.float()
    weight_NK = weight_NK.float()
    half = shape.inputs // 2
    whole = _in_order(x_TK, weight_NK)
    split = _in_order(x_TK[:, :half], weight_NK[:, :half]) + _in_order(x_TK[:, half:], weight_NK[:, half:])
    changed = (whole.to(shape.out_dtype) != split.to(shape.out_dtype)).float().mean().item()
    if changed < MIN_POWER:
        raise NoPowerError(
            f"{shape.key()}: a product split over K goes unseen, only {changed:.2%} of sums changed"
        )


def _in_order(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T, adding one input at a time."""
    total_TN = torch.zeros(x_TK.shape[0], weight_NK.shape[0])
    for x_T, weight_N in zip(x_TK.T.contiguous(), weight_NK.T.contiguous(), strict=True):
        total_TN += x_T[:, None] * weight_N
    return total_TN


class Reference:
    """The expected bits for rows of the test data: from one candidate, a fixed number of rows per call, at 1 thread.

    The number of rows per call depends on the machine: it is the one with which the candidate agrees in the most
    buckets, at 1 thread too, so that processes with different numbers of threads choose the same reference.
    """

    def __init__(
        self, shape: Shape, candidate: Candidate, buckets: Sequence[int], device: torch.device
    ) -> None:
        self._shape = shape
        self._buckets = tuple(buckets)
        self._device = device
        seeds = SEEDS if shape.outputs * shape.inputs < LARGE else SEEDS[:1]
        for seed in seeds:
            prove_power(shape, seed)
        most = max(buckets) + SHIFT
        self._data = [tuple(t.to(device) for t in cancelling(most, shape, seed)) for seed in seeds]
        self._bias_N = None
        if shape.bias:
            self._bias_N = torch.linspace(-1e-5, 1e-5, shape.outputs, device=device).to(shape.dtype)
        with threads(1):
            self._expected = self._choose_expected(candidate)

    def buckets(self, candidate: Candidate) -> tuple[int, ...]:
        """The tried buckets at which `candidate` gives the reference's bits, at torch's current number of threads."""
        wanted = self.tried(candidate)
        for (x_TK, weight_NK), expected_TN in zip(self._data, self._expected, strict=True):
            if wanted:
                linear_fn = self._linear_fn(candidate, weight_NK)
                wanted = tuple(rows for rows in wanted if _matches(linear_fn, rows, x_TK, expected_TN))
        return wanted

    def tried(self, candidate: Candidate) -> tuple[int, ...]:
        """The numbers of rows at which `candidate` is checked."""
        if candidate.any_rows and self._device.type == "cpu":
            return tuple(rows for rows in SAMPLED_BUCKETS if rows <= max(self._buckets))
        return self._buckets

    def certified(self, candidate: Candidate) -> tuple[int, ...]:
        """The buckets that `candidate` may be called at. All or none if it claims to be exact by construction."""
        found = self.buckets(candidate)
        if candidate.any_rows:
            return self._buckets if found == self.tried(candidate) else ()
        return found

    def _choose_expected(self, candidate: Candidate) -> list[Tensor]:
        if candidate.any_rows:
            return self._computed(candidate, REFERENCE_ROWS[0])
        best: tuple[int, list[Tensor]] | None = None
        for rows in REFERENCE_ROWS:
            self._expected = self._computed(candidate, rows)
            num_kept = len(self.buckets(candidate))
            if best is None or num_kept > best[0]:
                best = num_kept, self._expected
        assert best is not None
        return best[1]

    def _computed(self, candidate: Candidate, num_rows: int) -> list[Tensor]:
        """[T, N] for each seed, computed `num_rows` rows per call; the last call is padded with zeros."""
        computed = []
        for x_TK, weight_NK in self._data:
            linear_fn = self._linear_fn(candidate, weight_NK)
            missing = -len(x_TK) % num_rows
            padded_TK = torch.cat((x_TK, x_TK.new_zeros(missing, x_TK.shape[1])))
            computed.append(
                torch.cat([linear_fn(part.clone()) for part in padded_TK.split(num_rows)])[: len(x_TK)]
            )
        return computed

    def _linear_fn(self, candidate: Candidate, weight_NK: Tensor) -> LinearFn:
        return candidate.make(parts(self._shape.kind, weight_NK), self._bias_N, self._shape.out_dtype)


def certify(
    shape: Shape, candidates: Sequence[Candidate], max_rows: int, device: torch.device
) -> dict[str, tuple[int, ...]]:
    """The certified buckets of each candidate, by name. The first candidate is the reference."""
    table = bucket_table(shape, max_rows, device)
    reference = Reference(shape, candidates[0], table, device)
    return {candidate.name: reference.certified(candidate) for candidate in candidates}


def _matches(linear_fn: LinearFn, rows: int, x_TK: Tensor, expected_TN: Tensor) -> bool:
    """Whether `linear_fn` gives `rows` rows the expected bits, at different places in the bucket."""
    return all(
        torch.equal(linear_fn(x_TK[first : first + rows].clone()), expected_TN[first : first + rows])
        for first in (0, SHIFT)
    )
