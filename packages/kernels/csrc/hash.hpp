// The position-keyed hash that weight_bucket/reference.py defines.
#pragma once

#include <cstdint>
#include <vector>

#include "hash_keys.hpp"

namespace lightrft {

extern const KeyTable kKeys;

// Hash of numel elements of 1, 2, 4 or 8 bytes; the first one has index `start`.
std::uint64_t hash_range(
    const void* data, std::int64_t numel, int itemsize, std::uint64_t start);

// Sums of mixed elements inside one block: elements of `itemsize` 1, 2 or 4 bytes whose first has
// place `place`, the block's mask applied, its factor not.
using SumBlock = std::uint64_t (*)(
    const void* values, std::int64_t count, std::int64_t place, std::uint32_t mask);

// For 1, 2 and 4 bytes; only on processors with AVX2.
extern const SumBlock kSumBlockAvx2[3];

}  // namespace lightrft
