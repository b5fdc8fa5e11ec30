// Attention with AMX tiles, in bf16: scores as keys x queries straight from the cache, values in pairs of keys. A
// weight is split into two bf16 numbers, so the tiles' input type costs no accuracy.
#pragma once

#include "runtime/amx.h"
#include "attention/compiled/attention.h"

#if defined(DP_AMX)

namespace dp {

class AmxWorker {
    static constexpr int CHUNK = 256, GROUPS = CHUNK / LANES;

  public:
    // Depends on the model's shape only, so all rows take the same path.
    static bool fits(const Shape& s) { return s.head_dim % 32 == 0 && s.block_size % LANES == 0 && amx_allowed(); }

    static void run(const Queries& queries, Scratch& scratch, const bf16* q, const Cache<bf16>& cache,
                    Lookahead<bf16>& ahead, const Queries* next, bf16* out) {
        // Tiles flush subnormal numbers to zero. All other code here must do so too: otherwise adding 0, which happens
        // where a row's neighbours see more keys, could change a sum.
        unsigned before = _mm_getcsr();
        _mm_setcsr(before | 0x8040);
        if (!AmxWorker(queries, scratch, cache, ahead).all(q, next, out))
            // A value that only some rows see is not finite, and 0 * NaN would reach the others: compute each row
            // alone.
            for (int64_t r = 0; r < queries.item.num_rows; r++) {
                Item one = {queries.item.first_row + r, 1, queries.item.kv_head};
                Queries alone(queries.shape, one, queries.ends + r);
                AmxWorker(alone, scratch, cache, ahead).all(q, nullptr, out);
            }
        _tile_release();
        _mm_setcsr(before);
    }

  private:
    AmxWorker(const Queries& queries, Scratch& scratch, const Cache<bf16>& cache, Lookahead<bf16>& ahead)
        : s_(queries.shape), q_(queries), dims_(s_.head_dim), vectors_(dims_ / LANES), cache_(cache), ahead_(ahead) {
        int64_t count = q_.count;
        tile_rows_ = std::min<int64_t>(count, LANES);
        tiles_ = (count + LANES - 1) / LANES;
        int64_t padded = tiles_ * LANES;
        uvec* at = scratch.take(tiles_ * dims_ / 2 + CHUNK / 2 * vectors_ + padded * (2 * GROUPS + vectors_ + 1) + 2 * tiles_);
        auto claim = [&](int64_t n) { return (at += n) - n; };
        q_words_ = claim(tiles_ * dims_ / 2);
        v_words_ = claim(CHUNK / 2 * vectors_);
        soft_.weights = (vec*)claim(padded * GROUPS);
        soft_.acc = (vec*)claim(padded * vectors_);
        soft_.totals = (vec*)claim(padded);
        high_ = claim(padded * GROUPS / 2);
        low_ = claim(padded * GROUPS / 2);
        soft_.tops = (float*)claim(tiles_);
        soft_.decay = (float*)claim(tiles_);
        soft_.vectors = vectors_;
    }

    // Returns false, with nothing written, if the rows must be computed one by one.
    bool all(const bf16* q, const Queries* next, bf16* out) {
        // Tiles 0-3: sums, 4: weights, 5: values or queries, 6: keys or values, 7: scores.
        amx_configure({tile_rows_, tile_rows_, tile_rows_, tile_rows_, tile_rows_, 16, 16, 16});
        read_queries(q);
        soft_.begin(tiles_ * LANES);
        Range span = q_.span();
        for (int64_t base = span.from / CHUNK * CHUNK; base < span.to; base += CHUNK) {
            Range keys = {std::max<int64_t>(span.from - base, 0), std::min<int64_t>(span.to - base, CHUNK)};
            aim_ahead<CHUNK>(ahead_, q_, span, base, next);
            scores(base, keys);
            soft_.chunk(q_, base, keys);
            if (!pair_values(base, keys)) return false;
            split_weights(keys);
            accumulate(keys);
        }
        finish(out);
        return true;
    }

