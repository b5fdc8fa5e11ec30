// A row's sampling parameters. See kernels/row_params.py.
#pragma once

#include <cstdint>

namespace dp {

constexpr int64_t PENALISED = 1, CONSTRAINED = 2, MASKED = 4;

struct RowParams {
    int64_t seed, top_k;
    float temperature, top_p, min_p, repetition, presence, frequency;
    int64_t prompt_len, flags, held_until;
};
static_assert(sizeof(RowParams) == 64, "kernels/row_params.py packs 8 int64");

}  // namespace dp
