"""The device half of programmatic dependent launch (PDL): a kernel starts before its predecessor has ended.

`launch.has_pdl` says where it is available. A kernel launched with `launch_pdl` may start while its predecessor runs,
and must wait before it reads or writes anything that another kernel accesses. After the wait, the predecessor and all
kernels before it are complete.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """The first line of a kernel that may be launched with PDL: let the next kernel start, then wait for the
    predecessor.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
