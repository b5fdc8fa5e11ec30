// Processing of logits before the filters, one row at a time. See reference.py for what it computes.
#include <algorithm>
#include <cstdlib>

#include "runtime/common.h"
#include "runtime/pool.h"
#include "kernels/row_params.h"

namespace {

using dp::RowParams;

constexpr int64_t NO_NUMBER = -1, NONE_LEFT = -2, HEADER = 4;

// Rules out the ids that are not in the mask, 32 at a time: a branch for each id took longer than the rest of the row.
void mask(float* row, int64_t width, const uint32_t* allowed) {
    for (int64_t first = 0; first < width; first += 32) {
        uint32_t bits = allowed[first / 32];
        if (bits == ~0u) continue;
        int64_t size = std::min<int64_t>(32, width - first);
        for (int64_t i = 0; i < size; i++) {
            row[first + i] = bits >> i & 1 ? row[first + i] : -INFINITY;
        }
    }
}

void constrain(float* row, int64_t width, const int32_t* list, const int32_t* tokens, int64_t position,
               const RowParams& p) {
    int64_t at_bias = list[0], at_words = list[1], at_mask = list[2], num_stops = list[3];
    if (at_mask) mask(row, width, (const uint32_t*)list + at_mask);
    for (int64_t i = 0, at = at_bias + 1; i < list[at_bias]; i++, at += 2) {
        float bias;
        std::memcpy(&bias, &list[at + 1], sizeof bias);
        row[list[at]] += bias;
    }
    const int32_t* word = list + at_words + 1;
    for (int64_t i = 0; i < list[at_words]; i++) {
        int64_t prefix = word[0] - 1, begin = position - prefix;
        if (begin >= p.prompt_len && !std::memcmp(tokens + begin, word + 1, prefix * sizeof(int32_t))) {
            row[word[1 + prefix]] = -INFINITY;
        }
        word += 1 + word[0];
    }
    if (position < p.held_until) {
        for (int64_t i = 0; i < num_stops; i++) row[list[HEADER + i]] = -INFINITY;
    }
}

void penalise(float* row, int64_t width, const int32_t* tokens, int64_t position, const RowParams& p) {
    // 1 + occurrences in the output for tokens in the context, 0 for all others
    int32_t* seen = (int32_t*)std::calloc(width, sizeof(int32_t));
    for (int64_t i = 0; i < position; i++) {
        int32_t& count = seen[tokens[i]];
        if (!count) count = 1;
        if (i >= p.prompt_len) count++;
    }
    for (int64_t i = 0; i < position; i++) {
        int32_t& count = seen[tokens[i]];
        if (!count) continue;  // done at its first occurrence
        float& x = row[tokens[i]];
        float times = count - 1;
        x = x > 0 ? x / p.repetition : x * p.repetition;
        x = x - p.frequency * times;
        x = x - p.presence * (times > 0 ? 1.0f : 0.0f);
        count = 0;
    }
    std::free(seen);
}

}  // namespace

struct ProcessArgs {
    const float* logits;
    const RowParams* params;
    const int64_t *slots, *positions;
    const int32_t *tokens, *lists, *masks;
    float* out;
    int64_t* failures;
    int64_t rows, width, columns, numbers, threads;
};

extern "C" void dp_process(const ProcessArgs* a) {
    int64_t width = a->width;
    int64_t members = a->rows > 1 ? dp::team(a->threads, a->rows * width) : 1;
    dp::parallel(members, a->rows, [&](int64_t r) {
        const float* logits = a->logits + r * width;
        float* row = a->out + r * width;
        bool is_broken = false, is_finite = false;
        for (int64_t v = 0; v < width; v++) {
            is_broken |= !(logits[v] < INFINITY);  // NaN or inf
            is_finite |= logits[v] > -INFINITY;
            row[v] = logits[v];
        }
        a->failures[r] = is_finite && !is_broken ? NONE_LEFT : NO_NUMBER;
        const RowParams& p = a->params[r];
        int64_t slot = a->slots[r], position = a->positions[r];
        const int32_t* tokens = a->tokens + slot * a->columns;
        if (p.flags & dp::CONSTRAINED) constrain(row, width, a->lists + slot * a->numbers, tokens, position, p);
        if (p.flags & dp::MASKED) mask(row, width, (const uint32_t*)a->masks + r * ((width + 31) / 32));
        if (p.flags & dp::PENALISED) penalise(row, width, tokens, position, p);
    });
}
