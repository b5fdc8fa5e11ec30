// RMS norm, alone and after a residual addition.
#include "runtime/common.h"
#include "runtime/pool.h"

namespace {

using namespace dp;

template <class T>
float sum_of_squares(const T* x, int64_t width) {
    vec total[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            vec v = load(x + i + k * LANES);
            total[k] = madd(v, v, total[k]);
        }
    for (; i < width; i += LANES) {
        vec v = width - i < LANES ? load_n(x + i, width - i) : load(x + i);
        total[0] = madd(v, v, total[0]);
    }
    return sum((total[0] + total[1]) + (total[2] + total[3]));
}

template <class T, class W>
void norm_row(const T* x, const W* weight, T* out, int64_t width, float eps) {
    vec scale = splat(1.0f / std::sqrt(sum_of_squares(x, width) / (float)width + eps));
    for_row(
        width, [&](int64_t i) { store(out + i, load(x + i) * scale * load(weight + i)); },
        [&](int64_t i, int64_t n) { store_n(out + i, load_n(x + i, n) * scale * load_n(weight + i, n), n); });
}

template <class T>
void add_row(const T* x, const T* y, T* out, int64_t width) {
    for_row(
        width, [&](int64_t i) { store(out + i, load(x + i) + load(y + i)); },
        [&](int64_t i, int64_t n) { store_n(out + i, load_n(x + i, n) + load_n(y + i, n), n); });
}

// If residual and sum are null, the plain norm.
template <class T, class W>
void run(const T* x, const T* residual, const W* weight, T* out, T* sum, int64_t rows, int64_t width, float eps,
         int64_t threads) {
    int64_t members = team(threads, rows * width);
    parallel_items(members, rows, [&](int64_t r) {
        const T* from = x + r * width;
        if (residual) {
            add_row(from, residual + r * width, sum + r * width, width);
            from = sum + r * width;
        }
        norm_row(from, weight, out + r * width, width, eps);
    });
}

}  // namespace

struct NormArgs {
    const void *x, *residual, *weight;
    void *out, *sum;
    int64_t rows, width, dtype, weight_dtype, threads;
    double eps;
};

extern "C" void dp_norm(const NormArgs* a) {
    DP_DISPATCH(a->dtype, T, DP_DISPATCH(a->weight_dtype, W,
                                         run((const T*)a->x, (const T*)a->residual, (const W*)a->weight, (T*)a->out,
                                             (T*)a->sum, a->rows, a->width, (float)a->eps, a->threads)));
}
