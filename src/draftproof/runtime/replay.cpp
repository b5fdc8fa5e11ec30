// Running a recorded list of operators: see Program in native.py.
//
// Where other programs run, a thread that is not scheduled while it has a block holds up all others, and one thread
// fewer can be faster. How many take part changes no bits, so both ways are tried and the faster one is taken; on a
// machine of its own a program never leaves a thread out.
#include "runtime/pool.h"

#include <chrono>
#include <cstdint>

struct Call {
    void (*run)(const void*);
    const void* args;
};

// Moving averages over the runs of one program. Zeros at the start: not known.
struct Runs {
    double waited;      // share of the time, with all threads, that went by waiting for one that was not scheduled
    double seconds[2];  // of a run with all threads, and with one left out
    int64_t number;     // of runs that could choose
};

namespace {

constexpr double DISTURBED = 0.05;  // least share of waiting at which leaving one out is tried
constexpr double RATE = 0.1;        // weight of a new run
constexpr int64_t FIRST = 4;        // runs that try the unknown way
constexpr int64_t EVERY = 16;       // one in so many tries the slower way again

void take_in(double& average, double found) { average = average > 0 ? average + RATE * (found - average) : found; }

}  // namespace

// Number of threads that the next run leaves out: 0 or 1.
extern "C" int64_t dp_leave_out(Runs* runs) {
    if (runs->waited < DISTURBED) return 0;
    int64_t number = runs->number++;
    if (number < FIRST) return 1;
    bool is_faster = runs->seconds[1] < runs->seconds[0];
    return is_faster != (number % EVERY == 0);
}

// A run that left out `left_out` threads took `seconds`, `waited` of them for threads that were not scheduled.
extern "C" void dp_note_run(Runs* runs, int64_t left_out, double seconds, double waited) {
    take_in(runs->seconds[left_out], seconds);
    if (!left_out && seconds > 0) runs->waited += RATE * (waited / seconds - runs->waited);
}

extern "C" void dp_replay(const Call* calls, int64_t count, Runs* runs) {
    dp::left_out = dp_leave_out(runs);
    dp::waited = 0;
    auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; i++) calls[i].run(calls[i].args);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    dp_note_run(runs, dp::left_out, seconds, dp::waited);
    dp::left_out = 0;
}
