"""The operators a target pass is made of, chosen once per process and handed on as an argument.

Every operator is row-safe (law 2): a row's output depends in every bit on that row's inputs only, not on how many
rows share the call, nor on the number of threads. Each has a torch twin and a compiled version (csrc/) with one
signature in a file of this folder, and a Triton version in gpu/; `select` picks.

Shapes: T rows, H width, I intermediate, V vocabulary, S slots or parts of a sum, B blocks per slot, D head size, M
logits rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from draftproof.kernels import (
    activation,
    experts,
    gpu,
    logits,
    lookup,
    native,
    norm,
    process,
    rope,
    rows,
    sample,
    step,
)
from draftproof.kernels.experts import ExpertOps
from draftproof.kernels.row_params import RowParams
from draftproof.kernels.step import StepOps
from draftproof.kernels.step_compiled import CompiledStep


class RMSNorm(Protocol):
    def __call__(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight, computed in fp32, returned in x's dtype."""
        ...


class AddRMSNorm(Protocol):
    def __call__(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """residual' = x + residual (rounded to x's dtype); returns (rms_norm(residual'), residual'), both new.

        x_TH may be what `PackedLinear.partial_sums` gives: fp32 parts [S, T, H], which are added first to last and
        rounded to the residual's dtype. weight_H is a model's: on a GPU it may be read before the kernel ahead is
        through.
        """
        ...


class RopeStore(Protocol):
    def __call__(
        self,
        qkv_TX: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * D], contiguous; no v where there is no v_cache
        positions_T: Tensor,  # int64; -1 = padding: nothing is stored, q is zero
        slots_T: Tensor,  # int64: row of the block table
        cos_sin_PD: Tensor,  # fp32 [max_position, rotary_dim]: cos of each pair, then sin of each pair
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, D], the pool's dtype
        v_cache: Tensor | None,
        block_table_SB: Tensor,  # int32
        v_norm_D: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate q and k (half-split pairs: i with i + rotary_dim/2), store k and v; q [T, heads, D].

        A cache of no heads: qkv_TX is q alone, and nothing is stored.
        """
        ...


class GateMul(Protocol):
    def __call__(self, gate_up_TI2: Tensor) -> Tensor:
        """act(x[:, :I]) * x[:, I:] in fp32, returned in x's dtype: [T, I]. act: silu, or gelu by its tanh formula."""
        ...


class SoftCap(Protocol):
    def __call__(self, logits_MV: Tensor, cap: float) -> Tensor:
        """cap * tanh(logits / cap): fp32 [M, V], new."""
        ...


class Gather(Protocol):
    def __call__(self, table_VH: Tensor, index_T: Tensor) -> Tensor:
        """table[index]: [T, H]; index int64, a negative one (no token) reads row 0."""
        ...


class Concat(Protocol):
    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Matrices of equally many rows side by side."""
        ...


class Swap(Protocol):
    def __call__(self, x_AX: Tensor, num: int) -> Tensor:
        """[A, num * W] -> [num * A, W]: the first part of every row, then the second of every row, and so on."""
        ...


class Sample(Protocol):
    def __call__(
        self,
        logits_MV: Tensor,  # fp32, processed except for temperature and filters
        params: RowParams,
        positions_M: Tensor,  # int64: position of the token that is sampled
        ids_V: Tensor | None,  # int64: target id of each column (reduced draft vocabulary), None = identity
        failures_M: Tensor | None = None,  # int64: in place of a token where a row has no number; None: -1
    ) -> Tensor:
        """Law 1: the token is a function of its row. Returns int64 [M] target ids."""
        ...


class Process(Protocol):
    def __call__(
        self,
        logits_MV: Tensor,  # fp32, left as it is
        params: RowParams,
        slots_M: Tensor,  # int64
        positions_M: Tensor,  # int64: the position that each row samples
        tokens_SL: Tensor,  # int32: known tokens, then the drafts being verified
        lists_SN: Tensor,  # int32: see kernels/process.py
        masks_MW: Tensor,  # int32: a bit an id, of each row, read where its request is `MASKED`; there may be more rows
    ) -> tuple[Tensor, Tensor]:
        """(the logits after everything but temperature and filters, new; why a row will have no token, int64 [M]: its
        logits were no numbers, or were and the request rules every token out)."""
        ...


class Lookup(Protocol):
    def __call__(
        self,
        tokens_SL: Tensor,  # int32, of every slot
        length_S: Tensor,  # int64: how many of them are known
        slots_R: Tensor,  # int64
        k_R: Tensor,  # int64: drafts wanted
        num_drafts: int,
        shortest: int,
        longest: int,
    ) -> tuple[Tensor, Tensor]:
        """What followed the longest suffix, of `shortest` to `longest` tokens, where it occurred last before: int64
        tokens_RK, 0 beyond count_R, which is at most k_R and 0 where there was no match.

        Example: tokens a b c a b, longest 2: the suffix (a b) occurred at 0, what followed is c a b.
        """
        ...


class LogNormalizer(Protocol):
    def __call__(self, logits_MV: Tensor) -> Tensor:
        """log(sum(exp(logits))) per row, fp32 [M]."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each operator."""

    name: str
    rms_norm: RMSNorm
    add_rms_norm: AddRMSNorm
    rope_store: RopeStore
    silu_mul: GateMul
    gelu_mul: GateMul
    gather: Gather
    concat: Concat
    swap: Swap
    sample: Sample
    process: Process
    log_normalizer: LogNormalizer
    soft_cap: SoftCap
    lookup: Lookup
    step: StepOps
    experts: ExpertOps