    void read_queries(const bf16* q) {  // [tile][word][query]
        uint32_t* words = (uint32_t*)q_words_;
        std::memset(words, 0, tiles_ * dims_ / 2 * sizeof(uvec));
        for (int64_t n = 0; n < q_.count; n++) {
            const bf16* from = q + q_.offset(n);
            uint32_t* to = words + n / LANES * (dims_ / 2) * LANES + n % LANES;
            for (int64_t w = 0; w < dims_ / 2; w++) std::memcpy(to + w * LANES, from + 2 * w, 4);
        }
    }

    // A group is 16 consecutive keys; blocks contain whole groups.
    void scores(int64_t base, Range keys) {
        for (int g = (int)(keys.from / LANES); g * LANES < keys.to; g++) {
            const bf16* k = cache_.k + cache_.at(q_.item, base + g * LANES);
            ahead_.lines(dims_ / 4);  // half of a group's keys and values
            for (int64_t t = 0; t < tiles_; t++) {
                uvec found[LANES];
                _tile_zero(7);
                for (int64_t d = 0; d < dims_; d += 32) {
                    _tile_loadd(6, k + d, dims_ * 2);
                    _tile_loadd(5, q_words_ + t * (dims_ / 2) + d / 2, 64);
                    _tile_dpbf16ps(7, 6, 5);
                }
                _tile_stored(7, found, 64);
                transpose(found);
                for (int i = 0; i < tile_rows_; i++) soft_.weights[(t * LANES + i) * GROUPS + g] = (vec)found[i];
            }
        }
    }

    // Pairs consecutive keys: word d of row j holds dimension d of keys 2j and 2j + 1, in the order of the unpack
    // instructions (`finish` undoes it). Returns false if a value that not every query sees is not finite.
    bool pair_values(int64_t base, Range keys) {
        Range common = {0, CHUNK};
        for (int64_t n = 0; n < q_.count; n += q_.group) {
            Range seen = q_.seen(n, base, CHUNK);
            common = {std::max(common.from, seen.from), std::min(common.to, seen.to)};
        }
        for (int64_t g = keys.from / 32 * 2; g * LANES < (keys.to + 31) / 32 * 32; g++) {
            uvec* to = v_words_ + g * LANES / 2 * vectors_;
            if ((g + 1) * LANES <= keys.from || g * LANES >= keys.to) {
                std::fill(to, to + LANES / 2 * vectors_, uvec{});
                continue;
            }
            const bf16* group = cache_.v + cache_.at(q_.item, base + g * LANES);
            ahead_.lines(dims_ / 4);  // half of a group's keys and values
            Range own = {keys.from - g * LANES, keys.to - g * LANES};
            Range safe = {common.from - g * LANES, common.to - g * LANES};
            for (int64_t i = 0; i < LANES; i += 2, to += vectors_) {
                for (int64_t k = i; k < i + 2; k++)
                    if (own.has(k) && !safe.has(k) && !finite(group + k * dims_)) return false;
                pair(group + i * dims_, own.has(i), own.has(i + 1), to);
            }
        }
        return true;
    }

    void pair(const bf16* first, bool has_first, bool has_second, uvec* to) const {
        const __m512i nothing = _mm512_setzero_si512();
        for (int64_t d = 0; d < dims_; d += 32, to += 2) {
            __m512i even = has_first ? _mm512_loadu_si512(first + d) : nothing;
            __m512i odd = has_second ? _mm512_loadu_si512(first + dims_ + d) : nothing;
            to[0].parts[0] = (uvec::part)_mm512_unpacklo_epi16(even, odd);
            to[1].parts[0] = (uvec::part)_mm512_unpackhi_epi16(even, odd);
        }
    }

    bool finite(const bf16* row) const {
        bool good = true;
        for (int64_t d = 0; d < dims_; d++) good &= (row[d].bits & 0x7f80) != 0x7f80;
        return good;
    }

