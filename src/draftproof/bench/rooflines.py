"""The least time that a pass can take: its bytes and its arithmetic on a machine's datasheet.

What a target's pass costs is counted by `models.cost`, what a drafter's round costs by the drafter itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.models.cost import Cost


@dataclass(frozen=True)
class Peaks:
    """A device in 16-bit arithmetic: what its memory delivers and what its matrix units sustain, a second."""

    bytes: float
    flops: float


H200 = Peaks(4.8e12, 790e12)
# Bytes from datasheets; H100 has H200's chip, A100's units sustain the same share of their 312 TFLOP/s.
KNOWN = {
    "H200": H200,
    "H100 80GB HBM3": Peaks(3.35e12, 790e12),
    "A100-SXM4-80GB": Peaks(2.04e12, 250e12),
    "A100-SXM4-40GB": Peaks(1.56e12, 250e12),
}


def peaks_of(device_name: str) -> Peaks | None:
    """Peaks of the GPU that calls itself so; None where nobody has written them down."""
    return next((peaks for name, peaks in KNOWN.items() if name in device_name), None)


def seconds(cost: Cost, peaks: Peaks = H200) -> float:
    """Bytes or arithmetic, whichever takes longer. The tables in docs/ are of an H200."""
    return max(cost.bytes / peaks.bytes, cost.flops / peaks.flops)
