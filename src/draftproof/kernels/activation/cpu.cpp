// silu(gate) * up, gelu(gate) * up, and the soft cap on logits. See reference.py for the formulas.
#include <type_traits>

#include "runtime/common.h"
#include "runtime/pool.h"

namespace {

using namespace dp;

constexpr int64_t PIECE = 1024;  // elementwise, so pieces of a row may go to different threads

template <bool GELU>
DP_INLINE vec gate_mul(vec gate, vec up) {
    vec slope = gate;
    if (GELU) slope = 1.5957691216057308f * gate * (1.0f + 0.044715f * (gate * gate));
    return gate / (1.0f + dp::exp(-slope)) * up;
}

template <bool GELU, class T>
DP_FLAT void gate_row(const T* gate, const T* up, T* out, int64_t count) {
    for_row(
        count, [&](int64_t i) { store(out + i, gate_mul<GELU>(load(gate + i), load(up + i))); },
        [&](int64_t i, int64_t n) {
            store_n(out + i, gate_mul<GELU>(load_n(gate + i, n), load_n(up + i, n)), n);
        });
}

template <bool GELU, class T>
void run(const T* gate_up, T* out, int64_t rows, int64_t width, int64_t threads) {
    int64_t pieces = (width + PIECE - 1) / PIECE;
    int64_t members = team(threads, rows * width * 4);
    parallel_items(members, rows * pieces, [&](int64_t item) {
        int64_t row = item / pieces, first = item % pieces * PIECE;
        int64_t count = width - first < PIECE ? width - first : PIECE;
        const T* gate = gate_up + row * 2 * width + first;
        gate_row<GELU>(gate, gate + width, out + row * width + first, count);
    });
}

DP_INLINE vec tanh_of(vec u) {
    const ivec sign = (ivec)u & (int32_t)0x80000000;
    vec size = (vec)((ivec)u & 0x7fffffff), square = u * u;
    vec terms = splat(-5.70498872745e-3f);
    terms = terms * square + 2.06390887954e-2f;
    terms = terms * square - 5.37397155531e-2f;
    terms = terms * square + 1.33314422036e-1f;
    terms = terms * square - 3.33332819422e-1f;
    vec e = dp::exp(-2.0f * size);
    vec large = (vec)((ivec)((1.0f - e) / (1.0f + e)) | sign);
    return select(size < 0.625f, u + u * square * terms, large);
}

}  // namespace

struct GateMulArgs {
    const void* gate_up;
    void* out;
    int64_t rows, width, dtype, gelu, threads;
};

extern "C" void dp_gate_mul(const GateMulArgs* a) {
    auto with = [&](auto gelu) {
        DP_DISPATCH(a->dtype, T,
                    run<decltype(gelu)::value>((const T*)a->gate_up, (T*)a->out, a->rows, a->width, a->threads));
    };
    if (a->gelu)
        with(std::true_type{});
    else
        with(std::false_type{});
}

struct SoftCapArgs {
    const float* logits;
    float* out;
    int64_t count, threads;
    double cap;
};

extern "C" void dp_soft_cap(const SoftCapArgs* a) {
    const float cap = (float)a->cap;
    int64_t pieces = (a->count + PIECE - 1) / PIECE, members = team(a->threads, a->count);
    parallel_items(members, pieces, [&](int64_t piece) {
        int64_t first = piece * PIECE, count = a->count - first < PIECE ? a->count - first : PIECE;
        const float* x = a->logits + first;
        float* to = a->out + first;
        for_row(
            count, [&](int64_t i) { store(to + i, cap * tanh_of(load(x + i) / cap)); },
            [&](int64_t i, int64_t n) { store_n(to + i, cap * tanh_of(load_n(x + i, n) / cap), n); });
    });
}
