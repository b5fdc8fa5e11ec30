"""The device half of programmatic dependent launch (PDL): a kernel starts before the one ahead of it has ended.

`launch.has_pdl` says where. A kernel launched with `launch_pdl` may start while its predecessor runs, and must wait
before it reads or writes anything that another kernel does. The predecessor is complete after the wait, and so is all
before it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """The first line of a kernel that may be launched with PDL: let the next one start, wait for the one ahead."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
