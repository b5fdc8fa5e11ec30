// x @ weight.T + bias, summed in fp32 and written as fp32 or in the weight's dtype.
//
// Every output is one chain of additions over K in order, whatever tile of rows or outputs it is in: exact by
// construction. A step of the chain is the machine's best: for bf16 AMX tiles (32 inputs) or a dot product (2), else a
// multiply-add (1).
//
// Packed weights: tiles of 32 outputs; a tile holds, word by word along K, the word of each output. A word is a pair of
// bf16 inputs, one fp32 input or one fp16 input, which is widened when read; the words of a tile are zero-padded to a
// multiple of 16. bf16 weights that are not read by AMX tiles are compressed (compressed.h), except experts'. They are
// expanded in registers for the first rows, which leave the expanded tile for the others.
//
// Rows are stored as the steps use them: a pair for the dot product, else one input, widened.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "matmul/compressed.h"
#include "runtime/amx.h"
#include "runtime/common.h"
#include "runtime/pool.h"

namespace {

using namespace dp;

constexpr int64_t BLOCK_BYTES = 1 << 19;  // contiguous weights per thread: short streams are read more slowly
constexpr int64_t PANEL_BYTES = 1 << 18;  // rows that stay in the inner caches while all tiles of a block use them
constexpr int64_t MOST_TILES = 8;  // tiles per work item when there are several panels

// bf16 uses the dot-product instruction, two inputs a step, if available; all else is widened, one input a step.
#if defined(DP_DOT)
constexpr bool HAS_DOT = true;
#else
constexpr bool HAS_DOT = false;
#endif
template <class T>
constexpr bool IS_BF16 = std::is_same<T, bf16>::value;
template <class T>
constexpr int STEPS = IS_BF16<T> && !HAS_DOT ? 2 : 1;  // of a word
template <class T>
constexpr int SUMS = REGISTERS == 32 ? 24 : STEPS<T> == 2 ? 10 : 12;  // registers for sums
// Without AMX: the number of rows that share one read of a tile. ROWS with many rows, MOST_ROWS at most.
template <class T>
constexpr int ROWS = std::min(SUMS<T> / PARTS, 8);
template <class T>
constexpr int MOST_ROWS = std::min(SUMS<T> / PARTS, 12);
// The number of rows, at most, whose sums for a whole tile are in registers. More are added half a tile at a time.
template <class T>
constexpr int WHOLE_ROWS = SUMS<T> / (2 * PARTS);

struct Args {
    const void* x;
    const char* weights;
    const int64_t* starts;  // of each compressed tile in `weights`; null: not compressed
    const float* bias;      // null: none
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
    const int64_t* starts;
    const float* bias;
    const uint32_t* x;  // operands of the steps, rows at a stride of `stride` steps, zeros from `inputs` on
    int64_t rows, outputs, words, stride, tile_bytes;
    char* kept = nullptr;  // where the expanded words of a compressed tile are stored; null: nowhere

    const char* tile(int64_t t) const { return weights + (starts ? starts[t] : t * tile_bytes); }
};

// The words of one register of outputs.
template <class T>
DP_INLINE uvec::part words_at(const char* tile, int64_t index) {
    typename std::conditional<std::is_same<T, fp16>::value, hvec, uvec>::type::part words;
    std::memcpy(&words, tile + index * sizeof words, sizeof words);
    if constexpr (std::is_same<T, fp16>::value)
        return (uvec::part)widen(words);
    else
        return words;
}

// Step s of a word.
template <class T>
DP_INLINE vec::part step(vec::part acc, uvec::part words, int s, uint32_t x) {
#if defined(DP_DOT)
    if constexpr (IS_BF16<T>)
        return (vec::part)_mm512_dpbf16_ps((__m512)acc, (__m512bh)words, (__m512bh)_mm512_set1_epi32((int)x));
#endif
    if constexpr (IS_BF16<T>) words = s ? words & 0xffff0000u : words << 16;
    return madd((vec::part)words, (vec::part)(x - uvec::part{}), acc);
}

template <class O>
void write(O* out, vec value, const float* bias, int64_t count) {
    if (bias) value = value + (count < LANES ? load_n(bias, count) : load(bias));
    if (count < LANES)
        store_n(out, value, count);
    else
        store(out, value);
}

// 16 outputs of a row, from `column` on; those past the end are not written.
template <class O>
void write_outputs(const Problem& p, O* out, int64_t row, int64_t column, vec value) {
    int64_t count = std::min<int64_t>(p.outputs - column, LANES);
    if (count > 0) write(out + row * p.outputs + column, value, p.bias ? p.bias + column : nullptr, count);
}

#if defined(DP_COMPRESSED)

// R rows of a compressed tile.
template <class O, int R>
struct CompressedBlock {
    static constexpr int C = TILE / LANES;  // vectors
    const Problem& p;
    const uint32_t* x;
    vec acc[R][C] = {};

