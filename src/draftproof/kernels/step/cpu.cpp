// The bookkeeping of a step. See spec.py, and reference.py for what each function computes.
#include <algorithm>
#include <cstdint>

struct FillArgs {
    const int32_t* tokens;
    const int64_t *length, *computed, *draft_count, *work;
    int64_t* out;
    int64_t columns, rows, sampled, requests;
};

extern "C" void dp_fill(const FillArgs* a) {
    int64_t T = a->rows, M = a->sampled, R = a->requests;
    int64_t *tokens = a->out, *positions = tokens + T, *ends = positions + T, *slots = ends + T;
    int64_t *sampled = slots + T, *sampled_slots = sampled + M, *sampled_positions = sampled_slots + M;
    int64_t *cu = sampled_positions + M, *first = cu + R + 1, *lengths = first + R, *drafts = lengths + R;
    int64_t row = 0, m = 0;
    cu[0] = 0;
    for (int64_t r = 0; r < R; r++) {
        int64_t slot = a->work[r], num_rows = a->work[R + r], num_sampled = a->work[2 * R + r];
        first[r] = m;
        lengths[r] = a->length[slot];
        drafts[r] = std::min(a->draft_count[slot], std::max<int64_t>(num_sampled - 1, 0));
        for (int64_t i = 0; i < num_rows; i++, row++) {
            int64_t position = a->computed[slot] + i;
            tokens[row] = a->tokens[slot * a->columns + position];
            positions[row] = position;
            ends[row] = position + 1;
            slots[row] = slot;
            if (i >= num_rows - num_sampled) {
                sampled[m] = row;
                sampled_slots[m] = slot;
                sampled_positions[m++] = position + 1;
            }
        }
        cu[r + 1] = row;
    }
}

struct AcceptArgs {
    const int32_t* tokens;
    const int64_t *slots, *num, *first, *lengths, *draft_count, *sampled;
    int64_t* out;
    int64_t columns, requests, width;
};

extern "C" void dp_accept(const AcceptArgs* a) {
    int64_t R = a->requests, W = a->width;
    int64_t* emitted = a->out + R * W;
    for (int64_t r = 0; r < R; r++) {
        const int32_t* drafts = a->tokens + a->slots[r] * a->columns + a->lengths[r];
        const int64_t* sampled = a->sampled + a->first[r];
        int64_t k = 0;
        while (k < a->draft_count[r] && drafts[k] == sampled[k]) k++;
        emitted[r] = a->num[r] > 0 ? k + 1 : 0;
        for (int64_t w = 0; w < W; w++) a->out[r * W + w] = w < emitted[r] ? sampled[w] : -1;
    }
}

struct CommitArgs {
    int32_t* tokens;
    int64_t *length, *computed, *draft_count;
    const int64_t *limit, *work, *lengths, *emitted_tokens, *emitted, *wanted;
    int64_t* out;
    int64_t columns, requests, width;
};

extern "C" void dp_commit(const CommitArgs* a) {
    int64_t R = a->requests, W = a->width;
    int64_t *live = a->out, *next = live + R, *k = next + R, *length = k + R;
    for (int64_t r = 0; r < R; r++) {
        int64_t slot = a->work[r], num_rows = a->work[R + r], num_sampled = a->work[2 * R + r];
        int32_t* tokens = a->tokens + slot * a->columns;
        for (int64_t w = 0; w < W; w++)
            tokens[a->lengths[r] + w] = (int32_t)std::max<int64_t>(a->emitted_tokens[r * W + w], 0);
        int64_t is_open = a->lengths[r] < a->limit[slot];
        length[r] = a->lengths[r] + is_open * a->emitted[r];
        live[r] = is_open * (num_sampled > 0 ? num_rows - num_sampled + a->emitted[r] : num_rows);
        a->length[slot] = length[r];
        a->computed[slot] += live[r];
        a->draft_count[slot] = 0;
        next[r] = tokens[a->computed[slot]];
        k[r] = std::min(a->wanted[r], std::max<int64_t>(a->limit[slot] - length[r] - 1, 0));
    }
}

