// Lossless compression of bf16 weights to about 12 bits each, so that a memory-bound product reads a quarter less.
//
// A block is 16 words (32 inputs) of a tile's 32 outputs. The low byte of each weight (the exponent's last bit and the
// mantissa) is stored unchanged. The high byte (the sign and the rest of the exponent) is stored as four bits: its
// index in the block's table of at most 16 different high bytes. A block with more than 16 is stored raw, and its table
// is all zeros.
//
// A tile is its blocks' tables, padded to 64 bytes, followed by its blocks. A block consists of groups of four
// registers of one vector of outputs, in ascending order of words, alternating between the two vectors. A group is a
// register of indices (low nibbles for the first two registers, high nibbles for the others), then the low bytes of the
// first two and of the others. Bytes are ordered for interleaving in lanes of 16 bytes, which restores a register in
// two instructions.
#pragma once

#include <algorithm>

#include "runtime/common.h"

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__aarch64__)
#define DP_COMPRESSED 1
#endif

namespace dp {

constexpr int64_t TILE = 2 * LANES;  // outputs

#if defined(DP_COMPRESSED)

constexpr int GROUP_WORDS = 4 / PARTS;
constexpr int64_t REGISTER_BYTES = sizeof(uvec::part);
constexpr int64_t RAW_GROUP_BYTES = 4 * REGISTER_BYTES, GROUP_BYTES = 3 * REGISTER_BYTES;
constexpr int64_t BLOCK_GROUPS = LANES / GROUP_WORDS * 2;
constexpr int64_t TABLE_BYTES = 16;
// Prefetch distance: the processor's own prefetching stops at the ends of pages.
constexpr int64_t AHEAD_BYTES = 3072;

inline int64_t tables_bytes(int64_t blocks) { return (blocks * TABLE_BYTES + 63) / 64 * 64; }
inline int64_t block_bytes(bool raw) { return BLOCK_GROUPS * (raw ? RAW_GROUP_BYTES : GROUP_BYTES); }

inline bool is_raw(const char* table) {
    uint64_t halves[2];
    std::memcpy(halves, table, sizeof halves);
    return (halves[0] | halves[1]) == 0;
}

// read_table: the table in each lane of a register. expand: registers 2 * `half` and 2 * `half` + 1 of a group.
#if defined(__AVX512BW__)
typedef __m512i Bytes;
DP_INLINE Bytes read_table(const char* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
DP_INLINE void expand(const char* group, int half, Bytes table, uvec::part* words) {
    Bytes codes = _mm512_loadu_si512(group), low = _mm512_loadu_si512(group + (1 + half) * REGISTER_BYTES);
    codes = _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, _mm512_set1_epi8(15));
    Bytes high = _mm512_shuffle_epi8(table, codes);
    words[0] = (uvec::part)_mm512_unpacklo_epi8(low, high);
    words[1] = (uvec::part)_mm512_unpackhi_epi8(low, high);
}
#elif defined(__AVX2__)
typedef __m256i Bytes;
DP_INLINE Bytes read_table(const char* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
DP_INLINE void expand(const char* group, int half, Bytes table, uvec::part* words) {
    Bytes codes = _mm256_loadu_si256((const Bytes*)group);
    Bytes low = _mm256_loadu_si256((const Bytes*)(group + (1 + half) * REGISTER_BYTES));
    codes = _mm256_and_si256(half ? _mm256_srli_epi16(codes, 4) : codes, _mm256_set1_epi8(15));
    Bytes high = _mm256_shuffle_epi8(table, codes);
    words[0] = (uvec::part)_mm256_unpacklo_epi8(low, high);
    words[1] = (uvec::part)_mm256_unpackhi_epi8(low, high);
}
#else
typedef uint8x16_t Bytes;
DP_INLINE Bytes read_table(const char* p) { return vld1q_u8((const uint8_t*)p); }
DP_INLINE void expand(const char* group, int half, Bytes table, uvec::part* words) {
    Bytes codes = vld1q_u8((const uint8_t*)group);
    Bytes low = vld1q_u8((const uint8_t*)group + (1 + half) * REGISTER_BYTES);
    Bytes high = vqtbl1q_u8(table, half ? vshrq_n_u8(codes, 4) : vandq_u8(codes, vdupq_n_u8(15)));
    words[0] = (uvec::part)vzip1q_u8(low, high);
    words[1] = (uvec::part)vzip2q_u8(low, high);
}
#endif

// Position of word i of group g of a block: the output within the tile, the word within the block.
struct Place {
    int64_t output, word;

    Place(int64_t g, int i)
        : output((g % 2 * PARTS + i / PART % PARTS) * PART + i % PART), word(g / 2 * GROUP_WORDS + i / PART / PARTS) {}
};

// A block's weights, by output and input; zeros beyond the end of the weight [outputs, inputs].
struct BlockWeights {
    uint16_t bits[TILE][2 * LANES] = {};

    BlockWeights(const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t tile, int64_t block) {
        int64_t first = block * 2 * LANES, count = std::min<int64_t>(inputs - first, 2 * LANES);
        for (int64_t o = 0; o < std::min(outputs - tile * TILE, TILE); o++)
            std::memcpy(bits[o], weight + (tile * TILE + o) * inputs + first, count * 2);
    }

    // Group g in register order.
    void group(int64_t g, uint16_t* to) const {
        for (int i = 0; i < 4 * PART; i++) {
            Place place(g, i);
            to[2 * i] = bits[place.output][2 * place.word];
            to[2 * i + 1] = bits[place.output][2 * place.word + 1];
        }
    }
};

// The table of the high bytes that occur in a block, and each one's index in it.
struct HighBytes {
    uint8_t table[256], code[256];
    int count = 0;

    explicit HighBytes(const BlockWeights& weights) {
        bool occurs[256] = {};
        for (auto& row : weights.bits)
            for (uint16_t bits : row) occurs[bits >> 8] = true;
        for (int high = 0; high < 256; high++)
            if (occurs[high]) {
                code[high] = (uint8_t)count;
                table[count++] = (uint8_t)high;
            }
        for (int i = count; i < TABLE_BYTES; i++) table[i] = 255;  // never all zeros
    }

    bool fit() const { return count <= TABLE_BYTES; }
};

inline void compress_group(const uint16_t* group, const uint8_t* code, uint8_t* to) {
    constexpr int64_t B = REGISTER_BYTES;
    for (int64_t i = 0; i < B; i++) {  // lane i / 16 of a pair of registers: eight weights of each
        int64_t at = i % 16 / 8 * (B / 2) + i / 16 * 8 + i % 8;
        uint16_t one = group[at], other = group[B + at];
        to[i] = (uint8_t)(code[one >> 8] | code[other >> 8] << 4);
        to[B + i] = (uint8_t)one;
        to[2 * B + i] = (uint8_t)other;
    }
}

// Compresses a tile to `to`, unless that is null. Returns its size in bytes.
inline int64_t compress_tile(const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t tile, uint8_t* to) {
    int64_t blocks = (inputs + 2 * LANES - 1) / (2 * LANES), at = tables_bytes(blocks);
    for (int64_t b = 0; b < blocks; b++) {
        BlockWeights weights(weight, outputs, inputs, tile, b);
        HighBytes high(weights);
        if (to && high.fit()) std::memcpy(to + b * TABLE_BYTES, high.table, TABLE_BYTES);
        for (int64_t g = 0; to && g < BLOCK_GROUPS; g++) {
            uint16_t group[RAW_GROUP_BYTES / 2];
            weights.group(g, group);
            if (high.fit())
                compress_group(group, high.code, to + at + g * GROUP_BYTES);
            else
                std::memcpy(to + at + g * RAW_GROUP_BYTES, group, sizeof group);
        }
        at += block_bytes(!high.fit());
    }
    return at;
}

// Writes a tile's rows of the weight [outputs, inputs].
inline void expand_tile(const char* from, uint16_t* weight, int64_t outputs, int64_t inputs, int64_t tile) {
    int64_t blocks = (inputs + 2 * LANES - 1) / (2 * LANES);
    const char* data = from + tables_bytes(blocks);
    for (int64_t b = 0; b < blocks; b++) {
        const char* table = from + b * TABLE_BYTES;
        bool raw = is_raw(table);
        for (int64_t g = 0; g < BLOCK_GROUPS; g++) {
            uvec::part words[4];
            if (raw)
                std::memcpy(words, data + g * RAW_GROUP_BYTES, RAW_GROUP_BYTES);
            else
                for (int half = 0; half < 2; half++)
                    expand(data + g * GROUP_BYTES, half, read_table(table), words + 2 * half);
            for (int i = 0; i < 4 * PART; i++) {
                Place place(g, i);
                int64_t output = tile * TILE + place.output, input = 2 * (b * LANES + place.word);
                if (output >= outputs || input >= inputs) continue;
                std::memcpy(weight + output * inputs + input, (const uint32_t*)words + i, std::min<int64_t>(inputs - input, 2) * 2);
            }
        }
        data += block_bytes(raw);
    }
}

#endif

}  // namespace dp
