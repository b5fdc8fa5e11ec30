// N-gram lookup: see reference.py.
#include <algorithm>
#include <cstdint>

struct LookupArgs {
    const int32_t* tokens;
    const int64_t *length, *slots, *k;
    int64_t* out;
    int64_t columns, requests, num_drafts, shortest, longest, most_matched;
};

extern "C" void dp_lookup(const LookupArgs* a) {
    for (int64_t r = 0; r < a->requests; r++) {
        int64_t slot = a->slots[r], end = a->length[slot] - 1, best = 0, follows = 0;
        const int32_t* text = a->tokens + slot * a->columns;
        int64_t* drafts = a->out + r * a->num_drafts;
        int64_t most = std::min(a->longest, end);
        // from the newest position backwards, so that the most recent of equally long matches is kept
        for (int64_t place = end - 1; place >= 0 && best < most; place--) {
            int64_t matched = 0;
            while (matched < most && matched <= place && text[place - matched] == text[end - matched]) matched++;
            if (matched > best) {
                best = matched;
                follows = place + 1;
            }
        }
        int64_t wanted = std::max<int64_t>(0, std::min(a->k[r], a->num_drafts));
        int64_t count = best >= a->shortest ? std::min(wanted, end + 1 - follows) : 0;
        for (int64_t i = 0; i < a->num_drafts; i++) drafts[i] = i < count ? text[follows + i] : 0;
        a->out[a->requests * a->num_drafts + r] = count;
        // the match may be longer than what was looked for
        if (best >= a->shortest)
            while (best < a->most_matched && best < follows && text[follows - 1 - best] == text[end - best]) best++;
        a->out[a->requests * (a->num_drafts + 1) + r] = best;
    }
}
