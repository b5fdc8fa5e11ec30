// x @ weight.T + bias, summed in fp32 and written as fp32 or in the weight's dtype.
//
// Every output is one chain over K in order, whatever tile of rows or outputs it falls in: exact by construction. The
// step of the chain is the machine's best: for bf16 AMX tiles (32 inputs) or a dot product (2), else a multiply-add (1).
// Packed weights: tiles of 32 outputs; a tile holds, word by word along K, the word of each output. A word is a pair of
// bf16 inputs, one fp32 input or one fp16 input, which is widened as it is read; the words of a tile are padded with
// zeros to a multiple of 16. A row's words are the same, but for fp16: they are widened first.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "common.h"
#include "pool.h"

namespace {

using namespace dp;

constexpr int64_t TILE = 2 * LANES;
constexpr int64_t ROWS = 8;  // rows that share one reading of a tile where there is no AMX

struct Args {
    const void* x;
    const char* weights;
    const float* bias;  // null: none
    void* out;
    int64_t rows, outputs, inputs, dtype, out_dtype, threads;
};

struct GroupedArgs {
    const void* x;
    const char* weights;
    const int64_t* starts;
    void* out;
    int64_t rows, experts, outputs, inputs, dtype, out_dtype, threads;
};

int64_t word_count(int64_t inputs, int64_t dtype) { return dtype == BF16 ? (inputs + 1) / 2 : inputs; }
int64_t word_bytes(int64_t dtype) { return dtype == FP16 ? 2 : 4; }  // of a weight
int64_t padded(int64_t words) { return (words + LANES - 1) / LANES * LANES; }

struct Problem {
    const char* weights;
    const float* bias;
    const uint32_t* x;  // words, rows at a stride of `stride` words, zeros from `inputs` to the stride
    int64_t rows, outputs, words, stride, tile_bytes;

    const char* tile(int64_t t) const { return weights + t * tile_bytes; }
};

// The words of 16 outputs: those of a tile one after the other, two for each place along K.
template <class T>
inline uvec words_at(const char* tile, int64_t index) {
    return ((const uvec*)tile)[index];
}

template <>
inline uvec words_at<fp16>(const char* tile, int64_t index) {
    return (uvec)load((const fp16*)tile + index * LANES);
}

inline vec as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return splat(x);
}

template <class T>
inline vec step(vec acc, uvec weights, uint32_t word) {
    return madd((vec)weights, as_float(word), acc);
}

template <>
inline vec step<bf16>(vec acc, uvec weights, uint32_t word) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)word));
#else
    acc = madd((vec)(weights << 16), as_float(word << 16), acc);
    return madd((vec)(weights & 0xffff0000u), as_float(word & 0xffff0000u), acc);
#endif
}

template <class O>
void write(O* out, vec value, const float* bias, int64_t count) {
    if (bias) value = value + (count < LANES ? load_n(bias, count) : load(bias));
    if (count < LANES)
        store_n(out, value, count);
    else
        store(out, value);
}

template <class O>
void write_tile_row(const Problem& p, O* out, int64_t row, int64_t t, vec first, vec second) {
    int64_t column = t * TILE, left = p.outputs - column;
    O* to = out + row * p.outputs + column;
    write(to, first, p.bias ? p.bias + column : nullptr, std::min<int64_t>(left, LANES));
    left -= LANES;
    if (left > 0)
        write(to + LANES, second, p.bias ? p.bias + column + LANES : nullptr, std::min<int64_t>(left, LANES));
}

template <class T, class O, int R>
void tile_rows(const Problem& p, O* out, int64_t row, int64_t t) {
    const char* weights = p.tile(t);
    const uint32_t* x = p.x + row * p.stride;
    vec acc[R][2] = {};
    for (int64_t k = 0; k < p.words; k++) {
        uvec w0 = words_at<T>(weights, 2 * k), w1 = words_at<T>(weights, 2 * k + 1);
        for (int r = 0; r < R; r++) {
            uint32_t word = x[r * p.stride + k];
            acc[r][0] = step<T>(acc[r][0], w0, word);
            acc[r][1] = step<T>(acc[r][1], w1, word);
        }
    }
    for (int r = 0; r < R; r++) write_tile_row(p, out, row + r, t, acc[r][0], acc[r][1]);
}

