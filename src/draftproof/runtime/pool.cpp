// The thread pool behind pool.h.
//
// A loop is published as one word, `claims`: the low half is the number of blocks left, the high half the number of
// threads that may take part. A thread takes a block by a compare-and-swap that decrements the low half, which can only
// succeed while blocks are left. A thread that has a block keeps the loop alive, because the caller returns only when
// all blocks are finished. So the other fields are read after taking a block, and never change under a reader.
//
// Example: 16 blocks for 2 threads: claims = 2 << 32 | 16. The thread that swaps in 2 << 32 | 15 computes block 0.
#include "runtime/pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace dp {
namespace {

constexpr int64_t MOST_WORKERS = 255;
// How long an idle worker polls before it sleeps: the operators of a pass follow each other by some microseconds, and
// passes by 150 to 400 (planning, choosing, drafts of the host); waking a worker would make each pass 30 longer. A
// worker that the current loop has no place for counts as idle. (Certification uses more threads than an engine; if the
// extra workers kept polling, they would take a core from the others.)
constexpr std::chrono::microseconds AWAKE(500);
// How long a caller polls for blocks that others hold before it sleeps: a slower worker is most likely descheduled.
constexpr std::chrono::microseconds PATIENCE(50);
constexpr int LOOKS = 64;  // polls between two readings of the clock

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Rounding mode and flushing of subnormal numbers: a worker must use the caller's.
inline uint32_t rounding() {
#if defined(__x86_64__)
    return _mm_getcsr();
#else
    return 0;
#endif
}

inline void set_rounding(uint32_t mode) {
#if defined(__x86_64__)
    if (_mm_getcsr() != mode) _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

class Pool {
  public:
    void run(int64_t members, int64_t count, Block block, void* body) {
        members = std::min(members, MOST_WORKERS + 1);
        if (!used_.try_lock()) {
            for (int64_t i = 0; i < count; i++) block(body, i);
            return;
        }
        std::lock_guard<std::mutex> held(used_, std::adopt_lock);
        hire(members - 1);
        block_ = block;
        body_ = body;
        count_ = count;
        rounding_ = rounding();
        finished_.store(0, std::memory_order_relaxed);
        claims_.store((uint64_t)members << 32 | (uint64_t)count);
        loops_.fetch_add(1);
        if (first_asleep_.load() < members) wake(members);
        work(0);
        wait_for_others(count);
    }

  private:
    void hire(int64_t wanted) {
        for (; workers_ < wanted; workers_++) {
            try {
                std::thread(&Pool::serve, this, workers_ + 1).detach();
            } catch (const std::system_error&) {
                return;  // no more threads available: fewer do the work
            }
        }
    }

    void wake(int64_t members) {
        std::lock_guard<std::mutex> lock(sleep_);
        for (int64_t n = 1; n < members; n++)
            if (asleep_[n]) wake_[n].notify_one();
    }

    // Takes blocks until there is none for thread `number` (the caller is 0); returns whether it took any.
    bool work(int64_t number) {
        bool any = false;
        uint64_t seen = claims_.load();
        while ((uint32_t)seen != 0 && (int64_t)(seen >> 32) > number) {
            if (!claims_.compare_exchange_weak(seen, seen - 1)) continue;
            any = true;
            int64_t count = count_;
            if (number) set_rounding(rounding_);
            block_(body_, count - (int64_t)(uint32_t)seen);
            if (finished_.fetch_add(1) + 1 == count && waiting_.load()) {
                std::lock_guard<std::mutex> lock(sleep_);
                done_.notify_one();
            }
            seen = claims_.load();
        }
        return any;
    }

    void wait_for_others(int64_t count) {
        auto start = std::chrono::steady_clock::now();
        while (finished_.load() != count) {
            for (int i = 0; i < LOOKS && finished_.load() != count; i++) pause();
            if (std::chrono::steady_clock::now() - start < PATIENCE) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            waiting_.store(true);
            done_.wait(lock, [&] { return finished_.load() == count; });
            waiting_.store(false);
        }
    }

    // Whether the current loop has a place for thread `number`.
    bool invited(int64_t number) const { return (int64_t)(claims_.load() >> 32) > number; }

    void serve(int64_t number) {
        auto idle_since = std::chrono::steady_clock::now();
        for (;;) {
            uint64_t loop = loops_.load();
            bool busy = work(number);
            for (int i = 0; i < LOOKS && loops_.load() == loop; i++) pause();
            auto now = std::chrono::steady_clock::now();
            if (busy || (loops_.load() != loop && invited(number))) idle_since = now;
            if (now - idle_since >= AWAKE) {
                sleep(number, loop);
                idle_since = std::chrono::steady_clock::now();
            }
        }
    }

    void sleep(int64_t number, uint64_t loop) {
        std::unique_lock<std::mutex> lock(sleep_);
        asleep_[number] = true;
        note_first_asleep();
        wake_[number].wait(lock, [&] { return loops_.load() != loop && invited(number); });
        asleep_[number] = false;
        note_first_asleep();
    }

    void note_first_asleep() {
        first_asleep_.store(std::find(asleep_, asleep_ + MOST_WORKERS + 1, true) - asleep_);
    }

    std::mutex used_, sleep_;
    std::condition_variable wake_[MOST_WORKERS + 1], done_;  // one per worker, by number; the caller's
    int64_t workers_ = 0;
    bool asleep_[MOST_WORKERS + 1] = {};  // by number
    Block block_ = nullptr;
    void* body_ = nullptr;
    int64_t count_ = 0;
    uint32_t rounding_ = 0;
    // on separate cache lines, since different threads write them all the time
    alignas(64) std::atomic<uint64_t> claims_{0};
    alignas(64) std::atomic<int64_t> finished_{0};
    alignas(64) std::atomic<uint64_t> loops_{0};
    std::atomic<int64_t> first_asleep_{MOST_WORKERS + 1};  // the lowest number of a sleeping worker
    std::atomic<bool> waiting_{false};
};

// Never destroyed: workers outlive main's end.
std::atomic<Pool*> pool{nullptr};

void forget() { pool.store(new Pool); }  // in a child process: workers and lock holders do not exist there

Pool& the_pool() {
    Pool* found = pool.load();
    if (found) return *found;
    static std::mutex once;
    std::lock_guard<std::mutex> lock(once);
    if (!pool.load()) {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, forget);
#endif
        pool.store(new Pool);
    }
    return *pool.load();
}

}  // namespace

void run_blocks(int64_t members, int64_t count, Block block, void* body) {
    the_pool().run(members, count, block, body);
}

}  // namespace dp
