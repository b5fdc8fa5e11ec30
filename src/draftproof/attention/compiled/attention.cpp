// Attention over the paged cache.
//
// A work item is one kv head and a few consecutive rows of one slot. They share the loads of K and V, but every query
// has its own accumulators, with the same operations in the same order as if it were alone. Keys are processed in
// chunks of 64 from absolute position 0; a key that a row does not see never enters that row's arithmetic.
#include <algorithm>
#include <vector>

#include "attention/compiled/attention.h"
#include "attention/compiled/attention_amx.h"
#include "runtime/common.h"
#include "runtime/pool.h"

namespace {

using namespace dp;

constexpr int CHUNK = 64;
constexpr int GROUPS = CHUNK / LANES;
constexpr int MAX_QUERIES = 32;  // per work item, unless one row has more
constexpr int64_t NEIGHBOURS = 4;  // work items that a thread takes at once, if there are many
constexpr int64_t LINES_AT_ONCE = 8;  // of keys, and as many of values, prefetched between other work

// Products of queries and keys: bf16 pairs with the dot-product instruction if available, fp32 otherwise.
template <class T>
struct Dot {
    static constexpr int PER_WORD = 1;
    static uvec word(const T* p) { return (uvec)load(p); }
    static uvec word_n(const T* p, int64_t n) { return (uvec)load_n(p, n); }
    static vec::part step(vec::part acc, uvec::part k, uint32_t q) {
        return madd((vec::part)k, (vec::part)(q - uvec::part{}), acc);
    }
};

#if defined(DP_DOT)
template <>
struct Dot<bf16> {
    static constexpr int PER_WORD = 2;
    static uvec word(const bf16* p) { return read<uvec>((const uint32_t*)p); }
    static uvec word_n(const bf16* p, int64_t n) {
        bf16 buffer[2 * LANES] = {};
        std::memcpy(buffer, p, n * sizeof(bf16));
        return word(buffer);
    }
    static vec::part step(vec::part acc, uvec::part k, uint32_t q) {
        return (vec::part)_mm512_dpbf16_ps((__m512)acc, (__m512bh)k, (__m512bh)_mm512_set1_epi32((int)q));
    }
};
#endif

// keys[0..64) -> k_words[word][64]: a vector holds the same word of 16 keys.
template <class T>
void transpose_keys(const T* const* keys, int64_t head_dim, uvec* k_words, Lookahead<T>& ahead) {
    constexpr int64_t TILE = LANES * Dot<T>::PER_WORD;
    for (int g = 0; g < GROUPS; g++)
        for (int64_t d = 0; d < head_dim; d += TILE) {
            uvec tile[LANES];
            for (int i = 0; i < LANES; i++) {
                const T* p = keys[g * LANES + i] + d;
                tile[i] = head_dim - d < TILE ? Dot<T>::word_n(p, head_dim - d) : Dot<T>::word(p);
            }
            ahead.lines(LINES_AT_ONCE);
            transpose(tile);
            uvec* to = k_words + d / Dot<T>::PER_WORD * GROUPS + g;
            for (int i = 0; i < LANES; i++) to[i * GROUPS] = tile[i];
        }
}

// Number of registers of keys or values that N queries are multiplied by at a time.
constexpr int together(int n) {
    int count = 4 * PARTS;
    while (count > 1 && n * count > REGISTERS / 2) count /= 2;
    return count;
}

// Scores of N queries with 64 keys.
template <class T, int N>
void score(const uint32_t* const* q, const uvec* k_words, int64_t words, vec* const* out) {
    constexpr int P = together(N);
    for (int first = 0; first < GROUPS * PARTS; first += P) {
        const uvec::part* keys = k_words->parts + first;
        vec::part acc[N][P] = {};
        for (int64_t w = 0; w < words; w++, keys += GROUPS * PARTS)
            for (int i = 0; i < P; i++)
                for (int n = 0; n < N; n++) acc[n][i] = Dot<T>::step(acc[n][i], keys[i], q[n][w]);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < P; i++) out[n]->parts[first + i] = acc[n][i];
    }
}

// acc += sum over keys from..to of weight * value, for N queries and P registers of the head, starting at `first`.
template <int N, int P>
void weigh_parts(vec* const* acc, const float* const* weights, const vec* values, int64_t vectors, int64_t first,
                 int64_t from, int64_t to) {
    vec::part total[N][P];
    for (int n = 0; n < N; n++)
        for (int i = 0; i < P; i++) total[n][i] = acc[n]->parts[first + i];
    for (int64_t key = from; key < to; key++) {
        const vec::part* value = (values + key * vectors)->parts + first;
        for (int n = 0; n < N; n++)
            for (int i = 0; i < P; i++) total[n][i] = madd(weights[n][key] - vec::part{}, value[i], total[n][i]);
    }
    for (int n = 0; n < N; n++)
        for (int i = 0; i < P; i++) acc[n]->parts[first + i] = total[n][i];
}