template <class T, class O>
void vector_tile(const Problem& p, O* out, int64_t t) {
    for (int64_t row = 0; row < p.rows; row += ROWS) switch (std::min(ROWS, p.rows - row)) {
            case 1: tile_rows<T, O, 1>(p, out, row, t); break;
            case 2: tile_rows<T, O, 2>(p, out, row, t); break;
            case 3: tile_rows<T, O, 3>(p, out, row, t); break;
            case 4: tile_rows<T, O, 4>(p, out, row, t); break;
            case 5: tile_rows<T, O, 5>(p, out, row, t); break;
            case 6: tile_rows<T, O, 6>(p, out, row, t); break;
            case 7: tile_rows<T, O, 7>(p, out, row, t); break;
            default: tile_rows<T, O, 8>(p, out, row, t);
        }
}

#if defined(DP_AMX)

constexpr int64_t BLOCK = 32;  // rows of two tiles

// Tiles 0-3 sums (row half, output half), 4-5 inputs, 6-7 weights.
void configure(int64_t rows) {
    int64_t high = std::min<int64_t>(rows, 16), low = rows > 16 ? rows - 16 : 1;
    amx_configure({high, high, low, low, high, low, 16, 16});
}

template <class O>
void amx_block(const Problem& p, O* out, int64_t row, int64_t rows, int64_t t) {
    const uvec* weights = (const uvec*)p.tile(t);
    const uint32_t* x = p.x + row * p.stride;
    const int64_t x_bytes = p.stride * 4, w_bytes = 2 * sizeof(uvec);
    alignas(64) float sums[BLOCK][TILE];
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < p.stride; k += LANES) {
            _tile_loadd(4, x + k, x_bytes);
            _tile_loadd(6, weights + 2 * k, w_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + 2 * k + 1, w_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + 16 * p.stride + k, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, &sums[16][0], sizeof sums[0]);
        _tile_stored(3, &sums[16][LANES], sizeof sums[0]);
    } else {
        for (int64_t k = 0; k < p.stride; k += LANES) {
            _tile_loadd(4, x + k, x_bytes);
            _tile_loadd(6, weights + 2 * k, w_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, weights + 2 * k + 1, w_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][LANES], sizeof sums[0]);
    for (int64_t r = 0; r < rows; r++) write_tile_row(p, out, row + r, t, load(sums[r]), load(sums[r] + LANES));
}

// Whole blocks first, then the rest: the tiles are configured for a number of rows.
template <class O>
void amx_tiles(const Problem& p, O* out, int64_t from, int64_t to) {
    int64_t whole = p.rows / BLOCK * BLOCK;
    if (whole) configure(BLOCK);
    for (int64_t t = from; whole && t < to; t++)
        for (int64_t row = 0; row < whole; row += BLOCK) amx_block(p, out, row, BLOCK, t);
    if (p.rows > whole) configure(p.rows - whole);
    for (int64_t t = from; p.rows > whole && t < to; t++) amx_block(p, out, whole, p.rows - whole, t);
    _tile_release();
}

#endif

template <class T, class O>
void tiles(const Problem& p, O* out, int64_t from, int64_t to) {
#if defined(DP_AMX)
    if (std::is_same<T, bf16>::value && amx_allowed()) return amx_tiles(p, out, from, to);
#endif
    for (int64_t t = from; t < to; t++) vector_tile<T>(p, out, t);
}

template <class T, class O>
void run(const Problem& p, O* out, int64_t threads) {
    int64_t count = (p.outputs + TILE - 1) / TILE;
    int64_t members = std::min(team(threads, p.outputs * p.words), count);
    parallel_ranges(members, count, [&](int64_t from, int64_t to) { tiles<T>(p, out, from, to); });
}

// Each expert's rows by its weight; a part of an expert's outputs at a time, so that few experts keep all threads busy.
template <class T, class O>
void run_grouped(const Problem& whole, const int64_t* starts, int64_t experts, O* out, int64_t threads) {
    constexpr int64_t PART = 4;  // tiles
    int64_t count = (whole.outputs + TILE - 1) / TILE, parts = (count + PART - 1) / PART;
    std::vector<int64_t> active;
    for (int64_t e = 0; e < experts; e++)
        if (starts[e] < starts[e + 1]) active.push_back(e);
    int64_t items = active.size() * parts;
    int64_t members = std::min(team(threads, whole.outputs * whole.words * (int64_t)active.size()), items);
    parallel(members, items, [&](int64_t item) {
        int64_t e = active[item / parts], first = item % parts * PART;
        Problem p = whole;
        p.weights = whole.tile(e * count);
        p.x += starts[e] * p.stride;
        p.rows = starts[e + 1] - starts[e];
        tiles<T>(p, out + starts[e] * p.outputs, first, std::min(first + PART, count));
    });
}

