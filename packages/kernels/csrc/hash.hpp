// The position-keyed hash that weight_bucket/operations.py defines.
#pragma once

#include <cstdint>

namespace lightrft {

// Hash of numel elements of 1, 2, 4 or 8 bytes; the first one has index `start`.
std::uint64_t hash_range(
    const void* data, std::int64_t numel, int itemsize, std::uint64_t start, int num_threads);

}  // namespace lightrft