template <int N>
void weigh(vec* const* acc, const float* const* weights, const vec* values, int64_t vectors, int64_t from, int64_t to) {
    constexpr int P = together(N);
    if (from >= to) return;
    int64_t i = 0;
    for (; i + P <= vectors * PARTS; i += P) weigh_parts<N, P>(acc, weights, values, vectors, i, from, to);
    for (; i < vectors * PARTS; i++) weigh_parts<N, 1>(acc, weights, values, vectors, i, from, to);
}

// One work item.
template <class T>
class Worker {
  public:
    Worker(const Queries& queries, Scratch& scratch, const Cache<T>& cache, Lookahead<T>& ahead)
        : s_(queries.shape), q_(queries), words_((s_.head_dim + Dot<T>::PER_WORD - 1) / Dot<T>::PER_WORD),
          word_vectors_((words_ + LANES - 1) / LANES), vectors_((s_.head_dim + LANES - 1) / LANES),
          cache_(cache), ahead_(ahead) {
        int64_t count = q_.count, lanes_q = (count + LANES - 1) / LANES;
        int64_t padded_words = word_vectors_ * LANES;
        uvec* at = scratch.take(padded_words * GROUPS + CHUNK * vectors_ +
                                count * (word_vectors_ + GROUPS + vectors_ + 1) + 2 * lanes_q);
        auto claim = [&](int64_t n) { return (at += n) - n; };
        k_words_ = claim(padded_words * GROUPS);
        values_ = (vec*)claim(CHUNK * vectors_);
        q_words_ = claim(count * word_vectors_);
        soft_.weights = (vec*)claim(count * GROUPS);
        soft_.acc = (vec*)claim(count * vectors_);
        soft_.totals = (vec*)claim(count);
        soft_.tops = (float*)claim(lanes_q);
        soft_.decay = (float*)claim(lanes_q);
        soft_.vectors = vectors_;
    }

    // `next`: this thread's next item, if any.
    void run(const T* q, const Queries* next, T* out) {
        read_queries(q);
        soft_.begin(q_.count);
        Range span = q_.span();
        for (int64_t base = span.from / CHUNK * CHUNK; base < span.to; base += CHUNK) {
            Range keys = {std::max<int64_t>(span.from - base, 0), std::min<int64_t>(span.to - base, CHUNK)};
            aim_ahead<CHUNK>(ahead_, q_, span, base, next);
            load_chunk(base, keys.from, keys.to);
            ahead_.lines(INT64_MAX);  // the rest loads while the scores are computed
            for (int64_t n = 0; n < q_.count; n += 4) scores(n, std::min<int64_t>(q_.count - n, 4));
            soft_.chunk(q_, base, keys);
            for (int64_t n = 0; n < q_.count; n += 4) accumulate(base, n, std::min<int64_t>(q_.count - n, 4));
        }
        finish(out);
    }

  private:
    void read_queries(const T* q) {
        for (int64_t n = 0; n < q_.count; n++)
            for (int64_t w = 0; w < word_vectors_; w++) {
                int64_t d = w * LANES * Dot<T>::PER_WORD, left = s_.head_dim - d;
                const T* from = q + q_.offset(n) + d;
                bool whole = left >= LANES * Dot<T>::PER_WORD;
                q_words_[n * word_vectors_ + w] = whole ? Dot<T>::word(from) : Dot<T>::word_n(from, left);
            }
    }

    void load_chunk(int64_t base, int64_t from, int64_t to) {
        const T* keys[CHUNK];
        const int64_t D = s_.head_dim;
        for (int64_t i = from; i < to;) {  // one block's part at a time
            int64_t offset = (base + i) % s_.block_size, at = cache_.at(q_.item, base + i);
            ahead_.lines(LINES_AT_ONCE);
            for (; i < to && offset < s_.block_size; i++, offset++, at += D) {
                keys[i] = cache_.k + at;
                vec* to_value = values_ + i * vectors_;
                for_row(
                    D, [&](int64_t d) { to_value[d / LANES] = load(cache_.v + at + d); },
                    [&](int64_t d, int64_t n) { to_value[d / LANES] = load_n(cache_.v + at + d, n); });
            }
        }
        // Places that no query sees hold some readable key; their scores are discarded.
        for (int64_t i = 0; i < from; i++) keys[i] = keys[from];
        for (int64_t i = to; i < CHUNK; i++) keys[i] = keys[from];
        transpose_keys(keys, D, k_words_, ahead_);
    }

