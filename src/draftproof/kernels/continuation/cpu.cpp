// The likeliest continuation of texts: see reference.py.
#include <algorithm>
#include <cstdint>
#include <vector>

static const int32_t END = -1;

struct TextIndex {  // index.py's `_fields`
    int32_t* tokens;
    int64_t *previous, *newest;
    int64_t capacity, buckets, end, oldest;

    int64_t start() const { return std::max(end - capacity, oldest); }
    int32_t at(int64_t place) const { return tokens[(place + capacity) % capacity]; }
    int64_t& newest_of(int32_t first, int32_t second) const {
        // unsigned numbers wrap, which changes no bit below 2^28 of what is left
        const uint64_t pair = uint64_t(int64_t(first)) * 1000003u + uint64_t(int64_t(second));
        return newest[(pair * 2654435761u >> 8) & uint64_t(buckets - 1)];
    }
    void add(const int32_t* given, int64_t count) {
        int32_t before = at(end - 1);
        for (int64_t i = 0; i < count; i++) {
            int64_t& place = newest_of(before, given[i]);
            const int64_t cell = end % capacity;
            tokens[cell] = given[i];
            previous[cell] = place;
            place = end++;
            before = given[i];
        }
    }
};

struct ContinuationArgs {
    TextIndex *shared, **own;
    const int64_t* slots;
    const int32_t* tokens;
    const int64_t *length, *row, *k;
    int64_t* out;
    int64_t columns, requests, num_drafts, longest, most_places;
    double each, least;
};

struct Match {
    int64_t place, length;
};

struct Path {
    double expected = 0.0;
    std::vector<int64_t> tokens;
};

struct Counted {
    int32_t token;
    int64_t count;
};

// Places where at least the last two tokens match, newest first.
static void find(const TextIndex& index, const int32_t* text, int64_t length, const ContinuationArgs* a,
                 std::vector<Match>& matches) {
    matches.clear();
    const int64_t start = index.start(), most = std::min(a->longest, length);
    int64_t num_places = 0, place = index.newest_of(text[length - 2], text[length - 1]);
    while (place > start && num_places < a->most_places) {
        if (place < index.end - 1) {  // skip the text's own end
            num_places++;
            int64_t same = 0;
            while (same < most && place - same >= start && index.at(place - same) == text[length - 1 - same]) same++;
            if (same > 1) matches.push_back({place, same});
        }
        place = index.previous[place % index.capacity];
    }
}

// The path of the commonest next tokens of matches that are at least so long.
static void follow(const TextIndex& index, const std::vector<Match>& matches, int64_t length, int64_t most,
                   double least, std::vector<int64_t>& places, Path& path) {
    std::vector<Counted> counts;
    double likely = 1.0;
    path.expected = 0.0;
    path.tokens.clear();
    places.clear();
    for (const Match& match : matches)
        if (match.length >= length) places.push_back(match.place);
    for (int64_t step = 1; step <= most; step++) {
        int64_t num_ahead = 0;
        counts.clear();
        for (int64_t place : places) {
            const int32_t token = place + step < index.end ? index.at(place + step) : END;
            if (token == END) continue;
            num_ahead++;
            auto found = std::find_if(counts.begin(), counts.end(), [=](const Counted& c) { return c.token == token; });
            if (found == counts.end()) counts.push_back({token, 1});
            else found->count++;
        }
        if (!num_ahead) return;
        const auto best = std::max_element(counts.begin(), counts.end(),
                                           [](const Counted& a, const Counted& b) { return a.count < b.count; });
        likely *= double(best->count) / double(num_ahead);
        if (likely < least) return;
        path.expected += likely;
        path.tokens.push_back(best->token);
        const int32_t token = best->token;
        places.erase(std::remove_if(places.begin(), places.end(),
                                    [&](int64_t place) {
                                        return place + step >= index.end || index.at(place + step) != token;
                                    }),
                     places.end());
    }
}

extern "C" void dp_add_to_text(TextIndex* index, const int32_t* tokens, int64_t count) { index->add(tokens, count); }

extern "C" void dp_continuation(const ContinuationArgs* a) {
    std::vector<Match> matches;
    std::vector<int64_t> lengths, places;
    Path best, path;
    for (int64_t r = 0; r < a->requests; r++) {
        const int64_t row = a->row[r], length = a->length[row], k = std::min(a->k[r], a->num_drafts);
        const int32_t* text = a->tokens + row * a->columns;
        TextIndex* own = a->own[a->slots[r]];
        if (own && length > own->end) own->add(text + own->end, length - own->end);
        best.expected = 0.0;
        best.tokens.clear();
        for (const TextIndex* index : {static_cast<const TextIndex*>(own), static_cast<const TextIndex*>(a->shared)}) {
            if (!own || !index || k <= 0 || length < 2 || a->longest < 2) continue;
            find(*index, text, length, a, matches);
            lengths.clear();
            for (const Match& match : matches) lengths.push_back(match.length);
            std::sort(lengths.begin(), lengths.end(), [](int64_t x, int64_t y) { return x > y; });
            lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
            for (int64_t matched : lengths) {
                const int64_t most = std::min(k, int64_t(double(matched) * a->each));
                follow(*index, matches, matched, most, a->least, places, path);
                if (path.expected > best.expected) std::swap(best, path);
            }
        }
        int64_t* drafts = a->out + r * a->num_drafts;
        const int64_t count = best.tokens.size();
        for (int64_t i = 0; i < a->num_drafts; i++) drafts[i] = i < count ? best.tokens[i] : 0;
        a->out[a->requests * a->num_drafts + r] = count;
    }
}
