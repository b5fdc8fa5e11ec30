// Norm and rotation of q and k, and the write of k and v to the paged cache.
#include <vector>

#include "runtime/common.h"
#include "runtime/pool.h"

namespace {

using namespace dp;

struct Shape {
    int64_t rows, heads, kv_heads, head_dim, rotary_dim, block_size, table_width;
    float eps;
};

template <class T>
void to_float(const T* x, float* out, int64_t width) {
    for_row(
        width, [&](int64_t i) { store(out + i, load(x + i)); },
        [&](int64_t i, int64_t n) { store_n(out + i, load_n(x + i, n), n); });
}

template <class T>
void from_float(const float* x, T* out, int64_t width) {
    for_row(
        width, [&](int64_t i) { store(out + i, load(x + i)); },
        [&](int64_t i, int64_t n) { store_n(out + i, load_n(x + i, n), n); });
}

void norm(float* x, const float* weight, int64_t width, float eps) {
    vec total = vec{};
    auto add = [&](vec v) { total = madd(v, v, total); };
    for_row(width, [&](int64_t i) { add(load(x + i)); }, [&](int64_t i, int64_t n) { add(load_n(x + i, n)); });
    vec scale = splat(1.0f / std::sqrt(sum(total) / (float)width + eps));
    for_row(
        width, [&](int64_t i) { store(x + i, load(x + i) * scale * load(weight + i)); },
        [&](int64_t i, int64_t n) { store_n(x + i, load_n(x + i, n) * scale * load_n(weight + i, n), n); });
}

void rotate(float* x, const float* cos, const float* sin, int64_t half) {
    auto turn = [](vec& low, vec& high, vec c, vec s) {
        vec turned = low * c - high * s;
        high = high * c + low * s;
        low = turned;
    };
    for_row(
        half,
        [&](int64_t i) {
            vec low = load(x + i), high = load(x + half + i);
            turn(low, high, load(cos + i), load(sin + i));
            store(x + i, low);
            store(x + half + i, high);
        },
        [&](int64_t i, int64_t n) {
            vec low = load_n(x + i, n), high = load_n(x + half + i, n);
            turn(low, high, load_n(cos + i, n), load_n(sin + i, n));
            store_n(x + i, low, n);
            store_n(x + half + i, high, n);
        });
}

template <class T, class C>
void run(const T* qkv, const int64_t* positions, const int64_t* slots, const float* cos_sin, const float* q_norm,
         const float* k_norm, const float* v_norm, T* q_out, C* k_cache, C* v_cache, const int32_t* table,
         const int64_t* shift, const Shape& s, int64_t threads) {
    int64_t all_heads = s.heads + (v_cache ? 2 : 1) * s.kv_heads, D = s.head_dim;
    int64_t members = team(threads, s.rows * all_heads * D);
    parallel_items(members, s.rows, [&](int64_t r) {
        const T* row = qkv + r * all_heads * D;
        T* q = q_out + r * s.heads * D;
        int64_t position = positions[r];
        if (position < 0) {
            std::memset((void*)q, 0, s.heads * D * sizeof(T));
            return;
        }
        const float* cos = cos_sin + (position + (shift ? shift[slots[r]] : 0)) * s.rotary_dim;
        int64_t half = s.rotary_dim / 2;
        int64_t block = table[slots[r] * s.table_width + position / s.block_size];
        int64_t offset = position % s.block_size;
        float head[MAX_HEAD_DIM];
        for (int64_t h = 0; h < s.heads + s.kv_heads; h++) {
            to_float(row + h * D, head, D);
            bool is_k = h >= s.heads;
            const float* weight = is_k ? k_norm : q_norm;
            if (weight) norm(head, weight, D, s.eps);
            rotate(head, cos, cos + half, half);
            int64_t at = ((block * s.kv_heads + h - s.heads) * s.block_size + offset) * D;
            if (is_k)
                from_float(head, k_cache + at, D);
            else
                from_float(head, q + h * D, D);
        }
        for (int64_t h = 0; v_cache && h < s.kv_heads; h++) {
            to_float(row + (s.heads + s.kv_heads + h) * D, head, D);
            if (v_norm) norm(head, v_norm, D, s.eps);
            from_float(head, v_cache + ((block * s.kv_heads + h) * s.block_size + offset) * D, D);
        }
    });
}

const float* widen(const void* norm, int64_t dtype, int64_t width, float* buffer) {
    if (!norm || dtype == FP32) return (const float*)norm;
    DP_DISPATCH(dtype, T, to_float((const T*)norm, buffer, width));
    return buffer;
}

}  // namespace

struct RopeStoreArgs {
    const void* qkv;
    const int64_t *positions, *slots;
    const float* cos_sin;
    const void *q_norm, *k_norm, *v_norm;  // may be null
    void *q_out, *k_cache, *v_cache;  // v_cache may be null: then rows hold no v
    const int32_t* table;
    const int64_t* shift;  // per slot; may be null
    int64_t rows, heads, kv_heads, head_dim, rotary_dim, block_size, table_width;  // head_dim <= MAX_HEAD_DIM
    int64_t dtype, cache_dtype, norm_dtype, threads;
    double eps;
};

extern "C" void dp_rope_store(const RopeStoreArgs* a) {
    float q_buffer[dp::MAX_HEAD_DIM], k_buffer[dp::MAX_HEAD_DIM], v_buffer[dp::MAX_HEAD_DIM];
    const float* q_weight = widen(a->q_norm, a->norm_dtype, a->head_dim, q_buffer);
    const float* k_weight = widen(a->k_norm, a->norm_dtype, a->head_dim, k_buffer);
    const float* v_weight = widen(a->v_norm, a->norm_dtype, a->head_dim, v_buffer);
    Shape shape = {a->rows,       a->heads,      a->kv_heads,    a->head_dim,
                   a->rotary_dim, a->block_size, a->table_width, (float)a->eps};
    DP_DISPATCH(a->dtype, T, DP_DISPATCH(a->cache_dtype, C,
                                         run((const T*)a->qkv, a->positions, a->slots, a->cos_sin, q_weight, k_weight,
                                             v_weight, (T*)a->q_out, (C*)a->k_cache, (C*)a->v_cache, a->table, a->shift,
                                             shape, a->threads)));
}
