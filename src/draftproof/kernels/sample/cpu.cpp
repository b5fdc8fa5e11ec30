// Law 1's `sample`: filters and Gumbel-max, one row at a time. See reference.py for what it computes.
//
// A token's score depends on that token alone, and the best (score, lowest id) does not depend on the order of the
// search, so skipping tokens that cannot win changes nothing.
#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "runtime/common.h"
#include "runtime/pool.h"
#include "kernels/row_params.h"

namespace {

using namespace dp;

typedef Lanes<double> dvec;
typedef Lanes<int64_t> lvec;

// The integer hash, identical to noise.py's.
constexpr uint32_t LANE_A = 0x9E3779B9u, LANE_B = 0x85EBCA77u;

template <class Word>
DP_INLINE Word mix(Word x) {
    x = x ^ (x >> 16);
    x = x * 0x7FEB352Du;
    x = x ^ (x >> 15);
    x = x * 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline uint32_t absorb(uint32_t start, int64_t seed, int64_t position) {
    uint32_t state = mix((uint32_t)seed ^ start);
    state = mix((state + LANE_A) ^ (uint32_t)((uint64_t)seed >> 32));
    return mix((state + LANE_A) ^ (uint32_t)position);
}

DP_INLINE bool any(ivec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask.parts[0], (__m512i)mask.parts[0]) != 0;
#else
    uint64_t word[8], all = 0;
    std::memcpy(word, &mask, sizeof word);
    for (uint64_t w : word) all |= w;
    return all != 0;
#endif
}

// log of positive normal numbers, about 1 ulp.
DP_INLINE vec log(vec x) {
    // x = m * 2^e with m in [sqrt(1/2), sqrt(2))
    ivec bits = (ivec)x - 0x3f3504f3;
    ivec e = bits >> 23;
    vec f = (vec)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    vec p = splat(7.0376836292e-2f);
    p = madd(p, f, splat(-1.1514610310e-1f));
    p = madd(p, f, splat(1.1676998740e-1f));
    p = madd(p, f, splat(-1.2420140846e-1f));
    p = madd(p, f, splat(1.4249322787e-1f));
    p = madd(p, f, splat(-1.6668057665e-1f));
    p = madd(p, f, splat(2.0000714765e-1f));
    p = madd(p, f, splat(-2.4999993993e-1f));
    p = madd(p, f, splat(3.3333331174e-1f));
    vec n = convert<vec>(e), square = f * f;
    vec rest = madd(n, splat(-2.12194440e-4f), p * f * square);
    rest = madd(square, splat(-0.5f), rest);
    return madd(n, splat(0.693359375f), f + rest);
}

DP_INLINE vec uniform(uvec bits) {  // in [2^-33, 1 - 2^-24]
    vec u = (convert<vec>(bits) + 0.5f) * 0x1p-32f;
    const vec below_one = splat(1.0f - 0x1p-24f);
    return select(u > below_one, below_one, u);
}

DP_INLINE vec gumbel(vec u) {
    vec w = 1.0f - u;
    // log(1 - u) loses digits where u is small; u / (1 - w) corrects the rounding of w.
    vec exact = -log(w) * (u / (1.0f - w));
    return -log(select(w == splat(1.0f), u, exact));
}

// An upper bound of gumbel(u): -log(1 - u) >= u, and a float's bits are a lower bound of its base-2 logarithm.
DP_INLINE vec gumbel_bound(vec u) {
    return madd(convert<vec>((ivec)u), splat(-0.69314718f * 0x1p-23f), splat(127 * 0.69314718f));
}

// One row: columns past the end read as -inf.
struct Row {
    const float* logits;
    const int64_t* ids;  // target id of each column, or null
    int64_t width;

    vec at(int64_t i) const {
        if (i + LANES <= width) return load(logits + i);
        vec v = load_n(logits + i, width - i);
        for (int64_t k = width - i; k < LANES; k++) v[k] = -INFINITY;
        return v;
    }

