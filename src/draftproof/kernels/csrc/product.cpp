// x @ weight.T with bf16 inputs and fp32 outputs straight from the accumulator.
//
// Every output is one chain over K in order, two inputs a step, whatever tile it falls in: exact by construction.
// Packed weights: tiles of 32 outputs; a tile holds, for each pair of inputs, the pair of each of its outputs.
#include <algorithm>
#include <vector>

#include "common.h"

namespace {

using namespace dp;

constexpr int64_t TILE = 2 * LANES;
constexpr int64_t ROWS = 8;  // rows that share one reading of a tile

inline vec step(vec acc, uvec weights, uint32_t pair) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    uint32_t low = pair << 16, high = pair & 0xffff0000u;
    float even, odd;
    std::memcpy(&even, &low, 4);
    std::memcpy(&odd, &high, 4);
    acc = madd((vec)(weights << 16), splat(even), acc);
    return madd((vec)(weights & 0xffff0000u), splat(odd), acc);
#endif
}

template <int R>
void tile_rows(const uvec* weights, const uint32_t* x, int64_t pairs, int64_t x_stride, vec (*out)[2]) {
    vec acc[R][2] = {};
    for (int64_t k = 0; k < pairs; k++) {
        __builtin_prefetch(weights + 2 * k + 32);
        __builtin_prefetch(weights + 2 * k + 33);
        uvec w0 = weights[2 * k], w1 = weights[2 * k + 1];
        for (int r = 0; r < R; r++) {
            uint32_t pair = x[r * x_stride + k];
            acc[r][0] = step(acc[r][0], w0, pair);
            acc[r][1] = step(acc[r][1], w1, pair);
        }
    }
    for (int r = 0; r < R; r++) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
}

void tile(const uvec* weights, const uint32_t* x, int64_t pairs, int64_t rows, vec (*out)[2]) {
    switch (rows) {
        case 1: return tile_rows<1>(weights, x, pairs, pairs, out);
        case 2: return tile_rows<2>(weights, x, pairs, pairs, out);
        case 3: return tile_rows<3>(weights, x, pairs, pairs, out);
        case 4: return tile_rows<4>(weights, x, pairs, pairs, out);
        case 5: return tile_rows<5>(weights, x, pairs, pairs, out);
        case 6: return tile_rows<6>(weights, x, pairs, pairs, out);
        case 7: return tile_rows<7>(weights, x, pairs, pairs, out);
        default: return tile_rows<8>(weights, x, pairs, pairs, out);
    }
}

void write(float* out, const vec* sums, const float* bias, int64_t count) {
    for (int64_t v = 0; v < 2 && count > 0; v++, count -= LANES, out += LANES) {
        int64_t n = std::min<int64_t>(count, LANES);
        vec value = sums[v];
        if (bias) value = value + load_n(bias + v * LANES, n);
        if (n == LANES)
            store(out, value);
        else
            store_n(out, value, n);
    }
}

}  // namespace

extern "C" int64_t dp_product_packed_bytes(int64_t outputs, int64_t inputs) {
    return (outputs + TILE - 1) / TILE * ((inputs + 1) / 2) * TILE * 4;
}

// weight [outputs, inputs] bf16, row-major; packed: 64-byte aligned.
extern "C" void dp_product_pack(const uint16_t* weight, uint32_t* packed, int64_t outputs, int64_t inputs) {
    int64_t pairs = (inputs + 1) / 2;
    for (int64_t t = 0; t * TILE < outputs; t++)
        for (int64_t k = 0; k < pairs; k++)
            for (int64_t n = 0; n < TILE; n++) {
                uint32_t word = 0;
                int64_t row = t * TILE + n;
                if (row < outputs) {
                    const uint16_t* from = weight + row * inputs + 2 * k;
                    word = from[0] | (2 * k + 1 < inputs ? (uint32_t)from[1] << 16 : 0u);
                }
                packed[(t * pairs + k) * TILE + n] = word;
            }
}

// x [rows, inputs] bf16, bias fp32 [outputs] or null, out fp32 [rows, outputs].
extern "C" void dp_product(const uint16_t* x, const void* packed, const float* bias, float* out, int64_t rows,
                           int64_t outputs, int64_t inputs, int64_t threads) {
    int64_t pairs = (inputs + 1) / 2, tiles = (outputs + TILE - 1) / TILE;
    std::vector<uint32_t> words(rows * pairs, 0);
    for (int64_t r = 0; r < rows; r++) std::memcpy(words.data() + r * pairs, x + r * inputs, inputs * 2);
    int64_t members = std::min(team(threads, rows * outputs * inputs / 8), tiles);
#pragma omp parallel for num_threads(members) if (members > 1) schedule(static)
    for (int64_t t = 0; t < tiles; t++) {
        const uvec* weights = (const uvec*)packed + t * pairs * 2;
        for (int64_t r = 0; r < rows; r += ROWS) {
            int64_t count = std::min(ROWS, rows - r);
            vec sums[ROWS][2];
            tile(weights, words.data() + r * pairs, pairs, count, sums);
            for (int64_t i = 0; i < count; i++)
                write(out + (r + i) * outputs + t * TILE, sums[i], bias ? bias + t * TILE : nullptr, outputs - t * TILE);
        }
    }
}