    // Adds block b, which begins at `data`. TAIL: words past the end are skipped.
    template <bool RAW, bool TAIL>
    DP_INLINE void take(int64_t b, const char* data, Bytes table) {
        for (int64_t g = 0; g < LANES / GROUP_WORDS; g++) {
            for (int64_t i = 0; i < 2 * GROUP_BYTES; i += 64)
                __builtin_prefetch(data + 2 * g * GROUP_BYTES + i + AHEAD_BYTES);
            for (int half = 0; half < 2; half++) {
                uvec::part words[C][2];
                for (int c = 0; c < C; c++) {
                    int64_t at = C * g + c;
                    if (RAW)
                        std::memcpy(words[c], data + at * RAW_GROUP_BYTES + half * sizeof words[c], sizeof words[c]);
                    else
                        expand(data + at * GROUP_BYTES, half, table, words[c]);
                }
                for (int i = 0; i < 2; i++) {
                    int64_t part = 2 * half + i, k = b * LANES + g * GROUP_WORDS + part / PARTS;
                    if (p.kept) keep(words, i, k, part % PARTS);
                    if (!TAIL || k < p.words) multiply(words, i, k, part % PARTS);
                }
            }
        }
    }

    DP_INLINE void keep(const uvec::part (&words)[C][2], int i, int64_t k, int64_t part) const {
        for (int c = 0; c < C; c++)
            std::memcpy(p.kept + ((C * k + c) * PARTS + part) * REGISTER_BYTES, &words[c][i], REGISTER_BYTES);
    }

    DP_INLINE void multiply(const uvec::part (&words)[C][2], int i, int64_t k, int64_t part) {
        for (int s = 0; s < STEPS<bf16>; s++)
            for (int r = 0; r < R; r++) {
                uint32_t word = x[r * p.stride + k * STEPS<bf16> + s];
                for (int c = 0; c < C; c++) {
                    vec::part& sum = acc[r][c].parts[part];
                    sum = step<bf16>(sum, words[c][i], s, word);
                }
            }
    }

    template <bool TAIL>
    DP_INLINE const char* take_either(int64_t b, const char* data, const char* table) {
        bool raw = is_raw(table);
        if (raw)
            take<true, TAIL>(b, data, read_table(table));
        else
            take<false, TAIL>(b, data, read_table(table));
        return data + block_bytes(raw);
    }

    DP_INLINE void run(int64_t t) {
        const char* tables = p.tile(t);
        const char* data = tables + tables_bytes((p.words + LANES - 1) / LANES);
        int64_t whole = p.words / LANES;
        for (int64_t b = 0; b < whole; b++) data = take_either<false>(b, data, tables + b * TABLE_BYTES);
        if (p.words % LANES) take_either<true>(whole, data, tables + whole * TABLE_BYTES);
    }
};

template <class O, int R>
void compressed_block(const Problem& p, O* out, int64_t row, int64_t t) {
    CompressedBlock<O, R> block{p, p.x + row * p.stride};
    block.run(t);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < block.C; c++) write_outputs(p, out, row + r, t * TILE + c * LANES, block.acc[r][c]);
}

#endif

