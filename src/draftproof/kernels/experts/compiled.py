"""The operators of a mixture of experts in C++.

Shapes as in kernels/experts/spec.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.kernels.experts.reference import TORCH_EXPERTS
from draftproof.kernels.experts.spec import Routing
from draftproof.runtime.native import DTYPE_CODES, Library


class CompiledExperts:
    """`ExpertOps` in C++; unsupported dtypes use the torch reference."""

    def __init__(self, library: Library) -> None:
        self._route, self._pack_route = library.packed("dp_route", "4P8qd")
        self._group, self._pack_group = library.packed("dp_group", "4P3q")
        self._combine, self._pack_combine = library.packed("dp_combine", "5P5q")

    def route(self, logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """See `ExpertOps`."""
        assert logits_TE.dtype == torch.float32 and (bias_E is None or bias_E.dtype == torch.float32)
        logits_TE = logits_TE.contiguous()
        rows, num_experts = logits_TE.shape
        experts_TK = torch.empty((rows, routing.top_k), dtype=torch.int64)
        weights_TK = torch.empty((rows, routing.top_k), dtype=torch.float32)
        args = self._pack_route(
            logits_TE.data_ptr(),
            0 if bias_E is None else bias_E.data_ptr(),
            experts_TK.data_ptr(),
            weights_TK.data_ptr(),
            rows,
            num_experts,
            routing.top_k,
            routing.sigmoid,
            routing.normalize,
            routing.groups,
            routing.top_groups,
            torch.get_num_threads(),
            routing.scale,
        )
        self._route(args)
        return experts_TK, weights_TK

    def group(self, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `ExpertOps`."""
        pairs = experts_TK.numel()
        top_k = experts_TK.shape[1]
        source_P = torch.empty(pairs, dtype=torch.int64)
        place_TK = torch.empty_like(experts_TK)
        starts_E1 = torch.empty(num_experts + 1, dtype=torch.int64)
        tensors = (experts_TK, source_P, place_TK, starts_E1)
        args = self._pack_group(*(t.data_ptr() for t in tensors), pairs, top_k, num_experts)
        self._group(args)
        return source_P, place_TK, starts_E1

    def combine(
        self, y_PH: Tensor, place_TK: Tensor, weights_TK: Tensor, base_TH: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See `ExpertOps`."""
        code = DTYPE_CODES.get(dtype)
        if code is None or (base_TH is not None and base_TH.dtype != dtype):
            return TORCH_EXPERTS.combine(y_PH, place_TK, weights_TK, base_TH, dtype)
        assert y_PH.dtype == torch.float32
        y_PH = y_PH.contiguous()
        base_TH = None if base_TH is None else base_TH.contiguous()
        rows, top_k = place_TK.shape
        width = y_PH.shape[1]
        out_TH = torch.empty((rows, width), dtype=dtype)
        args = self._pack_combine(
            y_PH.data_ptr(),
            place_TK.data_ptr(),
            weights_TK.data_ptr(),
            0 if base_TH is None else base_TH.data_ptr(),
            out_TH.data_ptr(),
            rows,
            top_k,
            width,
            code,
            torch.get_num_threads(),
        )
        self._combine(args)
        return out_TH
