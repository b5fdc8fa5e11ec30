// The operators around the products of a mixture of experts: routing, grouping rows by expert, combining outputs.
#include <algorithm>
#include <vector>

#include "runtime/common.h"
#include "runtime/pool.h"

namespace {

using namespace dp;

struct RouteArgs {
    const float* logits;
    const float* bias;  // null: none
    int64_t* experts;
    float* weights;
    int64_t rows, num, top_k, sigmoid, normalize, groups, top_groups, threads;
    double scale;
};

struct GroupArgs {
    const int64_t* experts;
    int64_t* source;
    int64_t* place;
    int64_t* starts;
    int64_t pairs, top_k, num;
};

struct CombineArgs {
    const float* y;
    const int64_t* place;
    const float* weights;
    const void* base;  // null: none
    void* out;
    int64_t rows, top_k, width, dtype, threads;
};

// The first of the largest entries marked `open`, which becomes `taken`. NaN entries can be chosen too, so the result
// is always a valid index.
int64_t take(const float* x, char* marks, int64_t n, char open, char taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (marks[i] == open && (best < 0 || x[i] > x[best])) best = i;
    if (best >= 0) marks[best] = taken;
    return best;
}

void score(const RouteArgs& a, const float* logits, float* scores) {
    float top = -INFINITY, total = 0.0f;
    for (int64_t e = 0; e < a.num; e++) top = std::max(top, logits[e]);
    auto step = [&](vec x) { return a.sigmoid ? 1.0f / (1.0f + dp::exp(-x)) : dp::exp(x - splat(top)); };
    for_row(
        a.num, [&](int64_t i) { store(scores + i, step(load(logits + i))); },
        [&](int64_t i, int64_t n) { store_n(scores + i, step(load_n(logits + i, n)), n); });
    if (a.sigmoid) return;
    for (int64_t e = 0; e < a.num; e++) total += scores[e];
    for (int64_t e = 0; e < a.num; e++) scores[e] = scores[e] / total;
}

// marks: 1 for the experts of the groups with the largest sums of their two best experts, 0 for the others.
void open_groups(const RouteArgs& a, const float* choice, char* marks) {
    int64_t size = a.num / a.groups;
    std::vector<float> sums(a.groups);
    std::vector<char> open(a.groups, 1), seen(size);
    for (int64_t g = 0; g < a.groups; g++) {
        std::fill(seen.begin(), seen.end(), 1);
        const float* own = choice + g * size;
        int64_t first = take(own, seen.data(), size, 1, 0), second = take(own, seen.data(), size, 1, 0);
        sums[g] = own[first] + own[second];
    }
    std::fill(marks, marks + a.num, 0);
    for (int64_t i = 0; i < a.top_groups; i++) {
        int64_t g = take(sums.data(), open.data(), a.groups, 1, 0);
        std::fill(marks + g * size, marks + (g + 1) * size, 1);
    }
}

void route(const RouteArgs& a, int64_t row, float* scores, float* choice, char* marks) {
    score(a, a.logits + row * a.num, scores);
    for (int64_t e = 0; e < a.num; e++) choice[e] = a.bias ? scores[e] + a.bias[e] : scores[e];
    std::fill(marks, marks + a.num, 1);
    if (a.groups > 1) open_groups(a, choice, marks);
    for (int64_t k = 0; k < a.top_k; k++) take(choice, marks, a.num, 1, 2);
    int64_t* experts = a.experts + row * a.top_k;
    float* weights = a.weights + row * a.top_k;
    float total = 0.0f;
    for (int64_t e = 0, k = 0; e < a.num && k < a.top_k; e++) {
        if (marks[e] != 2) continue;
        experts[k] = e;
        weights[k++] = scores[e];
        total += scores[e];
    }
    for (int64_t k = 0; k < a.top_k; k++)
        weights[k] = (a.normalize ? weights[k] / (total + 1e-20f) : weights[k]) * (float)a.scale;
}

template <class T>
void combine_row(const CombineArgs& a, int64_t row) {
    const int64_t* place = a.place + row * a.top_k;
    const float* weights = a.weights + row * a.top_k;
    const T* base = a.base ? (const T*)a.base + row * a.width : nullptr;
    T* out = (T*)a.out + row * a.width;
    for_row(
        a.width,
        [&](int64_t i) {
            vec sum = vec{};
            for (int64_t k = 0; k < a.top_k; k++) sum = sum + weights[k] * load(a.y + place[k] * a.width + i);
            store(out + i, base ? sum + load(base + i) : sum);
        },
        [&](int64_t i, int64_t n) {
            vec sum = vec{};
            for (int64_t k = 0; k < a.top_k; k++) sum = sum + weights[k] * load_n(a.y + place[k] * a.width + i, n);
            store_n(out + i, base ? sum + load_n(base + i, n) : sum, n);
        });
}

}  // namespace

// experts [rows, top_k], ascending; weights [rows, top_k].
extern "C" void dp_route(const RouteArgs* a) {
    int64_t members = std::min(team(a->threads, a->rows * a->num * (4 + a->top_k)), std::max<int64_t>(a->rows, 1));
    parallel_ranges(members, a->rows, a->rows, [&](int64_t first, int64_t last) {
        std::vector<float> scores(a->num), choice(a->num);
        std::vector<char> marks(a->num);
        for (int64_t row = first; row < last; row++) route(*a, row, scores.data(), choice.data(), marks.data());
    });
}

// source [pairs]: the row of each pair, in order of experts; place [pairs]: each pair's index there; starts [num + 1].
extern "C" void dp_group(const GroupArgs* a) {
    std::fill(a->starts, a->starts + a->num + 1, 0);
    for (int64_t p = 0; p < a->pairs; p++) a->starts[a->experts[p] + 1]++;
    for (int64_t e = 0; e < a->num; e++) a->starts[e + 1] += a->starts[e];
    std::vector<int64_t> next(a->starts, a->starts + a->num);
    for (int64_t p = 0; p < a->pairs; p++) {
        int64_t to = next[a->experts[p]]++;
        a->place[p] = to;
        a->source[to] = p / a->top_k;
    }
}

// y [pairs, width] fp32; base and out [rows, width].
extern "C" void dp_combine(const CombineArgs* a) {
    int64_t members = team(a->threads, a->rows * a->width * a->top_k);
    parallel_items(members, a->rows, [&](int64_t row) { DP_DISPATCH(a->dtype, T, combine_row<T>(*a, row)); });
}
