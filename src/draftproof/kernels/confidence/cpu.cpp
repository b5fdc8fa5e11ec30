// Confidence in drafts that were copied from earlier text: see reference.py.
#include <algorithm>
#include <cstdint>
#include <vector>

struct ConfidenceArgs {
    const int32_t* tokens;
    const int64_t *length, *slots, *drafts, *count, *matched;
    const float* price;
    int64_t *kept, *open;
    double *hits, *trials;
    int64_t* out;
    int64_t columns, requests, num_drafts, kept_columns, num_matched, most_matched;
    double expected, prior_weight, memory;
};

static void learn(const ConfidenceArgs* a, int64_t slot) {
    const int64_t start = a->open[3 * slot], count = a->open[3 * slot + 1], matched = a->open[3 * slot + 2];
    const int64_t known = std::min(count, a->length[slot] - start);
    if (known <= 0) return;
    for (int64_t m = 0; m < a->num_matched; m++) {
        a->hits[m] *= a->memory;
        a->trials[m] *= a->memory;
    }
    const int32_t* text = a->tokens + slot * a->columns + start;
    const int64_t* drafts = a->kept + slot * a->kept_columns;
    for (int64_t j = 0; j < known; j++) {
        a->trials[matched + j] += 1.0;
        if (text[j] != drafts[j]) return;
        a->hits[matched + j] += 1.0;
    }
}

extern "C" void dp_confidence(const ConfidenceArgs* a) {
    const double others = a->price[0], rows = a->price[1];
    if (rows == 0.0) {
        std::copy_n(a->count, a->requests, a->out);
        return;
    }
    for (int64_t r = 0; r < a->requests; r++) learn(a, a->slots[r]);
    std::vector<double> chances(a->num_matched);
    double chance = a->expected;
    for (int64_t m = 0; m < a->num_matched; m++) {
        chance = (a->hits[m] + a->prior_weight * chance) / (a->trials[m] + a->prior_weight);
        chances[m] = chance;
    }
    for (int64_t r = 0; r < a->requests; r++) {
        const int64_t slot = a->slots[r], count = a->count[r];
        const int64_t matched = std::min(a->matched[r], a->most_matched);
        int64_t paying = 0;
        double survival = 1.0, tokens = others + 1.0;
        for (; paying < count; paying++) {
            survival *= chances[matched + paying];
            if (survival * (rows + paying) < tokens) break;
            tokens += survival;
        }
        a->out[r] = paying;
        a->open[3 * slot] = a->length[slot];
        a->open[3 * slot + 1] = count;
        a->open[3 * slot + 2] = matched;
        std::copy_n(a->drafts + r * a->num_drafts, count, a->kept + slot * a->kept_columns);
    }
}
