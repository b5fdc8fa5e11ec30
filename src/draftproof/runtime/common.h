// Shared by all compiled operators: 16 lanes, loads and stores per dtype, exp, and the number of threads for a loop.
//
// Bits: a row is computed in an order fixed by its width alone, over 16 lanes whatever the register width. The build
// uses -ffp-contract=off, and a multiply-add is fused only where `madd` is written, so vector bodies and tails agree,
// and so do all processors with fused multiply-add.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Use the processor's bf16 instructions, if it has them and bf16_arithmetic="widened" was not asked for.
#if defined(__AVX512BF16__) && !defined(DP_WIDENED)
#define DP_DOT 1
#endif

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Passing 16 lanes through memory would cost more than most of these functions do.
#define DP_INLINE [[gnu::always_inline]] inline
// Inlines everything that a loop over lanes calls, so that constants stay in registers.
#define DP_FLAT [[gnu::flatten]]

namespace dp {

constexpr int LANES = 16;
constexpr int64_t MAX_HEAD_DIM = 1024;

// PARTS: registers per 16 lanes. REGISTERS: vector registers of the processor.
#if defined(__AVX512F__)
constexpr int PARTS = 1, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int PARTS = 2, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int PARTS = 4, REGISTERS = 32;
#else
constexpr int PARTS = 4, REGISTERS = 16;
#endif
constexpr int PART = LANES / PARTS;  // lanes of one register

// 16 numbers. A scalar converts to 16 equal ones; comparisons give lanes of all ones or zero; a cast keeps the bits.
template <class E>
struct Lanes {
    typedef E part __attribute__((vector_size(PART * sizeof(E))));
    part parts[PARTS];

    Lanes() = default;
    Lanes(E x) {
        for (part& p : parts) p = x - part{};
    }
    // Copied register by register: compilers may copy a structure in smaller pieces, which are slow to read back whole.
    DP_INLINE Lanes(const Lanes& other) { *this = other; }
    DP_INLINE Lanes& operator=(const Lanes& other) {
        for (int i = 0; i < PARTS; i++) parts[i] = other.parts[i];
        return *this;
    }
    template <class F>
    explicit Lanes(const Lanes<F>& other) {
        for (int i = 0; i < PARTS; i++) parts[i] = (part)other.parts[i];
    }
    E operator[](int64_t lane) const { return ((const E*)parts)[lane]; }
    E& operator[](int64_t lane) { return ((E*)parts)[lane]; }

#define DP_OPERATOR(Result, op)                                                  \
    DP_INLINE friend Lanes<Result> operator op(const Lanes& a, const Lanes& b) { \
        Lanes<Result> out;                                                       \
        for (int i = 0; i < PARTS; i++) out.parts[i] = a.parts[i] op b.parts[i]; \
        return out;                                                              \
    }
    DP_OPERATOR(E, +)
    DP_OPERATOR(E, -)
    DP_OPERATOR(E, *)
    DP_OPERATOR(E, /)
    DP_OPERATOR(E, &)
    DP_OPERATOR(E, |)
    DP_OPERATOR(E, ^)
    DP_OPERATOR(E, <<)
    DP_OPERATOR(E, >>)
    DP_OPERATOR(int32_t, <)
    DP_OPERATOR(int32_t, >)
    DP_OPERATOR(int32_t, >=)
    DP_OPERATOR(int32_t, ==)
    DP_OPERATOR(int32_t, !=)
#undef DP_OPERATOR

