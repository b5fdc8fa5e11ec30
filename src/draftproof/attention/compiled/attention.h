// Shared by both versions of attention: the shape, the work item, scratch memory, and the running softmax.
#pragma once

#include <algorithm>
#include <memory>

#include "runtime/common.h"

namespace dp {

struct Shape {
    int64_t heads, kv_heads, head_dim, block_size, table_width, window;
    float scale;
};

struct Item {  // consecutive rows of one slot, one kv head
    int64_t first_row, num_rows, kv_head;
};

struct Range {
    int64_t from, to;
    bool has(int64_t i) const { return i >= from && i < to; }
};

struct Scratch {
    std::unique_ptr<uvec[]> store;
    int64_t size = 0;
    uvec* take(int64_t vectors) {
        if (size < vectors) store.reset(new uvec[size = vectors]);  // not zeroed
        return store.get();
    }
};

// The queries of an item, row by row, with the heads of a row together, and the keys that each sees.
struct Queries {
    const Shape& shape;
    const Item& item;
    const int64_t* ends;
    int64_t group, count;

    Queries(const Shape& s, const Item& i, const int64_t* e)
        : shape(s), item(i), ends(e), group(s.heads / s.kv_heads), count(i.num_rows * group) {}

    int64_t start(int64_t end) const { return shape.window > 0 && end > shape.window ? end - shape.window : 0; }

    Range seen(int64_t query, int64_t base, int64_t chunk) const {  // the keys of the chunk at `base` that a query sees
        int64_t end = ends[query / group];
        return {std::max<int64_t>(start(end) - base, 0), std::min<int64_t>(end - base, chunk)};
    }

    Range span() const {  // positions that any query sees
        Range all = {INT64_MAX, 0};
        for (int64_t r = 0; r < item.num_rows; r++)
            all = {std::min(all.from, start(ends[r])), std::max(all.to, ends[r])};
        return all;
    }

    int64_t offset(int64_t query) const {  // in q and in the output
        int64_t row = item.first_row + query / group;
        return (row * shape.heads + item.kv_head * group + query % group) * shape.head_dim;
    }
};

// The paged keys and values, each [blocks, kv_heads, block_size, head_dim], and the blocks of each slot.
template <class T>
struct Cache {
    const Shape& shape;
    const T *k, *v;
    const int32_t* table;
    const int64_t* slots;

    // Offset of an item's position in k and v. Example: blocks of 16, position 35 -> offset 3 of the slot's third
    // block.
    int64_t at(const Item& item, int64_t position) const {
        int64_t block = table[slots[item.first_row] * shape.table_width + position / shape.block_size];
        int64_t offset = position % shape.block_size;
        return ((block * shape.kv_heads + item.kv_head) * shape.block_size + offset) * shape.head_dim;
    }
};

// Prefetches keys and values, a few cache lines at a time between other work. Blocks are scattered, so the processor
// does not prefetch them itself; prefetching all at once would stall the work that is to hide the latency.
template <class T>
class Lookahead {
  public:
    explicit Lookahead(const Cache<T>& cache) : cache_(cache) {}

    // Sets the positions of an item to prefetch.
    void aim(const Item& item, Range positions) {
        item_ = item;
        positions_ = positions;
        left_ = 0;
    }

    // Prefetches `count` lines of keys and as many of values.
    void lines(int64_t count) {
        while (count > 0 && (left_ > 0 || next_block())) {
            int64_t now = std::min(count, left_);
            for (int64_t i = 0; i < now; i++) {
                __builtin_prefetch(k_ + i * LINE);
                __builtin_prefetch(v_ + i * LINE);
            }
            k_ += now * LINE;
            v_ += now * LINE;
            left_ -= now;
            count -= now;
        }
    }

  private:
    static constexpr int64_t LINE = 64;

    bool next_block() {
        if (positions_.from >= positions_.to) return false;
        const Shape& s = cache_.shape;
        int64_t keys = std::min(s.block_size - positions_.from % s.block_size, positions_.to - positions_.from);
        int64_t at = cache_.at(item_, positions_.from);
        k_ = (const char*)(cache_.k + at);
        v_ = (const char*)(cache_.v + at);
        left_ = (keys * s.head_dim * (int64_t)sizeof(T) + LINE - 1) / LINE;
        positions_.from += keys;
        return true;
    }

