// Attention over the paged cache.
//
// A work item is one kv head and a few neighbouring rows of one slot: they share the loads of K and V, but every query
// has accumulators of its own that see the same operations in the same order as if it were alone. Keys are taken in
// chunks of 64 from absolute position 0; a key that a row must not see never reaches that row's arithmetic.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

using namespace dp;

constexpr int CHUNK = 64;
constexpr int GROUPS = CHUNK / LANES;
constexpr int MAX_QUERIES = 32;  // of one work item, unless one row has more

struct Shape {
    int64_t heads, kv_heads, head_dim, block_size, table_width, window;
    float scale;
};

struct Item {
    int64_t first_row, num_rows, kv_head;
};

// How queries and keys meet: bf16 pairs through the dot-product instruction where there is one, fp32 elsewhere.
template <class T>
struct Dot {
    static constexpr int PER_WORD = 1;
    static uvec word(const T* p) { return (uvec)load(p); }
    static uvec word_n(const T* p, int64_t n) { return (uvec)load_n(p, n); }
    static vec step(vec acc, vec k, uint32_t q) {
        float x;
        std::memcpy(&x, &q, 4);
        return madd(k, splat(x), acc);
    }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    static constexpr int PER_WORD = 2;
    static uvec word(const bf16* p) {
        uvec v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static uvec word_n(const bf16* p, int64_t n) {
        bf16 buffer[2 * LANES] = {};
        std::memcpy(buffer, p, n * sizeof(bf16));
        return word(buffer);
    }
    static vec step(vec acc, vec k, uint32_t q) {
        return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)k, (__m512bh)_mm512_set1_epi32((int)q));
    }
};
#endif

struct Scratch {
    std::vector<uvec> store;
    uvec* take(int64_t vectors) {
        if ((int64_t)store.size() < vectors) store.resize(vectors);
        return store.data();
    }
};

template <int SPAN>
inline void exchange(uvec& a, uvec& b) {  // swaps the off-diagonal SPAN x SPAN blocks of two rows
    ivec from_a, from_b;
    for (int j = 0; j < LANES; j++) {
        from_a[j] = (j & SPAN) ? LANES + j - SPAN : j;
        from_b[j] = (j & SPAN) ? LANES + j : j + SPAN;
    }
#if defined(__clang__)
    uvec x, y;
    for (int j = 0; j < LANES; j++) {
        x[j] = from_a[j] < LANES ? a[from_a[j]] : b[from_a[j] - LANES];
        y[j] = from_b[j] < LANES ? a[from_b[j]] : b[from_b[j] - LANES];
    }
#else
    uvec x = __builtin_shuffle(a, b, from_a), y = __builtin_shuffle(a, b, from_b);
#endif
    a = x;
    b = y;
}

template <int SPAN>
inline void exchange_all(uvec* rows) {
    for (int i = 0; i < LANES; i++)
        if (!(i & SPAN)) exchange<SPAN>(rows[i], rows[i + SPAN]);
}

inline void transpose(uvec* rows) {
    exchange_all<1>(rows);
    exchange_all<2>(rows);
    exchange_all<4>(rows);
    exchange_all<8>(rows);
}

// keys[0..64) -> k_words[word][64]: one vector holds the same word of 16 keys.
template <class T>
void transpose_keys(const T* const* keys, int64_t head_dim, uvec* k_words) {
    constexpr int64_t TILE = LANES * Dot<T>::PER_WORD;
    for (int g = 0; g < GROUPS; g++)
        for (int64_t d = 0; d < head_dim; d += TILE) {
            uvec tile[LANES];
            for (int i = 0; i < LANES; i++) {
                const T* p = keys[g * LANES + i] + d;
                tile[i] = head_dim - d < TILE ? Dot<T>::word_n(p, head_dim - d) : Dot<T>::word(p);
            }
            transpose(tile);
            uvec* to = k_words + d / Dot<T>::PER_WORD * GROUPS + g;
            for (int i = 0; i < LANES; i++) to[i * GROUPS] = tile[i];
        }
}

// Scores of N queries against 64 keys.
template <class T, int N>
void score(const uint32_t* const* q, const uvec* k_words, int64_t words, vec* const* out) {
    vec acc[N][GROUPS] = {};
    for (int64_t w = 0; w < words; w++)
        for (int g = 0; g < GROUPS; g++) {
            vec k = (vec)k_words[w * GROUPS + g];
            for (int n = 0; n < N; n++) acc[n][g] = Dot<T>::step(acc[n][g], k, q[n][w]);
        }
    for (int n = 0; n < N; n++)
        for (int g = 0; g < GROUPS; g++) out[n][g] = acc[n][g];
}

