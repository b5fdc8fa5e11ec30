// When a drafter that makes one draft after the other stops: see reference.py.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/logits/normalizer.h"

namespace {

struct StoppingArgs {
    const float* logits;
    const int64_t *drawn, *slots, *k;
    const int32_t* tokens;
    const int64_t* length;
    const float* price;
    int64_t *drafts, *bins, *open;
    double *survival, *hits, *trials;  // the last two by bin
    int64_t* is_over;
    const float* ends;
    const double* expected;
    int64_t* count;
    int64_t step, requests, width, columns, most_kept, num_bins, threads;
    double prior_weight, memory;
};

void learn(const StoppingArgs* a, int64_t slot) {
    const int64_t start = a->open[2 * slot], known = std::min(a->open[2 * slot + 1], a->length[slot] - start);
    a->open[2 * slot] = a->open[2 * slot + 1] = 0;
    if (known <= 0) return;
    for (int64_t b = 0; b < a->num_bins; b++) {
        a->hits[b] *= a->memory;
        a->trials[b] *= a->memory;
    }
    const int32_t* text = a->tokens + slot * a->columns + start;
    for (int64_t j = 0; j < known; j++) {
        const int64_t bin = a->bins[slot * a->most_kept + j];
        a->trials[bin] += 1.0;
        if (text[j] != a->drafts[slot * a->most_kept + j]) return;
        a->hits[bin] += 1.0;
    }
}

}  // namespace

extern "C" void dp_stopping(const StoppingArgs* a) {
    const double of_draft = a->price[2], of_row = a->price[3];
    const bool is_free = of_draft == 0.0 && of_row == 0.0;
    if (!a->step) {
        *a->is_over = 0;
        for (int64_t r = 0; r < a->requests; r++) {
            a->count[r] = 0;
            a->survival[a->slots[r]] = 1.0;
            if (!is_free) learn(a, a->slots[r]);
        }
    }
    if (is_free) {
        for (int64_t r = 0; r < a->requests; r++) a->count[r] = std::min(a->k[r], a->step + 1);
        return;
    }
    if (*a->is_over) return;
    std::vector<dp::Normalizer> sums(a->requests);
    dp::normalizers(a->logits, sums.data(), a->requests, a->width, a->threads);
    double gained = 0.0;
    int64_t num_going_on = 0;
    for (int64_t r = 0; r < a->requests; r++) {
        const int64_t slot = a->slots[r];
        double survival = a->survival[slot];
        if (a->step >= a->k[r] || survival == 0.0) continue;
        const float confidence = sums[r].total > 0.0f ? 1.0f / sums[r].total : 0.0f;  // else all are -inf
        int64_t bin = 0;
        while (bin < a->num_bins - 1 && a->ends[bin] < confidence) bin++;
        if (a->step < a->most_kept) {
            a->drafts[slot * a->most_kept + a->step] = a->drawn[r];
            a->bins[slot * a->most_kept + a->step] = bin;
            a->open[2 * slot] = a->length[slot];
            a->open[2 * slot + 1] = a->step + 1;
        }
        a->count[r] = a->step + 1;
        const double chance = (a->hits[bin] + a->prior_weight * a->expected[bin]) / (a->trials[bin] + a->prior_weight);
        survival *= chance;
        const double expected = survival * chance;
        const bool goes_on = a->step + 1 < a->k[r] && expected >= of_row;
        a->survival[slot] = goes_on ? survival : 0.0;
        if (!goes_on) continue;
        gained += expected - of_row;
        num_going_on++;
    }
    *a->is_over = !num_going_on || gained < of_draft;
}
