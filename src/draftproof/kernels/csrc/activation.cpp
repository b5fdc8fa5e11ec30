// silu(gate) * up.
#include "common.h"

namespace {

using namespace dp;

inline vec silu_mul(vec gate, vec up) { return gate / (1.0f + dp::exp(-gate)) * up; }

template <class T>
void run(const T* gate_up, T* out, int64_t rows, int64_t width, int64_t threads) {
    // Elementwise, so pieces of a row may go to different threads.
    constexpr int64_t PIECE = 1024;
    int64_t pieces = (width + PIECE - 1) / PIECE;
    int64_t members = team(threads, rows * width * 4);
#pragma omp parallel for num_threads(members) if (members > 1)
    for (int64_t item = 0; item < rows * pieces; item++) {
        int64_t row = item / pieces, first = item % pieces * PIECE;
        int64_t count = width - first < PIECE ? width - first : PIECE;
        const T* gate = gate_up + row * 2 * width + first;
        const T* up = gate + width;
        T* to = out + row * width + first;
        for_row(
            count, [&](int64_t i) { store(to + i, silu_mul(load(gate + i), load(up + i))); },
            [&](int64_t i, int64_t n) { store_n(to + i, silu_mul(load_n(gate + i, n), load_n(up + i, n)), n); });
    }
}

}  // namespace

struct SiluMulArgs {
    const void* gate_up;
    void* out;
    int64_t rows, width, dtype, threads;
};

extern "C" void dp_silu_mul(const SiluMulArgs* a) {
    DP_DISPATCH(a->dtype, T, run((const T*)a->gate_up, (T*)a->out, a->rows, a->width, a->threads));
}