    void split_weights(Range keys) {
        const int64_t first = keys.from / 32, last = (keys.to + 31) / 32;
        zero_outside(keys);
        for (int64_t n = 0; n < q_.count; n++)
            for (int64_t half = first; half < last; half++) {
                const vec* w = soft_.weights + n * GROUPS + 2 * half;
                __m512bh high = _mm512_cvtne2ps_pbh((__m512)w[1].parts[0], (__m512)w[0].parts[0]);
                bf16 back[2 * LANES];
                std::memcpy(back, &high, sizeof high);
                vec rest0 = w[0] - load(back), rest1 = w[1] - load(back + LANES);
                __m512bh low = _mm512_cvtne2ps_pbh((__m512)rest1.parts[0], (__m512)rest0.parts[0]);
                std::memcpy(high_[n * GROUPS / 2 + half].parts, &high, sizeof high);
                std::memcpy(low_[n * GROUPS / 2 + half].parts, &low, sizeof low);
            }
    }

    // Tiles take 32 keys, the softmax 16: zero the weights of the other half if the softmax did not write them.
    void zero_outside(Range keys) {
        int64_t before = keys.from / LANES - 1, after = (keys.to + LANES - 1) / LANES;
        for (int64_t n = 0; n < q_.count; n++) {
            if (before >= 0 && before % 2 == 0) soft_.weights[n * GROUPS + before] = vec{};
            if (after % 2) soft_.weights[n * GROUPS + after] = vec{};
        }
    }

    void accumulate(Range keys) {
        for (int64_t t = 0; t < tiles_; t++) {
            vec* acc = soft_.acc + t * LANES * vectors_;
            int64_t v = 0;
            for (; v + 4 <= vectors_; v += 4) sum_values<4>(acc + v, t, v, keys);
            for (; v < vectors_; v += 2) sum_values<2>(acc + v, t, v, keys);
        }
    }

    template <int V>
    void sum_values(vec* acc, int64_t t, int64_t v, Range keys) {
        const int64_t row = vectors_ * 64;
        _tile_loadd(0, acc, row);
        _tile_loadd(1, acc + 1, row);
        if (V == 4) {
            _tile_loadd(2, acc + 2, row);
            _tile_loadd(3, acc + 3, row);
        }
        for (int64_t half = keys.from / 32; half * 32 < keys.to; half++)
            for (const uvec* weights : {high_, low_}) {
                const uvec* values = v_words_ + half * LANES * vectors_ + v;
                _tile_loadd(4, weights + t * LANES * (GROUPS / 2) + half, GROUPS / 2 * 64);
                _tile_loadd(5, values, row);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, values + 1, row);
                _tile_dpbf16ps(1, 4, 6);
                if (V == 4) {
                    _tile_loadd(5, values + 2, row);
                    _tile_dpbf16ps(2, 4, 5);
                    _tile_loadd(6, values + 3, row);
                    _tile_dpbf16ps(3, 4, 6);
                }
            }
        _tile_stored(0, acc, row);
        _tile_stored(1, acc + 1, row);
        if (V == 4) {
            _tile_stored(2, acc + 2, row);
            _tile_stored(3, acc + 3, row);
        }
    }

    void finish(bf16* out) const {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int64_t n = 0; n < q_.count; n++) {
            vec total = splat(sum(soft_.totals[n]));
            bf16* to = out + q_.offset(n);
            const vec* acc = soft_.acc + n * vectors_;
            for (int64_t d = 0; d < dims_; d += 32, acc += 2) {
                // Adding 0 turns -0 into 0: the sign of a zero sum may depend on keys that only neighbours see.
                vec low = acc[0] / total + 0.0f, high = acc[1] / total + 0.0f;
                __m512 a = (__m512)low.parts[0], b = (__m512)high.parts[0];
                low.parts[0] = (vec::part)_mm512_permutex2var_ps(a, first, b);
                high.parts[0] = (vec::part)_mm512_permutex2var_ps(a, second, b);
                store(to + d, low);
                store(to + d + LANES, high);
            }
        }
    }

    const Shape& s_;
    const Queries& q_;
    int64_t dims_, vectors_, tile_rows_, tiles_;
    const Cache<bf16>& cache_;
    Lookahead<bf16>& ahead_;
    uvec *q_words_, *v_words_, *high_, *low_;
    Softmax<CHUNK> soft_;
};

}  // namespace dp

#endif
