// The sum of exp(entry - top) of rows of logits, over fixed pieces, so that one long row can use all threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/common.h"
#include "runtime/pool.h"

namespace dp {

struct Normalizer {
    float top, total;  // largest entry; sum of exp(entry - top), or of exp(entry) if top is infinite
};

inline Normalizer normalizer_of_piece(const float* x, int64_t width) {
    const vec lowest = splat(-INFINITY);
    vec tops = lowest;
    for_row(
        width, [&](int64_t i) { tops = dp::max(load(x + i), tops); },
        [&](int64_t i, int64_t n) {
            vec v = load_n(x + i, n);
            for (int64_t k = n; k < LANES; k++) v[k] = -INFINITY;
            tops = dp::max(v, tops);
        });
    float top = dp::max(tops);
    vec shift = splat(std::isinf(top) ? 0.0f : top);
    vec total = vec{};
    for_row(
        width, [&](int64_t i) { total = total + dp::exp(load(x + i) - shift); },
        [&](int64_t i, int64_t n) {
            vec e = dp::exp(load_n(x + i, n) - shift);
            for (int64_t k = n; k < LANES; k++) e[k] = 0.0f;
            total = total + e;
        });
    return {top, sum(total)};
}

inline void normalizers(const float* logits, Normalizer* out, int64_t rows, int64_t width, int64_t threads) {
    constexpr int64_t PIECE = 4096;
    int64_t pieces = (width + PIECE - 1) / PIECE;
    std::vector<Normalizer> parts(rows * pieces);
    int64_t members = team(threads, rows * width);
    parallel_items(members, rows * pieces, [&](int64_t item) {
        int64_t first = item % pieces * PIECE;
        parts[item] =
            normalizer_of_piece(logits + item / pieces * width + first, std::min(PIECE, width - first));
    });
    for (int64_t r = 0; r < rows; r++) {
        const Normalizer* row = parts.data() + r * pieces;
        float top = -INFINITY, total = 0.0f;
        for (int64_t p = 0; p < pieces; p++) top = std::max(top, row[p].top);
        float shift = std::isinf(top) ? 0.0f : top;
        for (int64_t p = 0; p < pieces; p++) {
            if (row[p].total == 0.0f) continue;  // a piece of -inf only
            float inner = std::isinf(row[p].top) ? 0.0f : row[p].top;
            total += row[p].total * dp::exp(inner - shift);
        }
        out[r] = {top, total};
    }
}

}  // namespace dp
