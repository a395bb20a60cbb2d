// Copies, casts and hashes many segments of device memory in one launch.
#pragma once

#include <cstdint>

namespace lightrft {

// One row of the table that lightrft/kernels/weight_bucket/cuda.py writes: 12 signed 64-bit words.
// A segment is `rows` runs of `row_elements` elements; the strides are in elements.
struct DeviceSegment {
    std::uint64_t source;
    std::uint64_t destination;  // 0: nothing is stored, the source's bits are hashed
    std::int64_t rows;
    std::int64_t row_elements;
    std::int64_t source_stride;
    std::int64_t destination_stride;
    std::int64_t index_stride;  // from one row to the next in the full tensor
    std::int64_t start;         // index in the full tensor of the first element
    std::int64_t operation;     // Operation
    std::int64_t first_tile;    // tiles of the segments before this one
    std::int64_t hash_slot;     // which hash the segment's is added to
    std::int64_t reserved;
};

enum class Operation : std::int64_t {
    kCopy1 = 0,
    kCopy2 = 1,
    kCopy4 = 2,
    kCopy8 = 3,
    kFloatToBfloat16 = 4,
    kFloatToHalf = 5,
    kBfloat16ToFloat = 6,
    kHalfToFloat = 7,
};

// The unit in which work is dealt out: small, so that no block has much more than another.
constexpr std::int64_t kDeviceTileElements = 1 << 13;

// Runs the table on a stream. No segment is empty; num_tiles is that of all of them. Adds to
// hashes[hash_slot] if hashes is not null. Casts round to nearest even. Returns a CUDA error code, 0 for success.
int launch_segments(
    const DeviceSegment* segments, std::int64_t num_segments, std::int64_t num_tiles,
    unsigned long long* hashes, int device, void* stream);

const char* cuda_error_text(int code);

}  // namespace lightrft