    void scores(int64_t n, int64_t count) {
        const uint32_t* q[4];
        vec* out[4];
        for (int64_t i = 0; i < count; i++) {
            q[i] = (const uint32_t*)(q_words_ + (n + i) * word_vectors_);
            out[i] = soft_.weights + (n + i) * GROUPS;
        }
        if (count == 4) score<T, 4>(q, k_words_, words_, out);
        if (count == 3) score<T, 3>(q, k_words_, words_, out);
        if (count == 2) score<T, 2>(q, k_words_, words_, out);
        if (count == 1) score<T, 1>(q, k_words_, words_, out);
    }

    // Keys that all queries see are processed together; those before and after, which only some see, one query at a
    // time.
    void accumulate(int64_t base, int64_t n, int64_t count) {
        Range own[4], common = {0, CHUNK};
        vec* acc[4];
        const float* weights[4];
        for (int64_t i = 0; i < count; i++) {
            own[i] = q_.seen(n + i, base, CHUNK);
            acc[i] = soft_.acc + (n + i) * vectors_;
            weights[i] = (const float*)(soft_.weights + (n + i) * GROUPS);
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
        for (int64_t n = 0; n < q_.count; n++) {
            vec total = splat(sum(soft_.totals[n]));
            const vec* acc = soft_.acc + n * vectors_;
            T* to = out + q_.offset(n);
            for_row(
                s_.head_dim, [&](int64_t d) { store(to + d, acc[d / LANES] / total); },
                [&](int64_t d, int64_t left) { store_n(to + d, acc[d / LANES] / total, left); });
        }
    }

    const Shape& s_;
    const Queries& q_;
    int64_t words_, word_vectors_, vectors_;
    const Cache<T>& cache_;
    Lookahead<T>& ahead_;
    uvec *k_words_, *q_words_;
    vec* values_;
    Softmax<CHUNK> soft_;
};

template <class T>
void run_item(const Queries& queries, Scratch& scratch, const T* q, const Cache<T>& cache, Lookahead<T>& ahead,
              const Queries* next, T* out) {
    Worker<T>(queries, scratch, cache, ahead).run(q, next, out);
}

#if defined(DP_AMX)
void run_item(const Queries& queries, Scratch& scratch, const bf16* q, const Cache<bf16>& cache,
              Lookahead<bf16>& ahead, const Queries* next, bf16* out) {
    if (AmxWorker::fits(queries.shape))
        AmxWorker::run(queries, scratch, q, cache, ahead, next, out);
    else
        Worker<bf16>(queries, scratch, cache, ahead).run(q, next, out);
}
#endif

template <class T>
void run(const T* q, const Cache<T>& cache, const int64_t* ends, T* out, int64_t rows, int64_t threads) {
    const Shape& s = cache.shape;
    std::vector<Item> groups;  // work items of the first kv head
    int64_t work = 0, most = std::max<int64_t>(1, MAX_QUERIES / (s.heads / s.kv_heads));
    for (int64_t r = 0; r < rows;) {
        if (ends[r] <= 0) {
            std::memset((void*)(out + r * s.heads * s.head_dim), 0, s.heads * s.head_dim * sizeof(T));
            r++;
            continue;
        }
        int64_t last = r + 1;
        while (last < rows && last - r < most && ends[last] > 0 && cache.slots[last] == cache.slots[r]) last++;
        groups.push_back({r, last - r, 0});
        for (; r < last; r++) work += s.window > 0 ? std::min(ends[r], s.window) : ends[r];
    }
    int64_t each = groups.size(), count = each * s.kv_heads;
    int64_t members = work * s.heads * s.head_dim < 65536 ? 1 : std::min(threads, count);
    // Consecutive items belong to different requests, so that the heads of a long one are distributed over threads.
    auto item_at = [&](int64_t i) { return Item{groups[i % each].first_row, groups[i % each].num_rows, i / each}; };
    parallel_ranges(members, count, std::min(NEIGHBOURS, count / (4 * members)), [&](int64_t from, int64_t to) {
        static thread_local Scratch scratch;
        Lookahead<T> ahead(cache);
        for (int64_t i = from; i < to; i++) {
            const Item item = item_at(i), after = item_at(std::min(i + 1, to - 1));
            const Queries now(s, item, ends + item.first_row), next(s, after, ends + after.first_row);
            run_item(now, scratch, q, cache, ahead, i + 1 < to ? &next : nullptr, out);
        }
    });
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
                run((const T*)a->q, Cache<T>{shape, (const T*)a->k_cache, (const T*)a->v_cache, a->table, a->slots},
                    a->ends, (T*)a->out, a->rows, a->threads));
}
