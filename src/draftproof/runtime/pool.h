// One thread pool for all operators: loops are divided into blocks, and any running thread takes the next block.
//
// Bits: a block is computed by one thread in a fixed order, so the number of threads has no effect on results.
//
// Waiting: the caller takes blocks itself, so it never waits for a worker that is not scheduled, only for one that is
// in the middle of a block. A caller that finds the pool in use by another thread computes all its blocks alone.
//
// After fork() a child has its own pool, whose workers start when needed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace dp {

typedef void (*Block)(void* body, int64_t index);

// Calls block(body, i) for each i in [0, count), on at most `members` threads, the caller among them.
void run_blocks(int64_t members, int64_t count, Block block, void* body);

// body(i) for each i in [0, count); each is a block, so it should take some microseconds.
template <class Body>
inline void parallel(int64_t members, int64_t count, Body&& body) {
    if (members <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    using Kept = typename std::remove_reference<Body>::type;
    run_blocks(members, count, [](void* b, int64_t i) { (*(Kept*)b)(i); }, (void*)&body);
}

// Maximum number of blocks per thread; several, so that other threads take over the share of a late one.
constexpr int64_t BLOCKS_EACH = 32;

// body(from, to) over ranges of [0, count), of at least `least` indices unless that leaves fewer ranges than members;
// as many for each member, since with three ranges one of two members waits while the other computes the last. Example:
// 100 over 2 members -> 64 ranges of 1 or 2; with least = 20 -> 4 of 25; with least = 30 or 80 -> 2 of 50.
template <class Body>
inline void parallel_ranges(int64_t members, int64_t count, int64_t least, Body&& body) {
    if (members <= 1) {
        if (count > 0) body((int64_t)0, count);
        return;
    }
    int64_t each = std::min(BLOCKS_EACH, count / (members * std::max<int64_t>(least, 1)));
    int64_t blocks = std::min(members * std::max<int64_t>(each, 1), count);
    parallel(members, blocks, [&](int64_t b) { body(count * b / blocks, count * (b + 1) / blocks); });
}

// body(i) for each i in [0, count), one range per member: for items with little work each.
template <class Body>
inline void parallel_items(int64_t members, int64_t count, Body&& body) {
    parallel_ranges(members, count, count, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) body(i);
    });
}

}  // namespace dp
