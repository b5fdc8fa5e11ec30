"""The Triton kernels that compute paged attention; `paged.py` explains how they work together, and with `tiles.py`.

The maximum by which a softmax is shifted is rounded up to an integer (scores are in units of log 2). Every rescaling is
then by a power of two and exact, so a row's sum over chunks rounds alike in every kernel. Row sums come from a matrix
product, as the values do, since the order of a reduction depends on the tile.
Shapes: M tile rows (rows x heads of a group), N keys of a step, D head size, T rows, C chunks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from draftproof.attention.triton.tiles import FAR
from draftproof.runtime.triton.pdl import begin

ONES = tl.constexpr(16)  # columns of the product that sums rows: the minimum of a matrix unit
# chunks that the combine kernel loads at once: in its main loop, in its last steps
MANY_CHUNKS = tl.constexpr(16)
FEW_CHUNKS = tl.constexpr(8)


@triton.jit
def _power(x):
    """2 to the integer `x` <= 0, exactly; 0 below the normal range."""
    return ((tl.maximum(x, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _shifted(m, m_C):
    """(the maximum including one more chunk, the scale of the sums so far, the scale of the chunk's).

    Maxima are integers, so scaling rounds only results below the normal range. That depends on the order of steps too,
    so all kernels add chunks one by one, by `_added`.
    """
    m_new = tl.maximum(m, m_C)
    return m_new, _power(m - m_new), _power(m_C - m_new)


@triton.jit
def _added(x, old, x_C, new):
    """x * old + x_C * new; the second product is not rounded."""
    return tl.fma(x_C, new, x * old)


@triton.jit
def _divided(acc, total, is_live):
    """The weighted mean of the values; zero if no key is seen.

    NaN and infinite results become NaN: which of the two it was could depend on how keys were grouped.
    """
    y = tl.math.div_rn(acc, tl.where(is_live, total, 1.0))
    y = tl.where(tl.abs(y) < float("inf"), y, float("nan"))
    return tl.where(is_live, y, 0.0)


@triton.jit
def _num_chunks(end, window, CHUNK: tl.constexpr, WINDOWED: tl.constexpr):
    """Number of chunks in which a row sees some key."""
    first = 0
    if WINDOWED:
        first = tl.maximum(end - window, 0) // CHUNK
    return (end + CHUNK - 1) // CHUNK - first


@triton.jit
def _load_tile(
    q, ends, first, count, head, window, M: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP2: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """The tile of `count` rows starting at `first`: (q_MD, row of each tile row, its head, whether it is valid, its
    end, its first key).
    """
    m = tl.arange(0, M)
    r = m // GROUP2
    g = m % GROUP2
    d = tl.arange(0, DP)
    valid_M = (r < count) & (g < GROUP)
    t_M = (first + r).to(tl.int64)
    head_M = head * GROUP + g
    end_M = tl.load(ends + t_M, mask=valid_M, other=0).to(tl.int32)
    low_M = tl.zeros((M,), tl.int32)
    if WINDOWED:
        low_M = tl.maximum(end_M - window, 0)
    at_M = (t_M * HEADS + head_M) * D
    q_MD = tl.load(q + at_M[:, None] + d[None, :], mask=valid_M[:, None] & (d < D)[None, :], other=0.0)
    return q_MD, t_M, head_M, valid_M, end_M, low_M


@triton.jit
def _keys(row_table, positions_N, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr):
    """Offsets of the cached vectors at these positions."""
    block_N = tl.load(row_table + positions_N // BLOCK_SIZE).to(tl.int64)
    return ((block_N * KV_HEADS + head) * BLOCK_SIZE + positions_N % BLOCK_SIZE) * D


@triton.jit
def _softmax(s_MN, m_M, l_MO, acc_MD):
    """Shift to the new maximum: (weights, maximum, rescaled sums so far)."""
    m_new = tl.maximum(m_M, tl.ceil(tl.max(s_MN, axis=1)))
    p_MN = tl.exp2(s_MN - tl.where(m_new == -float("inf"), 0.0, m_new)[:, None])
    a_M = _power(m_M - m_new)
    return p_MN, m_new, l_MO * a_M[:, None], acc_MD * a_M[:, None]


@triton.jit
def _nothing(M: tl.constexpr, DP: tl.constexpr):
    """The state before any keys: (maximum_M, sum [M, ONES], weighted values_MD)."""
    return (
        tl.full((M,), -float("inf"), tl.float32),
        tl.zeros((M, ONES), tl.float32),
        tl.zeros((M, DP), tl.float32),
    )


@triton.jit
def _is_broken(x):
    """Whether x is NaN or infinite."""
    return ~(tl.abs(x.to(tl.float32)) < float("inf"))


@triton.jit
def _step(
    q_MD, k, v, row_table, head, j, is_partial, end_M, low_M, bottom, limit, scale, m_M, l_MO, acc_MD,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
    ALIKE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """One step of attention, over keys j*N..j*N+N-1; `is_partial`: some row does not see all of them.

    The last result says whether a value that some row does not see may be NaN or infinite, which its weight of 0 would
    not remove. CAREFUL: such values are zeroed, and the rows that see them become NaN.
    """
    n = j * N + tl.arange(0, N)
    d = tl.arange(0, DP)
    # For keys that no row sees, the nearest visible one is read, which is cheaper than a mask; their weight is 0.
    read_N = tl.maximum(tl.minimum(n, limit - 1), bottom)
    at_ND = _keys(row_table, read_N, head, KV_HEADS, BLOCK_SIZE, D)[:, None] + d[None, :]
    if D == DP:
        k_ND = tl.load(k + at_ND)
        v_ND = tl.load(v + at_ND)
    else:
        k_ND = tl.load(k + at_ND, mask=(d < D)[None, :], other=0.0)
        v_ND = tl.load(v + at_ND, mask=(d < D)[None, :], other=0.0)
    k_ND = k_ND.to(q_MD.dtype)
    v_ND = v_ND.to(q_MD.dtype)
    s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
    is_broken = 0
    if is_partial:
        s_MN = tl.where((n[None, :] < end_M[:, None]) & (n[None, :] >= low_M[:, None]), s_MN, -float("inf"))
        if not ALIKE and not CAREFUL:
            sums_OD = tl.dot(tl.full((ONES, N), 1.0, v_ND.dtype), v_ND, input_precision="ieee")
            is_broken = tl.max(tl.max(_is_broken(sums_OD).to(tl.int32), axis=1), axis=0)
    p_MN, m_M, l_MO, acc_MD = _softmax(s_MN, m_M, l_MO, acc_MD)
    p_MN = p_MN.to(v_ND.dtype)
    l_MO = tl.dot(p_MN, tl.full((N, ONES), 1.0, v_ND.dtype), l_MO, input_precision="ieee")
    if CAREFUL:
        broken_ND = _is_broken(v_ND)
        broken_N = tl.max(broken_ND.to(tl.int32), axis=1) > 0
        seen_MN = (n[None, :] < end_M[:, None]) & (n[None, :] >= low_M[:, None])
        met_M = tl.max((seen_MN & broken_N[None, :]).to(tl.int32), axis=1) > 0
        whole_ND = tl.where(broken_ND, tl.zeros_like(v_ND), v_ND)
        acc_MD = tl.dot(p_MN, whole_ND, acc_MD, input_precision="ieee")
        acc_MD = tl.where(met_M[:, None], float("nan"), acc_MD)
    else:
        acc_MD = tl.dot(p_MN, v_ND, acc_MD, input_precision="ieee")
    return m_M, l_MO, acc_MD, is_broken


@triton.jit
def _close(
    chunk, m_C, l_C, acc_C, m_M, l_MO, acc_MD, end_M, low_M, acc_out, ml_out, at_M, valid_M,
    CHUNK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Finish a chunk: store its sums (STORE), or add them to those of the chunks before it.

    A row that saw a NaN or infinite value becomes NaN as a whole, through its sum of weights.
    """
    start = chunk * CHUNK
    d = tl.arange(0, DP)
    seen_M = (start < end_M) & (start + CHUNK > low_M)
    met_M = tl.max(_is_broken(acc_C).to(tl.int32), axis=1) > 0
    l_C = tl.where(met_M[:, None], float("nan"), l_C)
    if STORE:
        seen_M = seen_M & valid_M
        at_M = at_M + chunk
        tl.store(ml_out + at_M * 2, m_C, mask=seen_M)
        tl.store(ml_out + at_M * 2 + 1, tl.max(l_C, axis=1), mask=seen_M)
        tl.store(acc_out + at_M[:, None] * D + d[None, :], acc_C, mask=seen_M[:, None] & (d < D)[None, :])
        return m_M, l_MO, acc_MD
    m_new, old_M, new_M = _shifted(m_M, m_C)
    l_MO = tl.where(seen_M[:, None], _added(l_MO, old_M[:, None], l_C, new_M[:, None]), l_MO)
    acc_MD = tl.where(seen_M[:, None], _added(acc_MD, old_M[:, None], acc_C, new_M[:, None]), acc_MD)
    return tl.where(seen_M, m_new, m_M), l_MO, acc_MD


@triton.jit
def _advance(
    q_MD, k, v, row_table, head, j, is_partial, after, end_M, low_M, bottom, limit, scale,
    m_C, l_C, acc_C, m_M, l_MO, acc_MD, is_broken, met_M,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
    N: tl.constexpr, ALIKE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """`_step`, then add the chunk to those before it if this was its last step. met_M: rows that saw a NaN or infinite
    value.

    Writing an accumulator under a branch serialises the matrix products, so the merge is branch-free: an unfinished
    chunk is added with weight 0, and a new chunk's first step multiplies the remains of the last by 0.
    """
    m_C, l_C, acc_C, broken = _step(
        q_MD, k, v, row_table, head, j, is_partial, end_M, low_M, bottom, limit, scale,
        m_C, l_C, acc_C, KV_HEADS, BLOCK_SIZE, D, DP, N, ALIKE, CAREFUL,
    )  # fmt: skip
    ends = ((j + 1) % (CHUNK // N) == 0) | (j + 1 == after)
    if ends:
        met_M |= tl.max(_is_broken(acc_C).to(tl.int32), axis=1)
    m_new, old_M, new_M = _shifted(m_M, m_C)
    old_M = tl.where(ends, old_M, 1.0)[:, None]
    new_M = tl.where(ends, new_M, 0.0)[:, None]
    l_MO = _added(l_MO, old_M, l_C, new_M)
    acc_MD = _added(acc_MD, old_M, acc_C, new_M)
    m_M = tl.where(ends, m_new, m_M)
    m_C = tl.where(ends, -float("inf"), m_C)
    return m_C, l_C, acc_C, m_M, l_MO, acc_MD, is_broken | broken, met_M


@triton.jit
def _stream(
    q_MD, k, v, row_table, head, first, last, end_M, low_M, valid_M, scale, acc_out, ml_out, at_M,
    M: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, ALIKE: tl.constexpr, STORE: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The results of `_run`, and whether it must be repeated with CAREFUL.

    One loop goes through all chunks, so that keys are being loaded while a chunk is finished.
    """
    STEPS: tl.constexpr = CHUNK // N
    STAGES: tl.constexpr = 1 if CAREFUL else None
    m_M, l_MO, acc_MD = _nothing(M, DP)
    m_C, l_C, acc_C = _nothing(M, DP)
    limit = tl.max(end_M, axis=0)
    bottom = 0
    is_broken = 0
    after = tl.minimum(last * STEPS, (limit + N - 1) // N)
    # every row sees all keys of steps j1 to j2
    j0 = first * STEPS
    j1 = 0
    j2 = tl.min(tl.where(valid_M, end_M, FAR), axis=0) // N
    if WINDOWED:
        bottom = tl.min(tl.where(valid_M, low_M, FAR), axis=0)
        j0 = tl.maximum(j0, bottom // N)
        j1 = (tl.max(tl.where(valid_M, low_M, 0), axis=0) + N - 1) // N
    if (M >= 64) and not STORE:  # a prompt's tile: steps without a mask have a separate loop
        met_M = tl.zeros((M,), tl.int32)
        j1 = tl.minimum(tl.maximum(j1, j0), after)
        bounds = (j0, j1, tl.minimum(tl.maximum(j2, j1), after), after)
        for part in tl.static_range(0 if WINDOWED else 1, 3):
            for j in tl.range(bounds[part], bounds[part + 1], num_stages=STAGES):
                m_C, l_C, acc_C, m_M, l_MO, acc_MD, is_broken, met_M = _advance(
                    q_MD, k, v, row_table, head, j, part != 1, after, end_M, low_M, bottom, limit, scale,
                    m_C, l_C, acc_C, m_M, l_MO, acc_MD, is_broken, met_M,
                    KV_HEADS, BLOCK_SIZE, D, DP, CHUNK, N, ALIKE, CAREFUL,
                )  # fmt: skip
        l_MO = tl.where((met_M > 0)[:, None], float("nan"), l_MO)
        return m_M, l_MO, acc_MD, is_broken
    for j in tl.range(j0, after, num_stages=STAGES):
        m_C, l_C, acc_C, broken = _step(
            q_MD, k, v, row_table, head, j, (j < j1) | (j >= j2), end_M, low_M, bottom, limit, scale,
            m_C, l_C, acc_C, KV_HEADS, BLOCK_SIZE, D, DP, N, ALIKE, CAREFUL,
        )  # fmt: skip
        is_broken |= broken
        if ((j + 1) % STEPS == 0) | (j + 1 == after):
            m_M, l_MO, acc_MD = _close(
                j // STEPS, m_C, l_C, acc_C, m_M, l_MO, acc_MD, end_M, low_M, acc_out, ml_out, at_M, valid_M,
                CHUNK, D, DP, STORE,
            )  # fmt: skip
            m_C, l_C, acc_C = _nothing(M, DP)
    return m_M, l_MO, acc_MD, is_broken


@triton.jit
def _run(
    q_MD, k, v, row_table, head, first, last, end_M, low_M, valid_M, scale, acc_out, ml_out, at_M,
    M: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr, ALIKE: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Attention of a tile over chunks first..last-1, each starting from zero: their sum, or with STORE each one to
    memory.

    ALIKE: all rows of the tile see the same keys. Steps that no row sees would leave all sums unchanged.
    """
    m_M, l_MO, acc_MD, is_broken = _stream(
        q_MD, k, v, row_table, head, first, last, end_M, low_M, valid_M, scale, acc_out, ml_out, at_M,
        M, KV_HEADS, BLOCK_SIZE, D, DP, WINDOWED, CHUNK, N, ALIKE, STORE, False,
    )  # fmt: skip
    if not ALIKE:  # noqa: SIM102  known when compiling
        if is_broken > 0:
            m_M, l_MO, acc_MD, is_broken = _stream(
                q_MD, k, v, row_table, head, first, last, end_M, low_M, valid_M, scale, acc_out, ml_out, at_M,
                M, KV_HEADS, BLOCK_SIZE, D, DP, WINDOWED, CHUNK, N, ALIKE, STORE, True,
            )  # fmt: skip
    return m_M, l_MO, acc_MD


@triton.jit
def _finish(out, at_M, l_MO, acc_MD, end_M, valid_M, D: tl.constexpr, DP: tl.constexpr):
    """Store a tile's result: the weighted values divided by the sum of weights, zero for padding rows."""
    d = tl.arange(0, DP)
    live_M = end_M > 0
    y_MD = _divided(acc_MD, tl.max(l_MO, axis=1)[:, None], live_M[:, None])
    tl.store(
        out + at_M[:, None] + d[None, :],
        y_MD.to(out.dtype.element_ty),
        mask=valid_M[:, None] & (d < D)[None, :],
    )


@triton.jit(
    do_not_specialize=["rows", "width", "chunks", "window"],
    do_not_specialize_on_alignment=["table", "ends", "plan"],
)
def split_kernel(
    q, k, v, table, ends, plan, acc_out, ml_out, out, rows, width, chunks, window, scale,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP2: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WINDOWED: tl.constexpr, ALIKE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a tile and head over a run of chunks. Each chunk's result is stored, but a row with only this run is
    finished here. Programs after the last run do nothing.

    acc_out [T, HEADS, chunks, D], ml_out [T, HEADS, chunks, 2]: maximum and sum.
    """
    begin(PDL)
    tiles = tl.load(plan)
    total = tl.load(plan + 1)
    each = tl.load(plan + 2)
    i = tl.arange(0, TILES)
    # Read the whole plan at once, including its unused end, so that loads do not wait for each other.
    first_I = tl.load(plan + 3 + i).to(tl.int64)
    after_I = tl.load(plan + 4 + i)
    before_I = tl.load(plan + 4 + rows + i)
    slot_I = tl.load(plan + 4 + 2 * rows + i).to(tl.int64)
    work = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    if work >= total:
        return
    # Packed into one number, so that a single maximum selects the tile's fields: 7 bits i, 8 first row, 8 rows, 16
    # slot, 24 runs before.
    packed_I = i.to(tl.int64) << 56 | first_I << 48 | (after_I - first_I) << 40 | slot_I << 24 | before_I
    packed = tl.max(tl.where((i < tiles) & (before_I <= work), packed_I, 0), axis=0)
    first = (packed >> 48 & 255).to(tl.int32)
    count = (packed >> 40 & 255).to(tl.int32)
    slot = packed >> 24 & 65535
    chunk = (work - (packed & 0xFFFFFF).to(tl.int32)) * each
    q_MD, t_M, head_M, valid_M, end_M, low_M = _load_tile(
        q, ends, first, count, head, window, M, HEADS, GROUP, GROUP2, D, DP, WINDOWED
    )
    if WINDOWED:
        chunk += tl.min(tl.where(valid_M, low_M, FAR), axis=0) // CHUNK
    if ALIKE:  # noqa: SIM102  known when compiling
        if _num_chunks(tl.max(end_M, axis=0), window, CHUNK, WINDOWED) <= each:
            _, l_MO, acc_MD = _run(
                q_MD, k, v, table + slot * width, head, chunk, chunk + each, end_M, low_M, valid_M, scale,
                acc_out, ml_out, t_M,
                M, KV_HEADS, BLOCK_SIZE, D, DP, WINDOWED, CHUNK, N, ALIKE, False,
            )  # fmt: skip
            _finish(out, (t_M * HEADS + head_M) * D, l_MO, acc_MD, end_M, valid_M, D, DP)
            return
    _run(
        q_MD, k, v, table + slot * width, head, chunk, chunk + each, end_M, low_M, valid_M, scale,
        acc_out, ml_out, (t_M * HEADS + head_M) * chunks,
        M, KV_HEADS, BLOCK_SIZE, D, DP, WINDOWED, CHUNK, N, ALIKE, True,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["width", "window"],
    do_not_specialize_on_alignment=["table", "slots", "ends", "plan"],
)
def loop_kernel(
    q, k, v, table, slots, ends, plan, out, width, window, scale,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP2: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    WINDOWED: tl.constexpr, ALIKE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of a tile and head over all its chunks, added in the same order as in `combine_kernel`.

    The number of programs is the number of tiles with few requests; with more tiles, each program handles several.
    """
    begin(PDL)
    head = tl.program_id(1)
    tiles = tl.load(plan)
    for i in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tiles - 1 - i  # largest first: a prompt's last tiles see the most keys
        first = tl.load(plan + 3 + tile)
        slot = tl.load(slots + first)
        count = tl.load(plan + 4 + tile) - first
        q_MD, t_M, head_M, valid_M, end_M, low_M = _load_tile(
            q, ends, first, count, head, window, M, HEADS, GROUP, GROUP2, D, DP, WINDOWED
        )
        first = 0
        last = (tl.max(end_M, axis=0) + CHUNK - 1) // CHUNK
        if WINDOWED:
            first = tl.min(tl.where(valid_M, low_M, FAR), axis=0) // CHUNK
        _, l_MO, acc_MD = _run(
            q_MD, k, v, table + slot * width, head, first, last, end_M, low_M, valid_M, scale,
            out, out, t_M,
            M, KV_HEADS, BLOCK_SIZE, D, DP, WINDOWED, CHUNK, N, ALIKE, False,
        )  # fmt: skip
        _finish(out, (t_M * HEADS + head_M) * D, l_MO, acc_MD, end_M, valid_M, D, DP)


@triton.jit(do_not_specialize=["chunks", "window"], do_not_specialize_on_alignment=["ends", "plan"])
def combine_kernel(
    acc, ml, ends, plan, out, chunks, window,
    HEADS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, WINDOWED: tl.constexpr,
    ALIKE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the chunks of a row and head, first to last, in PART dimensions. A padding row (end 0) becomes zero; a row
    that is already finished is skipped.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    end = tl.load(ends + row).to(tl.int32)
    d = tl.program_id(2) * PART + tl.arange(0, PART)
    last = (end + CHUNK - 1) // CHUNK
    first = last - _num_chunks(end, window, CHUNK, WINDOWED)
    if ALIKE:  # noqa: SIM102  known when compiling
        if (end > 0) & (last - first <= tl.load(plan + 2)):
            return
    at = (row * HEADS + head) * chunks
    m = -float("inf")
    total = 0.0
    total_D = tl.zeros((PART,), tl.float32)
    # Many loads at once, then fewer and masked: 38 chunks are 2 times 16, then 6 of 8.
    middle = first + (last - first) // MANY_CHUNKS * MANY_CHUNKS
    for base in range(first, middle, MANY_CHUNKS):
        for j in tl.static_range(MANY_CHUNKS):
            c = at + base + j
            m_C = tl.load(ml + c * 2)
            l_C = tl.load(ml + c * 2 + 1)
            acc_D = tl.load(acc + c * D + d, mask=d < D, other=0.0)
            m, old, new = _shifted(m, m_C)
            total = _added(total, old, l_C, new)
            total_D = _added(total_D, old, acc_D, new)
    for base in range(middle, last, FEW_CHUNKS):
        for j in tl.static_range(FEW_CHUNKS):
            c = at + base + j
            here = base + j < last
            m_C = tl.load(ml + c * 2, mask=here, other=-float("inf"))
            l_C = tl.load(ml + c * 2 + 1, mask=here, other=0.0)
            acc_D = tl.load(acc + c * D + d, mask=here & (d < D), other=0.0)
            m_new, old, new = _shifted(m, m_C)
            m = tl.where(here, m_new, m)
            total = tl.where(here, _added(total, old, l_C, new), total)
            total_D = tl.where(here, _added(total_D, old, acc_D, new), total_D)
    y_D = _divided(total_D, total, end > 0)
    tl.store(out + (row * HEADS + head) * D + d, y_D.to(out.dtype.element_ty), mask=d < D)