// acc += sum over keys from..to of weight * value, for N queries and V vectors of the head.
template <int N, int V>
void weigh_vectors(vec* const* acc, const float* const* weights, const vec* values, int64_t stride, int64_t from,
                   int64_t to) {
    vec total[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) total[n][v] = acc[n][v];
    for (int64_t key = from; key < to; key++)
        for (int v = 0; v < V; v++) {
            vec value = values[key * stride + v];
            for (int n = 0; n < N; n++) total[n][v] = madd(splat(weights[n][key]), value, total[n][v]);
        }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) acc[n][v] = total[n][v];
}

template <int N>
void weigh(vec* const* acc, const float* const* weights, const vec* values, int64_t vectors, int64_t from, int64_t to) {
    if (from >= to) return;
    vec* at[N];
    int64_t v = 0;
    for (; v + 4 <= vectors; v += 4) {
        for (int n = 0; n < N; n++) at[n] = acc[n] + v;
        weigh_vectors<N, 4>(at, weights, values + v, vectors, from, to);
    }
    for (; v < vectors; v++) {
        for (int n = 0; n < N; n++) at[n] = acc[n] + v;
        weigh_vectors<N, 1>(at, weights, values + v, vectors, from, to);
    }
}

struct Range {
    int64_t from, to;  // keys of the current chunk that a query sees
};

// One work item's state; queries are ordered row by row, the heads of a row together.
template <class T>
class Worker {
  public:
    Worker(const Shape& s, const Item& item, Scratch& scratch, const T* k_cache, const T* v_cache)
        : s_(s), item_(item), group_(s.heads / s.kv_heads), queries_(item.num_rows * group_),
          words_((s.head_dim + Dot<T>::PER_WORD - 1) / Dot<T>::PER_WORD),
          word_vectors_((words_ + LANES - 1) / LANES), vectors_((s.head_dim + LANES - 1) / LANES),
          k_cache_(k_cache), v_cache_(v_cache) {
        int64_t lanes_q = (queries_ + LANES - 1) / LANES;
        int64_t padded_words = word_vectors_ * LANES;
        uvec* at = scratch.take(padded_words * GROUPS + CHUNK * vectors_ +
                                queries_ * (word_vectors_ + GROUPS + vectors_ + 1) + 2 * lanes_q);
        auto claim = [&](int64_t n) { return (at += n) - n; };
        k_words_ = claim(padded_words * GROUPS);
        values_ = (vec*)claim(CHUNK * vectors_);
        q_words_ = claim(queries_ * word_vectors_);
        weights_ = (vec*)claim(queries_ * GROUPS);
        acc_ = (vec*)claim(queries_ * vectors_);
        totals_ = (vec*)claim(queries_);
        tops_ = (float*)claim(lanes_q);
        decay_ = (float*)claim(lanes_q);
    }

    void run(const T* q, const int32_t* blocks, const int64_t* ends, T* out) {
        int64_t low = INT64_MAX, high = 0;
        for (int64_t r = 0; r < item_.num_rows; r++) {
            low = std::min(low, start(ends[r]));
            high = std::max(high, ends[r]);
        }
        begin(q);
        for (int64_t base = low / CHUNK * CHUNK; base < high; base += CHUNK) {
            int64_t from = std::max<int64_t>(low - base, 0), to = std::min<int64_t>(high - base, CHUNK);
            load_chunk(blocks, base, from, to);
            for (int64_t n = 0; n < queries_; n += 4) scores(n, std::min<int64_t>(queries_ - n, 4));
            soften(ends, base);
            for (int64_t n = 0; n < queries_; n += 4) accumulate(ends, base, n, std::min<int64_t>(queries_ - n, 4));
        }
        finish(out);
    }

  private:
    int64_t start(int64_t end) const { return s_.window > 0 && end > s_.window ? end - s_.window : 0; }

    Range range(const int64_t* ends, int64_t base, int64_t query) const {
        int64_t end = ends[query / group_];
        return {std::max<int64_t>(start(end) - base, 0), std::min<int64_t>(end - base, CHUNK)};
    }

