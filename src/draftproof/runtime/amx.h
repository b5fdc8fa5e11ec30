// AMX tiles: permission to use them, and their configuration.
#pragma once

#include "runtime/common.h"

#if defined(__AMX_BF16__) && defined(DP_DOT) && defined(__linux__)
#define DP_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

namespace dp {

inline bool amx_allowed() {  // Linux requires a request, once per process
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

// Configures tiles of 64-byte rows, at most eight, with these numbers of rows.
inline void amx_configure(std::initializer_list<int64_t> rows) {
    struct alignas(64) {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    int tile = 0;
    for (int64_t count : rows) {
        config.bytes[tile] = 64;
        config.rows[tile++] = (uint8_t)count;
    }
    _tile_loadconfig(&config);
}

}  // namespace dp

#endif