    int64_t id(int64_t i) const { return ids ? ids[i] : i; }

    uvec words(int64_t i) const {
        if (!ids) return (uvec)numbers() + (uint32_t)i;
        lvec wide = {};
        std::memcpy(wide.parts, ids + i, std::min<int64_t>(LANES, width - i) * sizeof(int64_t));
        return convert<uvec>(wide);
    }
};

// The largest logit; NaN if the row contains NaN.
float largest(const Row& row) {
    vec top = splat(-INFINITY);
    ivec nan = {};
    for (int64_t i = 0; i < row.width; i += LANES) {
        vec v = row.at(i);
        nan = nan | (v != v);
        top = max(v, top);
    }
    return any(nan) ? NAN : max(top);
}

int64_t greedy(const Row& row, float top) {
    int64_t best = std::numeric_limits<int64_t>::max();
    for (int64_t i = 0; i < row.width; i += LANES) {
        ivec equal = row.at(i) == splat(top);
        if (!any(equal)) continue;
        for (int64_t k = 0; k < LANES; k++)
            if (equal[k]) best = std::min(best, row.id(i + k));
        if (!row.ids) break;
    }
    return best;
}

// Sum of exp(v) over the values v >= `low`.
double mass(const float* values, int64_t count, float low) {
    dvec total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t n = std::min<int64_t>(LANES, count - i);
        vec v = n == LANES ? load(values + i) : load_n(values + i, n);
        for (int64_t k = n; k < LANES; k++) v[k] = -INFINITY;
        total = total + convert<dvec>(select(v >= splat(low), dp::exp(v), vec{}));
    }
    double sum = 0;
    for (int64_t k = 0; k < LANES; k++) sum += total[k];
    return sum;
}

// d = (logit - top) / temperature of a row, and the threshold of its filters.
struct Filter {
    std::vector<float> d;  // padded with -inf to full vectors
    std::vector<float> pick;

    Filter(const Row& row, float top, float temperature) : d((row.width + LANES - 1) / LANES * LANES) {
        for (int64_t i = 0; i < row.width; i += LANES) store(&d[i], (row.at(i) - top) / temperature);
    }

    // Collects the values in [low, high), unordered, in `pick`.
    void collect(float low, float high) {
        pick.clear();
        for (size_t i = 0; i < d.size(); i += LANES) {
            vec v = load(&d[i]);
            ivec inside = (v >= splat(low)) & (v < splat(high));
            if (!any(inside)) continue;
            for (int64_t k = 0; k < LANES; k++)
                if (inside[k]) pick.push_back(v[k]);
        }
    }

    // Calls visit() with the values >= `low` in `pick`, range by range from the largest down, until it returns true.
    template <class Visit>
    void descend(float low, Visit visit) {
        float high = INFINITY;
        for (float cut : {-2.0f, -4.0f, -8.0f, -16.0f, -INFINITY}) {
            float from = std::max(cut, low);
            collect(from, high);
            if (visit() || from == low) return;
            high = from;
        }
    }

    float kth_largest(int64_t k) {
        float value = -INFINITY;
        descend(-INFINITY, [&] {
            int64_t count = pick.size();
            if (count < k) {
                k -= count;
                return false;
            }
            std::nth_element(pick.begin(), pick.begin() + (k - 1), pick.end(), std::greater<float>());
            value = pick[k - 1];
            return true;
        });
        return value;
    }

    // The value at which the mass of the likelier tokens reaches top_p of the mass of all values >= `low`.
    float nucleus(float low, double top_p) {
        double target = top_p * mass(d.data(), d.size(), low), sum = 0;
        float value = low;
        descend(low, [&] {
            float* begin = pick.data();
            float* end = begin + pick.size();
            while (begin < end) {  // a quickselect by mass
                float pivot = begin[(end - begin) / 2];
                float* above = std::partition(begin, end, [=](float v) { return v > pivot; });
                double more = mass(begin, above - begin, -INFINITY);
                if (sum + more >= target) {
                    end = above;
                    continue;
                }
                begin = std::partition(above, end, [=](float v) { return v == pivot; });
                sum += more + mass(above, begin - above, -INFINITY);
                if (sum < target) continue;
                value = pivot;
                return true;
            }
            return false;
        });
        return value;
    }