TORCH = Ops(
    name="torch",
    rms_norm=norm.rms_norm_torch,
    add_rms_norm=norm.add_rms_norm_torch,
    rope_store=rope.rope_store_torch,
    silu_mul=activation.silu_mul_torch,
    gelu_mul=activation.gelu_mul_torch,
    gather=rows.gather_torch,
    concat=rows.concat_torch,
    swap=rows.swap_torch,
    sample=sample.sample_torch,
    process=process.process_torch,
    log_normalizer=logits.log_normalizer_torch,
    soft_cap=activation.soft_cap_torch,
    lookup=lookup.lookup_torch,
    step=step.TORCH_STEP,
    experts=experts.TORCH_EXPERTS,
)


def select(device: torch.device, library: native.Library | None) -> Ops:
    """The fastest operators for `device`; `library` None (no compiler, or not wanted) means torch twins."""
    return next(iter(versions(device, library).values()))


def versions(device: torch.device, library: native.Library | None) -> dict[str, Ops]:
    """The operators that run on `device`, by name, in order of speed. A GPU has none to fall back to: torch's
    reductions and sorts choose their layout from the number of rows there."""
    if gpu.available(device):
        return {"triton": triton_ops()}
    if device.type != "cpu" or library is None:
        return {TORCH.name: TORCH}
    return {"compiled": compiled_ops(library), TORCH.name: TORCH}


def compiled_ops(library: native.Library) -> Ops:
    """The operators in C++."""
    norms = norm.NormsCompiled(library)
    return Ops(
        name="compiled",
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        rope_store=rope.RopeStoreCompiled(library),
        silu_mul=activation.GateMulCompiled(library, gelu=False),
        gelu_mul=activation.GateMulCompiled(library, gelu=True),
        gather=rows.GatherCompiled(library),
        concat=rows.ConcatCompiled(library),
        swap=rows.SwapCompiled(library),
        sample=sample.SampleCompiled(library),
        process=process.ProcessCompiled(library),
        log_normalizer=logits.LogNormalizerCompiled(library),
        soft_cap=activation.SoftCapCompiled(library),
        lookup=lookup.LookupCompiled(library),
        step=CompiledStep(library),
        experts=experts.CompiledExperts(library),
    )


def triton_ops() -> Ops:
    """The operators in Triton; needs triton. `swap`, which only copies and is rare, keeps to torch."""
    from draftproof.kernels.gpu import (
        activation,
        experts,
        logits,
        lookup,
        norm,
        process,
        rope,
        rows,
        sample,
        step,
    )

    return replace(
        TORCH,
        name="triton",
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        rope_store=rope.rope_store,
        silu_mul=activation.silu_mul,
        gelu_mul=activation.gelu_mul,
        gather=rows.gather,
        concat=rows.concat,
        sample=sample.sample,
        process=process.process,
        log_normalizer=logits.log_normalizer,
        soft_cap=activation.soft_cap,
        lookup=lookup.lookup,
        step=step.TritonStep(),
        experts=experts.TritonExperts(),
    )