    const Cache<T>& cache_;
    Item item_ = {0, 0, 0};
    Range positions_ = {0, 0};
    int64_t left_ = 0;  // lines left of the current block
    const char *k_ = nullptr, *v_ = nullptr;
};

// Prefetch what follows the chunk at `base`: the item's next chunk, or the first chunk of the thread's next item.
template <int CHUNK, class T>
void aim_ahead(Lookahead<T>& ahead, const Queries& q, Range span, int64_t base, const Queries* next) {
    if (base + CHUNK < span.to) {
        ahead.aim(q.item, {base + CHUNK, std::min(base + 2 * CHUNK, span.to)});
    } else if (next) {
        Range after = next->span();
        ahead.aim(next->item, {after.from, std::min((after.from / CHUNK + 1) * CHUNK, after.to)});
    }
}

DP_INLINE ivec lanes_in(int g, Range seen) {
    ivec key = ivec(g * LANES) + numbers();
    return (key >= (int32_t)seen.from) & (key < (int32_t)seen.to);
}

// Running softmax of several queries over chunks of CHUNK keys, from absolute position 0. All arrays are per query;
// `decay` has room for a multiple of 16.
template <int CHUNK>
struct Softmax {
    static constexpr int GROUPS = CHUNK / LANES;
    vec *weights, *totals, *acc;  // GROUPS vectors; 1; `vectors` vectors
    float *tops, *decay;
    int64_t vectors;

    void begin(int64_t queries) {
        for (int64_t n = 0; n < queries; n++) {
            totals[n] = vec{};
            tops[n] = -INFINITY;
            for (int64_t v = 0; v < vectors; v++) acc[n * vectors + v] = vec{};
        }
    }

    // Turns a chunk's scores into weights exp(score - top) and rescales the sums so far to the new top. `keys`: those
    // that any query sees. A query that sees none of the chunk is unchanged, with weights 0.
    void chunk(const Queries& q, int64_t base, Range keys) {
        const int first = (int)(keys.from / LANES), last = (int)((keys.to + LANES - 1) / LANES);
        for (int64_t n = 0; n < q.count; n++) {
            Range seen = q.seen(n, base, CHUNK);
            vec* s = weights + n * GROUPS;
            vec best = splat(-INFINITY);
            for (int g = first; g < last; g++) {
                s[g] = select(lanes_in(g, seen), s[g] * splat(q.shape.scale), splat(-INFINITY));
                best = dp::max(s[g], best);
            }
            bool blind = seen.from >= seen.to;
            float top = blind ? tops[n] : std::max(tops[n], dp::max(best));
            decay[n] = blind ? 0.0f : tops[n] - top;
            tops[n] = top;
        }
        for (int64_t n = 0; n < q.count; n += LANES) store(decay + n, dp::exp(load(decay + n)));
        for (int64_t n = 0; n < q.count; n++) {
            Range seen = q.seen(n, base, CHUNK);
            vec* s = weights + n * GROUPS;
            vec factor = splat(decay[n]), top = splat(tops[n]), total = totals[n] * factor;
            for (int g = first; g < last; g++) {
                s[g] = select(lanes_in(g, seen), dp::exp(s[g] - top), vec{});
                total = total + s[g];
            }
            totals[n] = total;
            if (decay[n] != 1.0f)
                for (int64_t v = 0; v < vectors; v++) acc[n * vectors + v] = acc[n * vectors + v] * factor;
        }
    }
};

// Transposition of 16 x 16 words.
template <int SPAN>
DP_INLINE void exchange(uvec& a, uvec& b) {  // swaps the off-diagonal SPAN x SPAN blocks of two rows
    if (SPAN >= PART) {
        for (int i = 0; i < PARTS; i++)
            if (i * PART & SPAN) std::swap(a.parts[i], b.parts[i - SPAN / PART]);
        return;
    }
    ivec::part from_a, from_b;
    for (int j = 0; j < PART; j++) {
        from_a[j] = (j & SPAN) ? PART + j - SPAN : j;
        from_b[j] = (j & SPAN) ? PART + j : j + SPAN;
    }
    for (int i = 0; i < PARTS; i++) {
        uvec::part x = a.parts[i], y = b.parts[i];
#if defined(__clang__)
        for (int j = 0; j < PART; j++) {
            a.parts[i][j] = from_a[j] < PART ? x[from_a[j]] : y[from_a[j] - PART];
            b.parts[i][j] = from_b[j] < PART ? x[from_b[j]] : y[from_b[j] - PART];
        }
#else
        a.parts[i] = __builtin_shuffle(x, y, from_a);
        b.parts[i] = __builtin_shuffle(x, y, from_b);
#endif
    }
}

template <int SPAN>
DP_INLINE void exchange_all(uvec* rows) {
    for (int i = 0; i < LANES; i++)
        if (!(i & SPAN)) exchange<SPAN>(rows[i], rows[i + SPAN]);
}

DP_INLINE void transpose(uvec* rows) {
    exchange_all<1>(rows);
    exchange_all<2>(rows);
    exchange_all<4>(rows);
    exchange_all<8>(rows);
}

}  // namespace dp