    int64_t offset(int64_t query) const {  // of a query in q and in the output
        return ((item_.first_row + query / group_) * s_.heads + item_.kv_head * group_ + query % group_) * s_.head_dim;
    }

    void begin(const T* q) {
        for (int64_t n = 0; n < queries_; n++) {
            const T* from = q + offset(n);
            for (int64_t w = 0; w < word_vectors_; w++) {
                int64_t d = w * LANES * Dot<T>::PER_WORD, left = s_.head_dim - d;
                bool whole = left >= LANES * Dot<T>::PER_WORD;
                q_words_[n * word_vectors_ + w] = whole ? Dot<T>::word(from + d) : Dot<T>::word_n(from + d, left);
            }
            for (int64_t v = 0; v < vectors_; v++) acc_[n * vectors_ + v] = vec{};
            totals_[n] = vec{};
            tops_[n] = -INFINITY;
        }
    }

    void load_chunk(const int32_t* blocks, int64_t base, int64_t from, int64_t to) {
        const T* keys[CHUNK];
        const int64_t D = s_.head_dim;
        int64_t first = 0;
        for (int64_t i = from; i < to; i++) {
            int64_t position = base + i, block = blocks[position / s_.block_size];
            int64_t at = ((block * s_.kv_heads + item_.kv_head) * s_.block_size + position % s_.block_size) * D;
            if (i == from) first = at;
            keys[i] = k_cache_ + at;
            vec* to_value = values_ + i * vectors_;
            for_row(
                D, [&](int64_t d) { to_value[d / LANES] = load(v_cache_ + at + d); },
                [&](int64_t d, int64_t n) { to_value[d / LANES] = load_n(v_cache_ + at + d, n); });
        }
        // Places nobody sees hold any readable key: their scores are thrown away.
        for (int64_t i = 0; i < from; i++) keys[i] = k_cache_ + first;
        for (int64_t i = to; i < CHUNK; i++) keys[i] = k_cache_ + first;
        transpose_keys(keys, D, k_words_);
    }

    void scores(int64_t n, int64_t count) {
        const uint32_t* q[4];
        vec* out[4];
        for (int64_t i = 0; i < count; i++) {
            q[i] = (const uint32_t*)(q_words_ + (n + i) * word_vectors_);
            out[i] = weights_ + (n + i) * GROUPS;
        }
        if (count == 4) score<T, 4>(q, k_words_, words_, out);
        if (count == 3) score<T, 3>(q, k_words_, words_, out);
        if (count == 2) score<T, 2>(q, k_words_, words_, out);
        if (count == 1) score<T, 1>(q, k_words_, words_, out);
    }

    // Scores -> weights exp(score - top), with the running top and total of each query.
    void soften(const int64_t* ends, int64_t base) {
        for (int64_t n = 0; n < queries_; n++) {
            Range seen = range(ends, base, n);
            decay_[n] = 0.0f;
            if (seen.from >= seen.to) continue;
            vec* s = weights_ + n * GROUPS;
            vec best = splat(-INFINITY);
            ivec visible[GROUPS];
            for (int g = 0; g < GROUPS; g++) {
                visible[g] = lanes(g, seen);
                s[g] = select(visible[g], s[g] * splat(s_.scale), splat(-INFINITY));
                best = dp::max(s[g], best);
            }
            float top = std::max(tops_[n], dp::max(best));
            decay_[n] = tops_[n] - top;
            tops_[n] = top;
            for (int g = 0; g < GROUPS; g++) s[g] = select(visible[g], dp::exp(s[g] - splat(top)), vec{});
        }
        for (int64_t n = 0; n < queries_; n += LANES) store(decay_ + n, dp::exp(load(decay_ + n)));
        for (int64_t n = 0; n < queries_; n++) {
            Range seen = range(ends, base, n);
            if (seen.from >= seen.to) continue;
            const vec* s = weights_ + n * GROUPS;
            vec factor = splat(decay_[n]);
            totals_[n] = totals_[n] * factor + ((s[0] + s[1]) + (s[2] + s[3]));
            for (int64_t v = 0; v < vectors_; v++) acc_[n * vectors_ + v] *= factor;
        }
    }

    static ivec lanes(int g, Range seen) {
        const ivec count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        ivec key = count + g * LANES;
        return (key >= (int32_t)seen.from) & (key < (int32_t)seen.to);
    }

