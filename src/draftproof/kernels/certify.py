"""Certificates: at which numbers of rows a way of multiplying gives a row the reference's bits.

Random data hides a change of order: most sums round to the same number. Here every sum cancels, so what is left *is*
the rounding of the partial sums, and any other order gives other bits. `prove_power` shows that it does.
Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.kernels.products import Form, Way

BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (1024, 2048)  # on a GPU, whose matrix units are not filled by fewer
REFERENCE_ROWS = (8, 64)
SEEDS = (11, 12)
LARGE = 1 << 26  # weight elements from which on one seed has to do
SHIFT = 3  # rows are also checked from this one on, so that none keeps its place in the bucket
SPREAD = 6  # inputs differ in size by up to 2^12, so that short sums round too
MIN_POWER = 0.05  # share of the sums that a changed order must change; on random data it is 0.0002 in bf16
PERIOD = 256  # rows of the test weight that differ; more would only take time


class NoPowerError(RuntimeError):
    """The test data does not see a change of order, so a certificate would mean nothing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a certificate is about: a weight [outputs, inputs]."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool

    def key(self) -> str:
        names = [str(d).removeprefix("torch.") for d in (self.dtype, self.out_dtype)]
        return f"{self.outputs}x{self.inputs} {names[0]}>{names[1]}{' bias' if self.bias else ''}"


def buckets_up_to(max_rows: int, device: torch.device) -> tuple[int, ...]:
    """The numbers of rows worth a certificate; the last covers `max_rows` if the table reaches that far."""
    table = BUCKETS if device.type == "cpu" else (*BUCKETS, *PROMPT_BUCKETS)
    kept = [rows for rows in table if rows < max_rows]
    return (*kept, *[rows for rows in table if rows >= max_rows][:1])


def cancelling(rows: int, shape: Shape, seed: int) -> tuple[Tensor, Tensor]:
    """x [rows, K] and weight [N, K] whose products cancel in pairs, scattered over K, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    half = shape.inputs // 2
    scale_K = 2.0 ** torch.randint(-SPREAD, SPREAD + 1, (half,), generator=generator)
    x_TK = torch.randn(rows, half, generator=generator) * scale_K
    weight_NK = torch.randn(min(shape.outputs, PERIOD), half, generator=generator)
    order_K = torch.randperm(shape.inputs, generator=generator)
    first, second = order_K[:half], order_K[half : 2 * half]
    x, weight = torch.zeros(rows, shape.inputs), torch.zeros(weight_NK.shape[0], shape.inputs)
    x[:, first], x[:, second] = x_TK, x_TK
    weight[:, first], weight[:, second] = weight_NK, -weight_NK
    weight = weight.to(shape.dtype).repeat(-(-shape.outputs // PERIOD), 1)[: shape.outputs]
    return x.to(shape.dtype), weight.contiguous()


def prove_power(shape: Shape, seed: int) -> None:
    """Raise NoPowerError unless splitting K in two changes many sums of the data of `seed`.

    Both twins add one product at a time in fp32; they differ in nothing but the split.
    """
    if shape.inputs < 16:
        return  # so short a sum may round alike in any order; there is nothing to split either
    x_TK, weight_NK = cancelling(REFERENCE_ROWS[0], dataclasses.replace(shape, outputs=PERIOD), seed)
    x_TK, weight_NK = x_TK.float(), weight_NK.float()
    half = shape.inputs // 2
    whole = _in_order(x_TK, weight_NK)
    split = _in_order(x_TK[:, :half], weight_NK[:, :half]) + _in_order(x_TK[:, half:], weight_NK[:, half:])
    changed = (whole.to(shape.out_dtype) != split.to(shape.out_dtype)).float().mean().item()
    if changed < MIN_POWER:
        raise NoPowerError(
            f"{shape.key()}: a product split over K goes unseen, only {changed:.2%} of sums changed"
        )


def _in_order(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T, one input after the other."""
    total_TN = torch.zeros(x_TK.shape[0], weight_NK.shape[0])
    for x_T, weight_N in zip(x_TK.T.contiguous(), weight_NK.T.contiguous(), strict=True):
        total_TN += x_T[:, None] * weight_N
    return total_TN


def certify(
    shape: Shape, ways: Sequence[Way], max_rows: int, device: torch.device
) -> dict[str, tuple[int, ...]]:
    """The certified buckets of each way, by name. The first way is the reference, at 1 thread."""
    buckets = buckets_up_to(max_rows, device)
    best: dict[str, tuple[int, ...]] = {}
    seeds = SEEDS if shape.outputs * shape.inputs < LARGE else SEEDS[:1]
    for reference_rows in REFERENCE_ROWS[:1] if ways[0].any_rows else REFERENCE_ROWS:
        found = {way.name: buckets for way in ways}
        for seed in seeds:
            found = _certify_seed(shape, ways, found, reference_rows, seed, device)
        # The reference that leaves its own way most buckets (mostly the small ones) is kept; this is no race.
        if not best or len(found[ways[0].name]) > len(best[ways[0].name]):
            best = found
    return best


def _certify_seed(
    shape: Shape,
    ways: Sequence[Way],
    candidates: dict[str, tuple[int, ...]],
    reference_rows: int,
    seed: int,
    device: torch.device,
) -> dict[str, tuple[int, ...]]:
    """The buckets of `candidates` that give the reference's bits on the data of `seed`."""
    prove_power(shape, seed)
    most = max((max(b, default=0) for b in candidates.values()), default=0)
    rows = -(-(most + SHIFT) // reference_rows) * reference_rows
    x_TK, weight_NK = (t.to(device) for t in cancelling(rows, shape, seed))
    bias_N = torch.linspace(-1e-5, 1e-5, shape.outputs, device=device).to(shape.dtype) if shape.bias else None
    forms = {way.name: way.make(weight_NK, bias_N, shape.out_dtype) for way in ways if candidates[way.name]}
    del weight_NK
    reference = forms.get(ways[0].name)
    if reference is None:
        return candidates
    with threads(1):
        expected_TN = torch.cat([reference(part) for part in x_TK.split(reference_rows)])
    return {
        name: tuple(rows for rows in buckets if _matches(forms[name], rows, x_TK, expected_TN))
        for name, buckets in candidates.items()
    }


def _matches(form: Form, rows: int, x_TK: Tensor, expected_TN: Tensor) -> bool:
    """Whether `form` gives `rows` rows the expected bits, wherever in the bucket a row stands."""
    return all(
        torch.equal(form(x_TK[first : first + rows].clone()), expected_TN[first : first + rows])
        for first in (0, SHIFT)
    )


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch and the library on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