    float threshold(int64_t top_k, float top_p, float min_p) {
        float low = min_p > 0 ? (float)std::log((double)min_p) : -INFINITY;
        if (top_k > 0 && top_k < (int64_t)d.size()) low = std::max(low, kth_largest(top_k));
        if (top_p < 1) low = std::max(low, nucleus(low, (double)top_p));
        return low;
    }
};

struct Best {
    float score = -INFINITY;
    int64_t id = -1;

    void offer(const Row& row, int64_t i, vec d, ivec keep, vec u) {
        vec score_of = d + gumbel(u);
        int64_t end = std::min<int64_t>(LANES, row.width - i);
        for (int64_t k = 0; k < end; k++) {
            if (!keep[k] || score_of[k] < score) continue;
            int64_t token = row.id(i + k);
            if (score_of[k] == score && (id < 0 || token >= id)) continue;
            score = score_of[k];
            id = token;
        }
    }
};

// argmax of d + noise over the tokens with d >= low; d_of(i) returns 16 values of d.
template <class Scaled>
int64_t gumbel_max(const Row& row, float low, int64_t seed, int64_t position, Scaled d_of) {
    const uint32_t a = absorb(LANE_A, seed, position), b = absorb(LANE_B, seed, position);
    constexpr float SLACK = 1e-3f;  // far above the rounding errors of score and bound
    Best best;
    for (int64_t i = 0; i < row.width; i += LANES) {
        vec d = d_of(i);
        vec u = uniform(mix(mix(row.words(i) ^ a) ^ b));
        ivec keep = (d >= splat(low)) & (d + gumbel_bound(u) > splat(best.score - SLACK));
        if (any(keep)) best.offer(row, i, d, keep, u);
    }
    return best.id;
}

}  // namespace

struct SampleArgs {
    const float* logits;
    const RowParams* params;
    const int64_t *positions, *ids, *failures;
    int64_t* out;
    int64_t rows, width, threads;
};

extern "C" void dp_sample(const SampleArgs* a) {
    const float* logits = a->logits;
    const int64_t *positions = a->positions, *ids = a->ids;
    int64_t *out = a->out, rows = a->rows, width = a->width, threads = a->threads;
    int64_t members = rows > 1 ? team(threads, rows * width) : 1;
    parallel(members, rows, [&](int64_t r) {
        Row row{logits + r * width, ids, width};
        const RowParams& p = a->params[r];
        float top = largest(row), t = p.temperature;
        if (!std::isfinite(top)) {
            out[r] = a->failures ? a->failures[r] : -1;
        } else if (!(t > 0)) {
            out[r] = greedy(row, top);
        } else if (p.top_k > 0 || p.top_p < 1 || p.min_p > 0) {
            Filter filter(row, top, t);
            float low = filter.threshold(p.top_k, p.top_p, p.min_p);
            out[r] = gumbel_max(row, low, p.seed, positions[r], [&](int64_t i) { return load(&filter.d[i]); });
        } else {
            out[r] = gumbel_max(row, -INFINITY, p.seed, positions[r],
                                [&](int64_t i) { return (row.at(i) - top) / t; });
        }
    });
}

// For tests: the random bits of each (row, token), uint32 in int64, as computed by noise.py's token_bits.
extern "C" void dp_token_bits(const int64_t* seeds, const int64_t* positions, const int64_t* ids, int64_t* out,
                              int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        const uint32_t a = absorb(LANE_A, seeds[r], positions[r]), b = absorb(LANE_B, seeds[r], positions[r]);
        for (int64_t i = 0; i < width; i++) out[r * width + i] = mix(mix((uint32_t)ids[i] ^ a) ^ b);
    }
}