    // Keys that all queries see are done together; what only some see, before and after, one query at a time.
    void accumulate(const int64_t* ends, int64_t base, int64_t n, int64_t count) {
        Range own[4], common = {0, CHUNK};
        vec* acc[4];
        const float* weights[4];
        for (int64_t i = 0; i < count; i++) {
            own[i] = range(ends, base, n + i);
            acc[i] = acc_ + (n + i) * vectors_;
            weights[i] = (const float*)(weights_ + (n + i) * GROUPS);
            common = {std::max(common.from, own[i].from), std::min(common.to, own[i].to)};
        }
        if (common.from >= common.to) common = {CHUNK, CHUNK};
        for (int64_t i = 0; i < count; i++)
            weigh<1>(acc + i, weights + i, values_, vectors_, own[i].from, std::min(own[i].to, common.from));
        if (count == 4) weigh<4>(acc, weights, values_, vectors_, common.from, common.to);
        if (count == 3) weigh<3>(acc, weights, values_, vectors_, common.from, common.to);
        if (count == 2) weigh<2>(acc, weights, values_, vectors_, common.from, common.to);
        if (count == 1) weigh<1>(acc, weights, values_, vectors_, common.from, common.to);
        for (int64_t i = 0; i < count; i++)
            weigh<1>(acc + i, weights + i, values_, vectors_, common.to, own[i].to);
    }

    void finish(T* out) {
        for (int64_t n = 0; n < queries_; n++) {
            vec total = splat(sum(totals_[n]));
            const vec* acc = acc_ + n * vectors_;
            T* to = out + offset(n);
            for_row(
                s_.head_dim, [&](int64_t d) { store(to + d, acc[d / LANES] / total); },
                [&](int64_t d, int64_t left) { store_n(to + d, acc[d / LANES] / total, left); });
        }
    }

    const Shape& s_;
    const Item& item_;
    int64_t group_, queries_, words_, word_vectors_, vectors_;
    const T *k_cache_, *v_cache_;
    uvec *k_words_, *q_words_;
    vec *values_, *weights_, *acc_, *totals_;
    float *tops_, *decay_;
};

template <class T>
void run(const T* q, const T* k_cache, const T* v_cache, const int32_t* table, const int64_t* slots,
         const int64_t* ends, T* out, int64_t rows, const Shape& s, int64_t threads) {
    std::vector<Item> items;
    int64_t work = 0, most = std::max<int64_t>(1, MAX_QUERIES / (s.heads / s.kv_heads));
    for (int64_t r = 0; r < rows;) {
        if (ends[r] <= 0) {
            std::memset((void*)(out + r * s.heads * s.head_dim), 0, s.heads * s.head_dim * sizeof(T));
            r++;
            continue;
        }
        int64_t last = r + 1;
        while (last < rows && last - r < most && ends[last] > 0 && slots[last] == slots[r]) last++;
        for (int64_t h = 0; h < s.kv_heads; h++) items.push_back({r, last - r, h});
        for (; r < last; r++) work += s.window > 0 ? std::min(ends[r], s.window) : ends[r];
    }
    int64_t count = items.size();
    int64_t members = work * s.heads * s.head_dim < 65536 ? 1 : std::min(threads, count);
#pragma omp parallel num_threads(members) if (members > 1)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) {
            const Item& item = items[i];
            const int32_t* blocks = table + slots[item.first_row] * s.table_width;
            Worker<T>(s, item, scratch, k_cache, v_cache).run(q, blocks, ends + item.first_row, out);
        }
    }
}

}  // namespace

struct AttentionArgs {
    const void *q, *k_cache, *v_cache;  // q and out [rows, heads, head_dim]; caches [blocks, kv_heads, block_size, head_dim]
    const int32_t* table;
    const int64_t *slots, *ends;
    void* out;
    int64_t rows, heads, kv_heads, head_dim, block_size, table_width, window, dtype, threads;  // window 0: none
    double scale;
};

extern "C" void dp_attention(const AttentionArgs* a) {
    Shape shape = {a->heads,       a->kv_heads, a->head_dim,    a->block_size,
                   a->table_width, a->window,   (float)a->scale};
    DP_DISPATCH(a->dtype, T,
                run((const T*)a->q, (const T*)a->k_cache, (const T*)a->v_cache, a->table, a->slots, a->ends,
                    (T*)a->out, a->rows, shape, a->threads));
}