void widen_row(const fp16* x, float* out, int64_t width) {
    for_row(
        width, [&](int64_t i) { store(out + i, load(x + i)); },
        [&](int64_t i, int64_t n) { store_n(out + i, load_n(x + i, n), n); });
}

// x as words, zeros up to the stride; `copy` holds them where they do not lie like that already.
template <class A>
Problem problem_of(const A& a, const float* bias, std::vector<uint32_t>& copy) {
    int64_t words = word_count(a.inputs, a.dtype), stride = padded(words);
    int64_t row_bytes = a.inputs * (a.dtype == FP32 ? 4 : 2);
    bool as_it_is = a.dtype != FP16 && row_bytes == stride * 4;
    if (!as_it_is) copy.resize(a.rows * stride);
    int64_t members = as_it_is ? 1 : team(a.threads, a.rows * a.inputs);
    parallel_ranges(members, as_it_is ? 0 : a.rows, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            const char* from = (const char*)a.x + r * row_bytes;
            if (a.dtype == FP16)
                widen_row((const fp16*)from, (float*)copy.data() + r * stride, a.inputs);
            else
                std::memcpy(copy.data() + r * stride, from, row_bytes);
        }
    });
    const uint32_t* x = as_it_is ? (const uint32_t*)a.x : copy.data();
    return {a.weights, bias, x, a.rows, a.outputs, words, stride, stride * TILE * word_bytes(a.dtype)};
}

}  // namespace

// Bytes of the packed form of a weight [outputs, inputs].
extern "C" int64_t dp_product_packed_bytes(int64_t outputs, int64_t inputs, int64_t dtype) {
    return (outputs + TILE - 1) / TILE * padded(word_count(inputs, dtype)) * TILE * word_bytes(dtype);
}

// weight [outputs, inputs], row-major; packed is 64-byte aligned and filled with zeros.
extern "C" void dp_product_pack(const char* weight, char* packed, int64_t outputs, int64_t inputs, int64_t dtype,
                                int64_t threads) {
    int64_t row_bytes = inputs * (dtype == FP32 ? 4 : 2), word = word_bytes(dtype);
    int64_t words = word_count(inputs, dtype), stride = padded(words);
    int64_t tiles = (outputs + TILE - 1) / TILE;
    parallel(outputs * inputs > 65536 ? threads : 1, tiles, [&](int64_t t) {
        for (int64_t first = 0; first < words; first += LANES)
            for (int64_t row = t * TILE; row < std::min((t + 1) * TILE, outputs); row++) {
                const char* from = weight + row * row_bytes;
                char* to = packed + (t * stride * TILE + row % TILE) * word;
                for (int64_t k = first; k < std::min(first + LANES, words); k++)
                    std::memcpy(to + k * TILE * word, from + k * word, std::min(word, row_bytes - k * word));
            }
    });
}

// x [rows, inputs] of the weight's dtype; out [rows, outputs] fp32, bf16 or fp16.
extern "C" void dp_product(const Args* a) {
    std::vector<uint32_t> copy;
    Problem p = problem_of(*a, a->bias, copy);
    DP_DISPATCH(a->dtype, T, DP_DISPATCH(a->out_dtype, O, run<T>(p, (O*)a->out, a->threads)));
}

// x [rows, inputs], sorted by expert: those of expert e are starts[e] to starts[e + 1]; out [rows, outputs]. weights:
// the packed forms one after the other.
extern "C" void dp_grouped_product(const GroupedArgs* a) {
    std::vector<uint32_t> copy;
    Problem p = problem_of(*a, nullptr, copy);
    DP_DISPATCH(a->dtype, T,
                DP_DISPATCH(a->out_dtype, O, run_grouped<T>(p, a->starts, a->experts, (O*)a->out, a->threads)));
}

// Whether this build's product is as fast as the machine allows (16 lanes at a time).
extern "C" int64_t dp_product_is_wide() {
#if defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}
