// Confidence in drafts that were copied from earlier text: see reference.py.
#include <algorithm>
#include <cstdint>
#include <vector>

struct ConfidenceArgs {
    const int32_t* tokens;
    const int64_t *length, *slots, *drafts, *count, *matched;
    const float* price;
    int64_t *kept, *open;
    double *hits, *trials;  // of each branching, by matching tokens
    int64_t* out;
    int64_t columns, requests, num_drafts, kept_columns, num_branchings, num_matched, most_matched, looked_back;
    double expected, prior_weight, memory;
};

enum Branching : int64_t { UNKNOWN, ALIKE, DIFFERENT };

// The branching after `num_drafts` drafts that follow the first `length` tokens of a text.
static Branching branching(const int32_t* text, int64_t length, const int64_t* drafts, int64_t num_drafts,
                           int64_t looked_back) {
    const int64_t first = std::max<int64_t>(0, length - looked_back);
    if (length - first + num_drafts < 2) return UNKNOWN;
    const auto at = [&](int64_t place) { return place < length ? int64_t(text[place]) : drafts[place - length]; };
    const int64_t end = length + num_drafts, before = at(end - 2), newest = at(end - 1);
    int64_t latest = -1;  // a place with both tokens that a known one follows
    for (int64_t place = length - 3; place >= first; place--) {
        if (text[place + 1] != newest || text[place] != before) continue;
        if (latest >= 0) return text[place + 2] == text[latest + 2] ? ALIKE : DIFFERENT;
        latest = place;
    }
    return UNKNOWN;
}

static void learn(const ConfidenceArgs* a, int64_t slot) {
    const int64_t start = a->open[3 * slot], count = a->open[3 * slot + 1], matched = a->open[3 * slot + 2];
    const int64_t known = std::min(count, a->length[slot] - start);
    if (known <= 0) return;
    for (int64_t m = 0; m < a->num_branchings * a->num_matched; m++) {
        a->hits[m] *= a->memory;
        a->trials[m] *= a->memory;
    }
    const int32_t* text = a->tokens + slot * a->columns;
    const int64_t* drafts = a->kept + slot * a->kept_columns;
    for (int64_t j = 0; j < known; j++) {
        const int64_t place = branching(text, start, drafts, j, a->looked_back) * a->num_matched + matched + j;
        a->trials[place] += 1.0;
        if (text[start + j] != drafts[j]) return;
        a->hits[place] += 1.0;
    }
}

extern "C" void dp_confidence(const ConfidenceArgs* a) {
    const double others = a->price[0], rows = a->price[1];
    if (rows == 0.0) {
        std::copy_n(a->count, a->requests, a->out);
        return;
    }
    for (int64_t r = 0; r < a->requests; r++) learn(a, a->slots[r]);
    std::vector<double> chances(a->num_branchings * a->num_matched);
    for (int64_t b = 0, place = 0; b < a->num_branchings; b++) {
        double chance = a->expected;
        for (int64_t m = 0; m < a->num_matched; m++, place++) {
            chance = (a->hits[place] + a->prior_weight * chance) / (a->trials[place] + a->prior_weight);
            chances[place] = chance;
        }
    }
    for (int64_t r = 0; r < a->requests; r++) {
        const int64_t slot = a->slots[r], count = a->count[r], length = a->length[slot];
        const int64_t matched = std::min(a->matched[r], a->most_matched);
        const int32_t* text = a->tokens + slot * a->columns;
        const int64_t* drafts = a->drafts + r * a->num_drafts;
        int64_t paying = 0;
        double survival = 1.0, tokens = others + 1.0;
        for (; paying < count; paying++) {
            const int64_t b = branching(text, length, drafts, paying, a->looked_back);
            survival *= chances[b * a->num_matched + matched + paying];
            if (survival * (rows + paying) < tokens) break;
            tokens += survival;
        }
        a->out[r] = paying;
        a->open[3 * slot] = length;
        a->open[3 * slot + 1] = count;
        a->open[3 * slot + 2] = matched;
        std::copy_n(drafts, count, a->kept + slot * a->kept_columns);
    }
}
