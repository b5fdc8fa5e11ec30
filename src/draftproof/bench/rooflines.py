"""Roofline: the minimum time of a pass, from its bytes and operations and a device's datasheet.

Costs of target passes come from `models.cost`, costs of draft rounds from the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.models.cost import Cost


@dataclass(frozen=True)
class Peaks:
    """A device's peaks per second: memory bandwidth in bytes, and sustained 16-bit operations of its matrix units."""

    bytes: float
    flops: float


H200 = Peaks(4.8e12, 790e12)
# Bytes from datasheets; H100 has H200's chip, A100 is assumed to sustain the same share of its 312 TFLOP/s.
KNOWN = {
    "H200": H200,
    "H100 80GB HBM3": Peaks(3.35e12, 790e12),
    "A100-SXM4-80GB": Peaks(2.04e12, 250e12),
    "A100-SXM4-40GB": Peaks(1.56e12, 250e12),
}


def peaks_of(device_name: str) -> Peaks | None:
    """Peaks of the GPU with this name; None if not listed."""
    return next((peaks for name, peaks in KNOWN.items() if name in device_name), None)


def seconds(cost: Cost, peaks: Peaks = H200) -> float:
    """Time for bytes or operations, whichever is longer. The tables in docs/ are for an H200."""
    return max(cost.bytes / peaks.bytes, cost.flops / peaks.flops)