// R rows and C vectors of each of N tiles, from the tile `t` and its vector `first` on.
template <class T, class O, int R, int C, int N = 1>
void block(const Problem& p, O* out, int64_t row, int64_t t, int first) {
#if defined(DP_COMPRESSED)
    if constexpr (IS_BF16<T> && C == 2 && N == 1)
        if (p.starts) return compressed_block<O, R>(p, out, row, t);
#endif
    const char* weights[N];
    for (int n = 0; n < N; n++) weights[n] = p.tile(t + n);
    const uint32_t* x = p.x + row * p.stride;
    constexpr int WIDTH = C * PARTS;  // registers of a tile
    vec acc[R][N * C] = {};
    for (int64_t k = 0; k < p.words; k++) {
        uvec::part w[N * WIDTH];
        for (int i = 0; i < N * WIDTH; i++)
            w[i] = words_at<T>(weights[i / WIDTH], (2 * k + first) * PARTS + i % WIDTH);
        for (int s = 0; s < STEPS<T>; s++)
            for (int r = 0; r < R; r++) {
                uint32_t word = x[r * p.stride + k * STEPS<T> + s];
                for (int i = 0; i < N * WIDTH; i++) {
                    vec::part& sum = acc[r][i / PARTS].parts[i % PARTS];
                    sum = step<T>(sum, w[i], s, word);
                }
            }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < N * C; c++)
            write_outputs(p, out, row + r, (t + c / C) * TILE + (first + c % C) * LANES, acc[r][c]);
}

template <class T, class O, int R>
void tile_rows(const Problem& p, O* out, int64_t row, int64_t t) {
    if constexpr (R <= WHOLE_ROWS<T>) {
        block<T, O, R, 2>(p, out, row, t, 0);
    } else {
        block<T, O, R, 1>(p, out, row, t, 0);
        block<T, O, R, 1>(p, out, row, t, 1);
    }
}

// With few rows there are few chains, each of which waits for its previous step. Several tiles at once give about
// eight.
// Example: one row with two registers per tile -> four tiles; three rows -> two tiles.
constexpr int CHAINS = 8;
template <class T, int R>
constexpr int tiles_at_once() {
    int chains = 2 * R * PARTS, tiles = 1;
    while (tiles * chains < CHAINS && 2 * tiles * chains < SUMS<T>) tiles *= 2;
    return tiles;
}

template <class T, class O, int R>
void few_rows(const Problem& p, O* out, int64_t from, int64_t to) {
    constexpr int N = tiles_at_once<T, R>();
    int64_t t = from;
    if constexpr (N > 1)
        for (; !p.starts && t + N <= to; t += N) block<T, O, R, 2, N>(p, out, 0, t, 0);
    for (; t < to; t++) tile_rows<T, O, R>(p, out, 0, t);
}

template <class T, class O, int R = MOST_ROWS<T>>
void up_to_rows(const Problem& p, O* out, int64_t row, int64_t t, int64_t rows) {
    if (rows == R)
        tile_rows<T, O, R>(p, out, row, t);
    else if constexpr (R > 1)
        up_to_rows<T, O, R - 1>(p, out, row, t, rows);
}

// This thread's memory for an expanded tile.
char* scratch(int64_t bytes) {
    static thread_local std::vector<uvec> kept;
    if ((int64_t)(kept.size() * sizeof(uvec)) < bytes) kept.resize((bytes + sizeof(uvec) - 1) / sizeof(uvec));
    return (char*)kept.data();
}

// Many rows: groups of at most ROWS, which share one read of a tile, or a single larger group; panels of equal numbers
// of groups.
template <class T>
struct Panels {
    int64_t rows, groups, count;

    explicit Panels(const Problem& p)
        : rows(p.rows), groups(rows <= MOST_ROWS<T> ? 1 : (rows + ROWS<T> - 1) / ROWS<T>) {
        int64_t most = std::max<int64_t>(1, PANEL_BYTES / (ROWS<T> * p.stride * 4));
        count = (groups + most - 1) / most;
    }