    Lanes operator~() const { return *this ^ Lanes(-1); }
    Lanes operator-() const {
        Lanes out;
        for (int i = 0; i < PARTS; i++) out.parts[i] = -parts[i];
        return out;
    }
};

typedef Lanes<float> vec;
typedef Lanes<int32_t> ivec;
typedef Lanes<uint32_t> uvec;
typedef Lanes<uint16_t> hvec;

DP_INLINE ivec numbers() {  // 0 to 15
    static constexpr int32_t all[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ivec v;
    std::memcpy(v.parts, all, sizeof all);
    return v;
}

template <class To, class From>
DP_INLINE To convert(const From& from) {  // converts the values
    To to;
    for (int i = 0; i < PARTS; i++) to.parts[i] = __builtin_convertvector(from.parts[i], typename To::part);
    return to;
}

// Operations on one register: select, a * b + c (fused if the machine can), and fp16 to fp32 and back.
DP_INLINE vec::part select(ivec::part mask, vec::part a, vec::part b) { return mask ? a : b; }

DP_INLINE vec::part madd(vec::part a, vec::part b, vec::part c) {
#if defined(__AVX512F__)
    return (vec::part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec::part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec::part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Exact, also for subnormal numbers, whether or not the floating-point unit flushes them.
DP_INLINE vec::part widen(hvec::part h) {
#if defined(__AVX512F__)
    return (vec::part)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (vec::part)_mm256_cvtph_ps((__m128i)h);
#else
    ivec::part bits = __builtin_convertvector(h, ivec::part);
    ivec::part size = (bits & 0x7fff) << 13;  // the exponent is 112 too small for fp32; 224 if not finite
    ivec::part not_finite = size >= 31 << 23;
    vec::part normal = (vec::part)(size + (112 << 23) + (not_finite & (112 << 23)));
    const float smallest_normal = 6.103515625e-5f;  // 2^-14, added to a subnormal number and subtracted again
    vec::part subnormal = (vec::part)(size + (113 << 23)) - smallest_normal;
    return (vec::part)((ivec::part)select(size < 1 << 23, subnormal, normal) | (bits & 0x8000) << 16);
#endif
}

DP_INLINE hvec::part narrow(vec::part v) {  // rounds to nearest even; from 65520 on infinity
#if defined(__AVX512F__)
    return (hvec::part)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (hvec::part)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    ivec::part bits = (ivec::part)v, size = bits & 0x7fffffff;
    ivec::part normal = (size - (112 << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    // next to 0.5 the last bit of fp32 is fp16's smallest number
    ivec::part subnormal = (ivec::part)((vec::part)size + 0.5f) - 0x3f000000;
    ivec::part small = size < 0x38800000, large = size >= 0x47800000, nan = size > 0x7f800000;  // 2^-14, 2^16
    ivec::part rounded = (small & subnormal) | (~small & ~large & normal) | (large & 0x7c00) | (nan & 0x200);
    return __builtin_convertvector(rounded | ((bits >> 16) & 0x8000), hvec::part);
#endif
}

struct bf16 {
    uint16_t bits;
};

struct fp16 {  // storage only: arithmetic is fp32
    uint16_t bits;
};

enum Dtype : int64_t { FP32 = 0, BF16 = 1, FP16 = 2 };

DP_INLINE vec splat(float x) { return vec(x); }

DP_INLINE vec select(ivec mask, vec a, vec b) {
    for (int i = 0; i < PARTS; i++) a.parts[i] = select(mask.parts[i], a.parts[i], b.parts[i]);
    return a;
}

template <class V, class T>
DP_INLINE V read(const T* p) {
    V v;
    for (int i = 0; i < PARTS; i++) std::memcpy(&v.parts[i], p + i * PART, sizeof v.parts[i]);
    return v;
}

template <class V, class T>
DP_INLINE void write(T* p, V v) {
    for (int i = 0; i < PARTS; i++) std::memcpy(p + i * PART, &v.parts[i], sizeof v.parts[i]);
}

// 16 bits to 32 and back. By default GCC splits a wide register into halves, which is four times the work.
DP_INLINE uvec extend(const hvec& h) {
#if defined(__AVX512F__)
    uvec u;
    u.parts[0] = (uvec::part)_mm512_cvtepu16_epi32((__m256i)h.parts[0]);
    return u;
#else
    return convert<uvec>(h);
#endif
}

DP_INLINE hvec cut(const uvec& u) {
#if defined(__AVX512F__)
    hvec h;
    h.parts[0] = (hvec::part)_mm512_cvtepi32_epi16((__m512i)u.parts[0]);
    return h;
#else
    return convert<hvec>(u);
#endif
}

DP_INLINE vec load(const float* p) { return read<vec>(p); }
DP_INLINE vec load(const bf16* p) { return (vec)(extend(read<hvec>(p)) << 16); }

DP_INLINE vec load(const fp16* p) {
    hvec h = read<hvec>(p);
    vec v;
    for (int i = 0; i < PARTS; i++) v.parts[i] = widen(h.parts[i]);
    return v;
}

DP_INLINE void store(float* p, vec v) { write(p, v); }

DP_INLINE void store(bf16* p, vec v) {  // rounds to nearest even, as torch does
    uvec u = (uvec)v;
    uvec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    uvec nan = (uvec)((u & 0x7fffffffu) > 0x7f800000u);
    write(p, cut((rounded & ~nan) | (nan & 0x7fc0u)));
}

DP_INLINE void store(fp16* p, vec v) {
    hvec h;
    for (int i = 0; i < PARTS; i++) h.parts[i] = narrow(v.parts[i]);
    write(p, h);
}

// The first n < 16 lanes; the others read as zero and are not written.
template <class T>
DP_INLINE vec load_n(const T* p, int64_t n) {
    T buffer[LANES] = {};
    std::memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}

template <class T>
DP_INLINE void store_n(T* p, vec v, int64_t n) {
    T buffer[LANES];
    store(buffer, v);
    std::memcpy(p, buffer, n * sizeof(T));
}

// full(offset) for every 16 elements of a row of `width`, then tail(offset, count) for the rest.
template <class Full, class Tail>
DP_INLINE void for_row(int64_t width, Full full, Tail tail) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) full(i);
    if (i < width) tail(i, width - i);
}

DP_INLINE vec madd(vec a, vec b, vec c) {
    for (int i = 0; i < PARTS; i++) c.parts[i] = madd(a.parts[i], b.parts[i], c.parts[i]);
    return c;
}

DP_INLINE vec max(vec a, vec b) { return select(a > b, a, b); }

// Combines lanes 8 apart, then 4, 2 and 1 apart.
template <class Both>
DP_INLINE float tree(vec v, Both both) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    eight halves[2];
    four quarters[2];
    std::memcpy(halves, v.parts, sizeof halves);
    eight half = both(halves[0], halves[1]);
    std::memcpy(quarters, &half, sizeof quarters);
    four q = both(quarters[0], quarters[1]);
    return both(both(q[0], q[2]), both(q[1], q[3]));
}

DP_INLINE float sum(vec v) {
    return tree(v, [](auto a, auto b) { return a + b; });
}

DP_INLINE float max(vec v) {
    return tree(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x to about 1 ulp; 0 below -87.3, infinity above 88.7, NaN stays NaN, exp(0) is exactly 1.
DP_INLINE vec exp(vec x) {
    const vec low = splat(-87.33654f), high = splat(88.72283f);
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
    ivec under = x < low, over = x > high;
    vec y = select(under, low, select(over, high, x));
    vec shifted = madd(y, splat(1.44269504f), magic);
    vec n = shifted - magic;
    vec r = madd(n, splat(-0.693145752f), y);
    r = madd(n, splat(-1.42860677e-6f), r);
    vec p = splat(1.9875691500e-4f);
    p = madd(p, r, splat(1.3981999507e-3f));
    p = madd(p, r, splat(8.3334519073e-3f));
    p = madd(p, r, splat(4.1665795894e-2f));
    p = madd(p, r, splat(1.6666665459e-1f));
    p = madd(p, r, splat(5.0000001201e-1f));
    p = madd(p, r * r, r) + 1.0f;
    // 2^n in two factors: n reaches 128 at the top of the range, where one exponent field is too small.
    ivec power = (ivec)shifted - 0x4b400000;
    ivec half = power >> 1;
    vec scale = (vec)((half + 127) << 23), rest = (vec)((power - half + 127) << 23);
    vec result = p * scale * rest;
    return select(under, vec{}, select(over, splat(INFINITY), result));
}

DP_INLINE float exp(float x) { return exp(splat(x))[0]; }

// The number of threads for `elements`: small loops, where waking threads costs more than it saves, use the caller
// alone.
inline int64_t team(int64_t threads, int64_t elements) { return elements < 16384 ? 1 : threads; }

}  // namespace dp

// Executes the statement with T = float, dp::bf16 or dp::fp16.
#define DP_DISPATCH(code, T, ...)             \
    do {                                      \
        if ((code) == dp::BF16) {             \
            using T = dp::bf16;               \
            __VA_ARGS__;                      \
        } else if ((code) == dp::FP16) {      \
            using T = dp::fp16;               \
            __VA_ARGS__;                      \
        } else {                              \
            using T = float;                  \
            __VA_ARGS__;                      \
        }                                     \
    } while (0)
