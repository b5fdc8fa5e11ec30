// log(sum(exp(row))): see reference.py.
#include "kernels/logits/normalizer.h"

extern "C" void dp_log_normalizer(const float* logits, float* out, int64_t rows, int64_t width, int64_t threads) {
    std::vector<dp::Normalizer> sums(rows);
    dp::normalizers(logits, sums.data(), rows, width, threads);
    for (int64_t r = 0; r < rows; r++) out[r] = std::log(sums[r].total) + (std::isinf(sums[r].top) ? 0.0f : sums[r].top);
}