    // Multiplies the rows of a panel by tiles `from` to `to`. The first WHOLE_ROWS expand a compressed tile, once, for all
    // others. Example: five rows with AVX2: two expand the tile, three follow.
    template <class O>
    void run(const Problem& p, O* out, int64_t panel, int64_t from, int64_t to) const {
        int64_t begin = groups * panel / count, end = groups * (panel + 1) / count;
        int64_t top = rows * begin / groups, middle = rows * (begin + 1) / groups;
        Problem first = p, rest = p;
        if (p.starts) middle = std::min<int64_t>(middle, top + WHOLE_ROWS<T>);
        if (p.starts && middle < rows * end / groups) {
            rest.weights = first.kept = scratch(p.tile_bytes);
            rest.starts = nullptr;
            rest.tile_bytes = 0;  // every tile is at the same address
        }
        for (int64_t t = from; t < to; t++) {
            up_to_rows<T, O>(first, out, top, t, middle - top);
            for (int64_t g = begin, row = middle; g < end; g++) {
                int64_t next = rows * (g + 1) / groups;
                up_to_rows<T, O>(rest, out, row, t, next - row);
                row = next;
            }
        }
    }
};

#if defined(DP_AMX)

constexpr int64_t BLOCK = 32;  // rows of two tiles

// Tiles 0-3: sums (row half, output half); 4-5: inputs; 6-7: weights.
void configure(int64_t rows) {
    int64_t high = std::min<int64_t>(rows, 16), low = rows > 16 ? rows - 16 : 1;
    amx_configure({high, high, low, low, high, low, 16, 16});
}

// One step of the chains: adds 32 inputs of up to 32 rows (BOTH: of more than 16) for the 32 outputs of a tile. FIRST:
// this tile's weights come from outer caches, whose own prefetching loses its way among tile loads.
template <bool BOTH, bool FIRST>
DP_INLINE void amx_step(const uvec* weights, const uint32_t* x, int64_t x_bytes) {
    constexpr int64_t W_BYTES = 2 * sizeof(uvec);
    if (FIRST)
        for (int64_t i = 0; i < 2 * LANES; i++) __builtin_prefetch(weights + 2 * LANES + i);
    _tile_loadd(4, x, x_bytes);
    if (BOTH) _tile_loadd(5, (const char*)x + 16 * x_bytes, x_bytes);
    _tile_loadd(6, weights, W_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    if (BOTH) _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, weights + 1, W_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if (BOTH) _tile_dpbf16ps(3, 5, 7);
}

template <class O, bool BOTH, bool FIRST>
void amx_block(const Problem& p, O* out, int64_t row, int64_t rows, int64_t t) {
    const uvec* weights = (const uvec*)p.tile(t);
    const uint32_t* x = p.x + row * p.stride;
    alignas(64) float sums[BLOCK][TILE];
    _tile_zero(0);
    _tile_zero(1);
    if (BOTH) _tile_zero(2);
    if (BOTH) _tile_zero(3);
    for (int64_t k = 0; k < p.stride; k += LANES) amx_step<BOTH, FIRST>(weights + 2 * k, x + k, p.stride * 4);
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][LANES], sizeof sums[0]);
    if (BOTH) _tile_stored(2, &sums[16][0], sizeof sums[0]);
    if (BOTH) _tile_stored(3, &sums[16][LANES], sizeof sums[0]);
    if (!p.bias && (t + 1) * TILE <= p.outputs) {  // the usual case, with nothing to decide for each row
        O* to = out + row * p.outputs + t * TILE;
        for (int64_t r = 0; r < rows; r++, to += p.outputs)
            for (int c = 0; c < 2; c++) store(to + c * LANES, load(sums[r] + c * LANES));
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < 2; c++) write_outputs(p, out, row + r, t * TILE + c * LANES, load(sums[r] + c * LANES));
}

// Blocks of as many rows each, since tiles are configured for a number of rows; some rows may be in two of them, with
// the same sums. Example: 33 rows -> rows 0 to 16 and 16 to 32.
template <class O, bool BOTH>
void amx_tiles(const Problem& p, O* out, int64_t from, int64_t to) {
    if (!p.rows) return;
    int64_t blocks = (p.rows + BLOCK - 1) / BLOCK, each = (p.rows + blocks - 1) / blocks;
    configure(each);
    for (int64_t t = from; t < to; t++) {
        amx_block<O, BOTH, true>(p, out, 0, each, t);
        for (int64_t b = 1; b < blocks; b++)
            amx_block<O, BOTH, false>(p, out, std::min(b * each, p.rows - each), each, t);
    }
    _tile_release();
}

