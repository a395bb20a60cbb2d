// Copies, casts and hashes flat ranges of host memory.
#pragma once

#include <cstdint>
#include <vector>

namespace lightrft {

// Codes are those of lightrft/kernels/weight_bucket/native.py.
enum class Cast : int {
    kNone = 0,
    kFloatToBfloat16 = 1,
    kFloatToHalf = 2,
    kBfloat16ToFloat = 3,
    kHalfToFloat = 4,
};

struct CopySegment {
    const char* source;
    char* destination;  // null: only hashed
    std::int64_t numel;
    Cast cast;
    std::int64_t itemsize;  // bytes of one destination element
    std::uint64_t start;    // index in the full tensor of the first element
};

// Casts round to nearest even, bit for bit as torch does on the CPU. Ranges must not overlap.
// bf16_nan: the bits every NaN becomes in bfloat16. hashes: null, or one number a segment that its
// hash, after the cast, is added to.
void run_segments(
    const std::vector<CopySegment>& segments, std::uint16_t bf16_nan, int num_threads,
    std::uint64_t* hashes);

}  // namespace lightrft