struct DraftRowsArgs {
    const int64_t *cu, *tokens, *positions, *slots, *live, *next, *k;
    int64_t* out;
    int64_t requests, rows, draft_rows, context, shift, anchor, masks, num_read, mask_token, num_drafts;
};

extern "C" void dp_draft_rows(const DraftRowsArgs* a) {
    int64_t R = a->requests, N = a->draft_rows, J = a->num_read, K = a->num_drafts, extra = a->anchor + a->masks;
    int64_t *tokens = a->out, *positions = tokens + N, *slots = positions + N, *source = slots + N;
    int64_t *ends = source + N, *read = ends + N;
    int64_t *drawn = read + R * J, *read_positions = drawn + K * R, *read_ends = read_positions + K * R;
    int64_t n = 0;
    for (int64_t r = 0; r < R; r++) {
        int64_t begin = a->cu[r], live = a->live[r], last = begin + std::max<int64_t>(live - 1, 0);
        int64_t newest = a->positions[last] + 1, count = a->context == 2 ? live : std::min(live, a->context);
        int64_t share = extra + (a->context == 2 ? a->cu[r + 1] - begin : a->context);
        int64_t first_read = std::max<int64_t>(0, n + count + extra - J);
        for (int64_t j = 0; j < J; j++) read[r * J + j] = first_read + j;
        for (int64_t i = 0; i < share; i++, n++) {
            int64_t past = i - count;  // positions of rows after the context continue from the last live target row
            int64_t from = past < 0 ? last + 1 - count + i : last, token_at = from + a->shift;
            bool is_next = past < 0 ? token_at > last : past == 0 && a->anchor;
            bool is_mask = a->masks && past >= a->anchor;
            slots[n] = a->slots[r];
            positions[n] = live == 0 || past >= extra ? -1 : past < 0 ? a->positions[from] : newest + past;
            ends[n] = positions[n] + 1;
            tokens[n] = is_mask ? a->mask_token
                                : is_next ? a->next[r] : a->tokens[std::min(token_at, a->rows - 1)];
            source[n] = is_mask ? a->rows : from;
        }
        for (int64_t k = 0; k < K; k++) {
            drawn[k * R + r] = k < a->k[r] ? newest + 1 + k : -1;
            read_positions[k * R + r] = k < a->k[r] ? positions[first_read] + k : -1;
            read_ends[k * R + r] = read_positions[k * R + r] + 1;
        }
    }
}

struct StoreArgs {
    int32_t* tokens;
    const int64_t* length;
    int64_t* draft_count;
    const int64_t *slots, *drafts, *count, *k;
    int64_t* out;
    int64_t columns, requests, num_drafts, vocab_size, never, never_either;
};

extern "C" void dp_store_drafts(const StoreArgs* a) {
    for (int64_t r = 0; r < a->requests; r++) {
        int64_t slot = a->slots[r], good = 0;
        int64_t claimed = std::max<int64_t>(0, std::min({a->count[r], a->k[r], a->num_drafts}));
        const int64_t* drafts = a->drafts + r * a->num_drafts;
        int32_t* to = a->tokens + slot * a->columns + a->length[slot];
        auto is_id = [&](int64_t draft) { return draft >= 0 && draft < a->vocab_size; };
        auto is_token = [&](int64_t draft) { return is_id(draft) && draft != a->never && draft != a->never_either; };
        while (good < claimed && is_token(drafts[good])) good++;
        for (int64_t i = 0; i < a->num_drafts; i++)
            to[i] = (int32_t)std::max<int64_t>(0, std::min(drafts[i], a->vocab_size - 1));
        a->draft_count[slot] = a->out[r] = good;
        a->out[a->requests + r] = good < claimed && !is_id(drafts[good]);
    }
}
