"""Attention over the paged cache: the interface of backends, and the one that layers call.

Shapes: T rows, S slots, B blocks per slot, D head size; in a pass over draft blocks R blocks of J rows each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from draftproof.attention.given import GivenEmbeddings, WholeRows
from draftproof.attention.turns import Turns
from draftproof.cache.pool import KVShape, LayerKV, PagedCache, paged
from draftproof.kernels.ops import Ops


class RowAttention(Protocol):
    """Softmax attention of each row over the first `context_lens_T` positions of its slot, in the paged layout.

    Law 2: the grid of key chunks starts at absolute position 0 (with sliding windows too) and has a constant chunk
    size; chunks are computed whole, padded and masked; a fully masked chunk is an exact no-op. Keys are read from the
    cache only.
    """

    def __call__(
        self,
        q_THD: Tensor,  # [T, num_heads, D]
        k_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, D]
        v_cache: Tensor,
        block_table_SB: Tensor,  # int32
        slots_T: Tensor,  # int64
        context_lens_T: Tensor,  # int64: number of leading positions the row sees; 0 = padding, output zero
        window: int,  # the row sees only the last `window` of them; 0 = all
        scale: float,
    ) -> Tensor:
        """Returns [T, num_heads * D] in q's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Additional data for a pass over draft blocks, block after block."""

    context_lens_T: Tensor  # int64: the end of the row's block, beside the row's own in `Rows`
    rows_JR: Tensor  # int64: index of each block's first row, second row, ...


