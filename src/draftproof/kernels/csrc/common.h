// What every compiled operator shares: 16-lane vectors, loads and stores per dtype, exp, and how many threads a loop is worth.
//
// Bits: a row's arithmetic happens in an order fixed by its width alone. The build uses -ffp-contract=off, and a fused
// multiply-add appears only where `madd` is written, so vector bodies and tails agree.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace dp {

constexpr int LANES = 16;
constexpr int64_t MAX_HEAD_DIM = 1024;
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

struct fp16 {  // kept and loaded only: arithmetic is fp32
    uint16_t bits;
};

enum Dtype : int64_t { FP32 = 0, BF16 = 1, FP16 = 2 };

inline vec splat(float x) { return x - vec{}; }

inline vec select(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

inline vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline vec load(const bf16* p) {
    hvec h;
    std::memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}

// fp16 numbers in fp32: exact, subnormal ones too, whatever the floating-point unit does with its own.
inline vec widen(hvec h) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    __m128i halves[2];
    std::memcpy(halves, &h, sizeof h);
    __m256 wide[2] = {_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])};
    return load((const float*)wide);
#else
    ivec bits = __builtin_convertvector(h, ivec);
    ivec size = (bits & 0x7fff) << 13;  // the exponent is 112 too small for fp32; 224 for what is not finite
    ivec not_finite = size >= 31 << 23;
    vec normal = (vec)(size + (112 << 23) + (not_finite & (112 << 23)));
    const float smallest_normal = 6.103515625e-5f;  // 2^-14, to which a subnormal number is added and taken off
    vec subnormal = (vec)(size + (113 << 23)) - smallest_normal;
    return (vec)((ivec)select(size < 1 << 23, subnormal, normal) | (bits & 0x8000) << 16);
#endif
}

inline hvec narrow(vec v) {  // rounds to nearest even; from 65520 on infinity
#if defined(__AVX512F__)
    return (hvec)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    __m256 wide[2];
    std::memcpy(wide, &v, sizeof v);
    __m128i halves[2] = {_mm256_cvtps_ph(wide[0], _MM_FROUND_TO_NEAREST_INT),
                         _mm256_cvtps_ph(wide[1], _MM_FROUND_TO_NEAREST_INT)};
    hvec h;
    std::memcpy(&h, halves, sizeof h);
    return h;
#else
    ivec bits = (ivec)v, size = bits & 0x7fffffff;
    ivec normal = (size - (112 << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    ivec subnormal = (ivec)((vec)size + 0.5f) - 0x3f000000;  // beside 0.5 the last bit of fp32 is fp16's smallest number
    ivec small = size < 0x38800000, large = size >= 0x47800000, nan = size > 0x7f800000;  // 2^-14, 2^16
    ivec rounded = (small & subnormal) | (~small & ~large & normal) | (large & 0x7c00) | (nan & 0x200);
    return __builtin_convertvector(rounded | ((bits >> 16) & 0x8000), hvec);
#endif
}

inline vec load(const fp16* p) {
    hvec h;
    std::memcpy(&h, p, sizeof h);
    return widen(h);
}

inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

inline void store(bf16* p, vec v) {  // rounds to nearest even, as torch does
    uvec u = (uvec)v;
    uvec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    uvec nan = (uvec)((u & 0x7fffffffu) > 0x7f800000u);
    hvec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), hvec);
    std::memcpy(p, &h, sizeof h);
}

inline void store(fp16* p, vec v) {
    hvec h = narrow(v);
    std::memcpy(p, &h, sizeof h);
}

// The first n < 16 lanes; the others read as zero and are not written.
template <class T>
inline vec load_n(const T* p, int64_t n) {
    T buffer[LANES] = {};
    std::memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}

template <class T>
inline void store_n(T* p, vec v, int64_t n) {
    T buffer[LANES];
    store(buffer, v);
    std::memcpy(p, buffer, n * sizeof(T));
}

// body(offset, load, store) over a row of `width`, 16 elements at a time and then the rest.
template <class Full, class Tail>
inline void for_row(int64_t width, Full full, Tail tail) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) full(i);
    if (i < width) tail(i, width - i);
}

inline vec madd(vec a, vec b, vec c) {  // a * b + c, fused where the machine can
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

inline vec max(vec a, vec b) { return select(a > b, a, b); }

inline float sum(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float lane[LANES];
    store(lane, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

inline float max(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float lane[LANES];
    store(lane, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

// e^x to about 1 ulp; 0 below -87.3, infinity above 88.7, NaN stays NaN, exp(0) is exactly 1.
inline vec exp(vec x) {
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

inline float exp(float x) { return exp(splat(x))[0]; }

// Rows small enough that waking other threads costs more than it saves run on the caller alone.
inline int64_t team(int64_t threads, int64_t elements) { return elements < 16384 ? 1 : threads; }

}  // namespace dp

// Runs the statement with T = float, dp::bf16 or dp::fp16.
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