#endif

template <class T>
bool by_amx() {
#if defined(DP_AMX)
    return IS_BF16<T> && amx_allowed();
#else
    return false;
#endif
}

template <class T, class O>
void tiles(const Problem& p, O* out, int64_t from, int64_t to) {
#if defined(DP_AMX)
    if (by_amx<T>()) return p.rows > 16 ? amx_tiles<O, true>(p, out, from, to) : amx_tiles<O, false>(p, out, from, to);
#endif
    if (p.rows == 1) return few_rows<T, O, 1>(p, out, from, to);
    if (p.rows == 2) return few_rows<T, O, 2>(p, out, from, to);
    if (p.rows == 3 && (!p.starts || WHOLE_ROWS<T> >= 3)) return few_rows<T, O, 3>(p, out, from, to);
    Panels<T> panels(p);
    for (int64_t i = 0; i < panels.count; i++) panels.run(p, out, i, from, to);
}

// Several panels: all threads work on the same one, so each reads its rows from outer caches once, in small pieces.
template <class T, class O>
void run_panels(const Problem& p, const Panels<T>& panels, O* out, int64_t members) {
    int64_t count = (p.outputs + TILE - 1) / TILE, fair = panels.count * count / (4 * members);
    int64_t each = std::max<int64_t>(1, std::min(fair, MOST_TILES)), parts = (count + each - 1) / each;
    parallel(members, panels.count * parts, [&](int64_t item) {
        int64_t first = item % parts * each;
        panels.run(p, out, item / parts, first, std::min(first + each, count));
    });
}

template <class T, class O>
void run(const Problem& p, O* out, int64_t threads) {
    int64_t count = (p.outputs + TILE - 1) / TILE;
    int64_t members = std::min(team(threads, p.outputs * p.words), count);
    Panels<T> panels(p);
    if (panels.count > 1 && !by_amx<T>()) return run_panels(p, panels, out, members);
    int64_t readings = std::max<int64_t>(1, p.rows / ROWS<T>);  // of a tile: with many rows a few tiles are enough work
    int64_t least = std::max<int64_t>(1, BLOCK_BYTES / (p.tile_bytes * readings));
    parallel_ranges(members, count, least, [&](int64_t from, int64_t to) { tiles<T>(p, out, from, to); });
}

// Multiplies each expert's rows by its weight. A work item is a part of an expert's outputs, so that few experts keep
// all threads busy.
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

template <class T>
void widen_row(const T* x, float* out, int64_t width) {
    for_row(
        width, [&](int64_t i) { store(out + i, load(x + i)); },
        [&](int64_t i, int64_t n) { store_n(out + i, load_n(x + i, n), n); });
}

// x in steps, zero-padded to the stride; `copy` holds it if x is not in this format already.
template <class A>
Problem problem_of(const A& a, const int64_t* starts, const float* bias, std::vector<uint32_t>& copy) {
    int64_t words = word_count(a.inputs, a.dtype), stride = padded(words);
    int64_t tile_bytes = stride * TILE * word_bytes(a.dtype);
    int64_t row_bytes = a.inputs * (a.dtype == FP32 ? 4 : 2);
    if (a.dtype == BF16) stride *= STEPS<bf16>;
    bool widened = a.dtype == FP16 || (a.dtype == BF16 && !HAS_DOT);
    bool as_it_is = !widened && row_bytes == stride * 4;
    if (!as_it_is) copy.resize(a.rows * stride);
    int64_t members = as_it_is ? 1 : team(a.threads, a.rows * a.inputs);
    parallel_items(members, as_it_is ? 0 : a.rows, [&](int64_t r) {
        const char* from = (const char*)a.x + r * row_bytes;
        uint32_t* to = copy.data() + r * stride;
        if (widened)
            DP_DISPATCH(a.dtype, T, widen_row((const T*)from, (float*)to, a.inputs));
        else
            std::memcpy(to, from, row_bytes);
    });
    const uint32_t* x = as_it_is ? (const uint32_t*)a.x : copy.data();
    return {a.weights, starts, bias, x, a.rows, a.outputs, words, stride, tile_bytes};
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
    parallel_items(outputs * inputs > 65536 ? threads : 1, tiles, [&](int64_t t) {
        for (int64_t first = 0; first < words; first += LANES)
            for (int64_t row = t * TILE; row < std::min((t + 1) * TILE, outputs); row++) {
                const char* from = weight + row * row_bytes;
                char* to = packed + (t * stride * TILE + row % TILE) * word;
                for (int64_t k = first; k < std::min(first + LANES, words); k++)
                    std::memcpy(to + k * TILE * word, from + k * word, std::min(word, row_bytes - k * word));
            }
    });
}

