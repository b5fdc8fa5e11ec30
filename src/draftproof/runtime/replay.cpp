// Running a recorded list of operators: see Program in native.py.
#include <cstdint>

struct Call {
    void (*run)(const void*);  // null: the arguments are a Skip
    const void* args;
};

struct Skip {
    const int64_t* flag;
    int64_t count;
};

extern "C" void dp_replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (calls[i].run) {
            calls[i].run(calls[i].args);
            continue;
        }
        const Skip* skip = (const Skip*)calls[i].args;
        if (*skip->flag) i += skip->count;
    }
}
