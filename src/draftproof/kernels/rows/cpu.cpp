// Moving rows: gathering them by index, laying parts side by side.
#include <cstdint>
#include <cstring>

struct GatherArgs {
    const char* table;
    const int64_t* index;
    char* out;
    int64_t rows, row_bytes;
};

extern "C" void dp_gather(const GatherArgs* a) {
    for (int64_t r = 0; r < a->rows; r++) {
        int64_t from = a->index[r] < 0 ? 0 : a->index[r];
        std::memcpy(a->out + r * a->row_bytes, a->table + from * a->row_bytes, a->row_bytes);
    }
}

struct PlaceArgs {
    const char* part;
    char* out;
    int64_t rows, part_bytes, out_bytes;
};

// Copies a part into its columns of a wider matrix; `out` points at the first of them.
extern "C" void dp_place(const PlaceArgs* a) {
    for (int64_t r = 0; r < a->rows; r++)
        std::memcpy(a->out + r * a->out_bytes, a->part + r * a->part_bytes, a->part_bytes);
}

struct SwapArgs {
    const char* x;
    char* out;
    int64_t rows, parts, part_bytes;
};

// Part b of row a goes to row a of the b-th group of rows.
extern "C" void dp_swap(const SwapArgs* s) {
    for (int64_t a = 0; a < s->rows; a++)
        for (int64_t b = 0; b < s->parts; b++)
            std::memcpy(s->out + (b * s->rows + a) * s->part_bytes, s->x + (a * s->parts + b) * s->part_bytes,
                        s->part_bytes);
}
