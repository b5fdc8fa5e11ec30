// Running a recorded list of operators: see Program in native.py.
#include <cstdint>

struct Call {
    void (*run)(const void*);
    const void* args;
};

extern "C" void dp_replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].run(calls[i].args);
}