@dataclass(slots=True)
class Rows:
    """The rows of one flat pass. A padding row has position -1 and context length 0."""

    positions_T: Tensor  # int64
    slots_T: Tensor  # int64
    context_lens_T: (
        Tensor  # int64: number of leading positions the row sees; position + 1 in causal attention
    )
    block: BlockRows | None = None
    max_query_len: int = 0  # bound on consecutive rows of one slot; 0 = unknown. Affects speed only
    given: GivenEmbeddings | None = None  # embeddings that replace tokens' in rows of a draft pass

    whole: WholeRows | None = None  # rows that see beyond their position
    turns: Turns | None = None  # positions on several axes; None: rows rotate by their position

    def angles(self, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
        """(cosines and sines, the shift added to a row's position to index them; None: no shift)."""
        if self.turns is None or not spec.axes:
            return spec.cos_sin_PD, None
        return self.turns.of(spec.cos_sin_PD, spec.axes)

    def embedded(self, embedded_TH: Tensor) -> Tensor:
        """The rows' input embeddings; embedded_TH: their tokens' embeddings."""
        return embedded_TH if self.given is None else self.given.over(embedded_TH)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The constants of one attention layer.

    In a pass over draft blocks `window` counts from the block's first row, so all rows of a block see the same context;
    `causal` False: rows see their whole block.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    causal: bool = True
    eps: float = 1e-6
    cos_sin_PD: Tensor
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    v_norm_D: Tensor | None = None
    axes: tuple[int, ...] = ()  # the axis of each rotary pair, if positions have several axes; else empty


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The rows of a pass that attend in one call; fields as in `Rows`."""

    slots_T: Tensor
    context_lens_T: Tensor
    max_query_len: int = 0


class AttentionPass(Protocol):
    """Attention for the layers of one pass, with fixed rows."""

    def attend(self, q_THD: Tensor, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        """Attention of each row over its visible keys: [T, num_heads * D] in q's dtype; a padding row is zero."""
        ...


class AttentionBackend(Protocol):
    """The layout of keys and values in the cache, how they are stored, and attention over them."""

    def layout(self, shape: KVShape, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of a layer's keys, and of its values; the first dimension is blocks."""
        ...

    def store(self, ops: Ops, qkv_TX: Tensor, rows: Rows, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        """Norm and rotate q and k, and store keys and values. Returns q [T, num_heads, D]. Query heads may be left out
        of qkv_TX.
        """
        ...

    def query(self, ops: Ops, q_TX: Tensor, rows: Rows, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        """Norm and rotate q. Returns q [T, num_heads, D]; nothing is stored."""
        ...

    def plan(self, rows: QueryRows) -> AttentionPass:
        """The work shared by all calls of a pass: whatever depends on its rows alone."""
        ...


class PagedBackend(AttentionBackend):
    """A backend with the paged layout that the operators in `Ops` use. Subclasses implement `plan`."""

    def layout(self, shape: KVShape, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return paged(shape, num_blocks, block_size)

    def store(self, ops: Ops, qkv_TX: Tensor, rows: Rows, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        cos_sin_PD, shift_S = rows.angles(spec)
        return ops.rope_store(
            qkv_TX,
            rows.positions_T,
            rows.slots_T,
            cos_sin_PD,
            spec.q_norm_D,
            spec.k_norm_D,
            spec.eps,
            kv.k,
            None if kv.v is kv.k else kv.v,
            kv.block_table_SB,
            spec.v_norm_D,
            shift_S,
        )

    def query(self, ops: Ops, q_TX: Tensor, rows: Rows, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        none = kv.k[:, :0]
        cos_sin_PD, shift_S = rows.angles(spec)
        return ops.rope_store(
            q_TX,
            rows.positions_T,
            rows.slots_T,
            cos_sin_PD,
            spec.q_norm_D,
            None,
            spec.eps,
            none,
            none,
            kv.block_table_SB,
            shift_S=shift_S,
        )


@dataclass(frozen=True, slots=True)
class FunctionPass:
    """A pass whose calls share only their rows."""

    function: RowAttention
    rows: QueryRows

    def attend(self, q_THD: Tensor, spec: AttentionSpec, kv: LayerKV) -> Tensor:
        rows = self.rows
        return self.function(
            q_THD, kv.k, kv.v, kv.block_table_SB, rows.slots_T, rows.context_lens_T, spec.window, spec.scale
        )


class RowBackend(PagedBackend, RowAttention):
    """A backend that is a `RowAttention`: calls share no work."""

    def plan(self, rows: QueryRows) -> AttentionPass:
        return FunctionPass(self, rows)


@dataclass(frozen=True)
class FunctionBackend(RowBackend):
    """A backend made from a function."""

    function: RowAttention

    def __call__(self, *arguments: Any) -> Tensor:
        return self.function(*arguments)


@dataclass(slots=True)
class PagedAttention:
    """Attention as layers call it during one pass: store the pass's keys and values, then attend."""

    ops: Ops
    backend: AttentionBackend
    cache: PagedCache
    rows: Rows
    only_M: Tensor | None = None  # int64: rows that attend (all are stored); None: all
    _own: AttentionPass | None = None  # of the rows as given
    _whole: AttentionPass | None = None  # of rows that see to their block's end
    _staggered: list[AttentionPass] = field(default_factory=list)  # of the j-th row of each block
    # by a layer's window: for each number of visible positions, its rows
    _grouped: dict[int, list[tuple[int, Tensor, AttentionPass]]] = field(default_factory=dict)

    def only(self, rows_M: Tensor) -> PagedAttention:
        """Attention in which only these rows attend: results have one row for each."""
        return PagedAttention(self.ops, self.backend, self.cache, self.rows, rows_M)

    def attending(self, x: Tensor) -> Tensor:
        """The rows of x [T, ...] that attend."""
        if self.only_M is None:
            return x
        num_rows, *rest = x.shape
        return self.ops.gather(x.reshape(num_rows, -1), self.only_M).view(-1, *rest)

    def __call__(self, layer: int, qkv_TX: Tensor, spec: AttentionSpec) -> Tensor:
        """qkv_TX [T, (num_heads + 2 * num_kv_heads) * D] -> [T, num_heads * D]; no v if keys are the values."""
        q_THD = self.store(layer, qkv_TX, spec)
        block = self.rows.block
        if block is None:
            return self._attend_own(layer, q_THD, spec)
        if not spec.causal:
            return self._attend_whole(layer, q_THD, block, spec)
        return self._attend_staggered(layer, q_THD, block.rows_JR, spec)

    def store(self, layer: int, qkv_TX: Tensor, spec: AttentionSpec) -> Tensor:
        """Store keys and values. Returns q [T, num_heads, D], normed and rotated. Query heads may be left out of
        qkv_TX.
        """
        return self.backend.store(self.ops, qkv_TX, self.rows, spec, self.cache.layers[layer])

    def query(self, layer: int, q_TX: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over what is already stored: q_TX [T, num_heads * D] -> [T, num_heads * D]."""
        q_THD = self.backend.query(self.ops, q_TX, self.rows, spec, self.cache.layers[layer])
        return self._attend_own(layer, q_THD, spec)

    def _attend_own(self, layer: int, q_THD: Tensor, spec: AttentionSpec) -> Tensor:
        if self.rows.whole is not None and spec.window:
            return self._attend_grouped(layer, q_THD, self.rows.whole, spec)
        q_THD = self.attending(q_THD)
        if self._own is None:
            self._own = self.backend.plan(self._own_rows())
        return self._own.attend(q_THD, spec, self.cache.layers[layer])

    def _own_rows(self) -> QueryRows:
        rows, whole = self.rows, self.rows.whole
        seen_T = rows.context_lens_T
        if whole is not None and not whole.windows_only:
            seen_T = seen_T + whole.more_T
        if self.only_M is None:
            return QueryRows(rows.slots_T, seen_T, rows.max_query_len)
        return QueryRows(self.attending(rows.slots_T), self.attending(seen_T))

    def _attend_grouped(self, layer: int, q_THD: Tensor, whole: WholeRows, spec: AttentionSpec) -> Tensor:
        """Attention where rows of items see each other, in a layer with a window: one call per effective window
        length.
        """
        rows, out = self.rows, q_THD.new_empty(len(q_THD), spec.num_heads * spec.head_dim)
        if spec.window not in self._grouped:
            seen_T = rows.context_lens_T + whole.more_T
            self._grouped[spec.window] = [
                (window, at, self.backend.plan(QueryRows(rows.slots_T[at], seen_T[at])))
                for window, at in whole.groups(spec.window)
            ]
        for window, at, attention in self._grouped[spec.window]:
            own = replace(spec, window=window)
            out[at] = attention.attend(q_THD[at], own, self.cache.layers[layer])
        return out

    def _attend_whole(self, layer: int, q_THD: Tensor, block: BlockRows, spec: AttentionSpec) -> Tensor:
        if self._whole is None:
            rows = self.rows
            self._whole = self.backend.plan(QueryRows(rows.slots_T, block.context_lens_T, rows.max_query_len))
        if spec.window:
            spec = replace(spec, window=spec.window + len(block.rows_JR))
        return self._whole.attend(q_THD, spec, self.cache.layers[layer])

    def _attend_staggered(self, layer: int, q_THD: Tensor, rows_JR: Tensor, spec: AttentionSpec) -> Tensor:
        """A block's j-th row sees `window` positions before the block and j + 1 of the block: one call per j."""
        gather, rows = self.ops.gather, self.rows
        num_rows, *head = q_THD.shape
        if not self._staggered:
            for index_R in rows_JR.unbind():
                slots_R, context_lens_R = (
                    gather(x_T.view(-1, 1), index_R).view(-1) for x_T in (rows.slots_T, rows.context_lens_T)
                )
                self._staggered.append(self.backend.plan(QueryRows(slots_R, context_lens_R, 1)))
        outs = []
        for j, (attention, index_R) in enumerate(zip(self._staggered, rows_JR.unbind(), strict=True)):
            q_RHD = gather(q_THD.view(num_rows, -1), index_R).view(-1, *head)
            own = replace(spec, window=spec.window + j + 1) if spec.window else spec
            outs.append(attention.attend(q_RHD, own, self.cache.layers[layer]))
        return self.ops.concat(outs).view(num_rows, -1)