// The start of each tile of the compressed form of a bf16 weight [outputs, inputs]; `starts` also has the end. Returns
// 0 if weights are not compressed here.
extern "C" int64_t dp_product_compressed_starts(const char* weight, int64_t* starts, int64_t outputs, int64_t inputs,
                                                int64_t threads) {
#if defined(DP_COMPRESSED)
    if (by_amx<bf16>()) return 0;
    int64_t tiles = (outputs + TILE - 1) / TILE;
    starts[0] = 0;
    parallel_items(team(threads, outputs * inputs), tiles, [&](int64_t t) {
        starts[t + 1] = compress_tile((const uint16_t*)weight, outputs, inputs, t, nullptr);
    });
    for (int64_t t = 0; t < tiles; t++) starts[t + 1] += starts[t];
    return 1;
#else
    return 0;
#endif
}

// weight [outputs, inputs] in bf16, row-major; compressed is 64-byte aligned and filled with zeros.
extern "C" void dp_product_compress(const char* weight, const int64_t* starts, char* compressed, int64_t outputs,
                                    int64_t inputs, int64_t threads) {
#if defined(DP_COMPRESSED)
    parallel_items(team(threads, outputs * inputs), (outputs + TILE - 1) / TILE, [&](int64_t t) {
        compress_tile((const uint16_t*)weight, outputs, inputs, t, (uint8_t*)compressed + starts[t]);
    });
#endif
}

// Restores the weight [outputs, inputs].
extern "C" void dp_product_expand(const char* compressed, const int64_t* starts, char* weight, int64_t outputs,
                                  int64_t inputs) {
#if defined(DP_COMPRESSED)
    for (int64_t t = 0; t < (outputs + TILE - 1) / TILE; t++)
        expand_tile(compressed + starts[t], (uint16_t*)weight, outputs, inputs, t);
#endif
}

// x [rows, inputs] of the weight's dtype; out [rows, outputs] fp32, bf16 or fp16.
extern "C" void dp_product(const Args* a) {
    std::vector<uint32_t> copy;
    Problem p = problem_of(*a, a->starts, a->bias, copy);
    DP_DISPATCH(a->dtype, T, DP_DISPATCH(a->out_dtype, O, run<T>(p, (O*)a->out, a->threads)));
}

// x [rows, inputs], sorted by expert: the rows of expert e are starts[e] to starts[e + 1]; out [rows, outputs].
// weights: the packed forms one after the other.
extern "C" void dp_grouped_product(const GroupedArgs* a) {
    std::vector<uint32_t> copy;
    Problem p = problem_of(*a, nullptr, nullptr, copy);
    DP_DISPATCH(a->dtype, T,
                DP_DISPATCH(a->out_dtype, O, run_grouped<T>(p, a->starts, a->experts, (O*)a->out, a->threads)));
}

// The arithmetic that determines the bits of bf16 results.
extern "C" const char* dp_bf16_arithmetic() {
#if defined(DP_AMX)
    if (amx_allowed()) return "AMX";
#endif
    return HAS_DOT ? "dot product" : "widened";
}
