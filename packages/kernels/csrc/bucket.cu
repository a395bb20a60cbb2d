#include "bucket.cuh"

#include <cuda_runtime.h>

namespace lightrft {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
// Vectors in flight for each thread; the compiler for sm_100 has registers for fewer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kUnroll = 2;
#else
constexpr int kUnroll = 4;
#endif
// What the registers of the kernels with and without hash leave room for.
constexpr int kBlocksWithHash = 2;
constexpr int kBlocksWithoutHash = 3;

__device__ __forceinline__ std::uint64_t mix64(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The hash of one element: its bits keyed by its index in the full tensor.
__device__ __forceinline__ std::uint64_t keyed(std::uint64_t bits, std::uint64_t index) {
    return mix64(bits ^ mix64(index));
}

__device__ __forceinline__ std::uint32_t pack_bfloat16(float low, float high) {
    std::uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ __forceinline__ std::uint32_t pack_half(float low, float high) {
    std::uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ __forceinline__ float half_to_float(std::uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// How one element becomes another, and `kVector` elements at a time. A destination vector is
// 16 bytes; loads bypass L1 and stores are marked as streaming: nothing is read twice.
template <typename Bits>
struct Copy {
    using Source = Bits;
    using Destination = Bits;
    static constexpr int kVector = kVectorBytes / sizeof(Bits);
    __device__ static Bits element(Bits value) { return value; }
    __device__ static uint4 vector(const Bits* source) {
        return __ldcs(reinterpret_cast<const uint4*>(source));
    }
};

template <bool IsBfloat16>
struct Narrow {
    using Source = float;
    using Destination = std::uint16_t;
    static constexpr int kVector = 8;
    __device__ static std::uint32_t pair(float low, float high) {
        return IsBfloat16 ? pack_bfloat16(low, high) : pack_half(low, high);
    }
    __device__ static std::uint16_t element(float value) {
        return static_cast<std::uint16_t>(pair(value, 0.0f));
    }
    __device__ static uint4 vector(const float* source) {
        const float4 a = __ldcs(reinterpret_cast<const float4*>(source));
        const float4 b = __ldcs(reinterpret_cast<const float4*>(source) + 1);
        return make_uint4(pair(a.x, a.y), pair(a.z, a.w), pair(b.x, b.y), pair(b.z, b.w));
    }
};

template <bool IsBfloat16>
struct Widen {
    using Source = std::uint16_t;
    using Destination = std::uint32_t;
    static constexpr int kVector = 4;
    __device__ static std::uint32_t element(std::uint16_t bits) {
        return IsBfloat16 ? static_cast<std::uint32_t>(bits) << 16
                          : __float_as_uint(half_to_float(bits));
    }
    __device__ static uint4 vector(const std::uint16_t* source) {
        const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(source));
        return make_uint4(element(raw.x & 0xffffu), element(raw.x >> 16),
                          element(raw.y & 0xffffu), element(raw.y >> 16));
    }
};

// Sum of the hashes of the elements of one vector.
template <typename Destination>
__device__ std::uint64_t hash_vector(uint4 vector, std::uint64_t index) {
    const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    std::uint64_t total = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        if constexpr (sizeof(Destination) == 8) {
            if (word % 2 == 0) {
                const std::uint64_t bits =
                    words[word] | static_cast<std::uint64_t>(words[word + 1]) << 32;
                total += keyed(bits, index + word / 2);
            }
        } else {
            constexpr int kPerWord = 4 / sizeof(Destination);
            constexpr int kBits = 8 * sizeof(Destination);
#pragma unroll
            for (int part = 0; part < kPerWord; ++part) {
                std::uint32_t bits = words[word] >> (part * kBits % 32);
                if constexpr (kBits < 32) {
                    bits &= (1u << kBits) - 1;
                }
                total += keyed(bits, index + word * kPerWord + part);
            }
        }
    }
    return total;
}

// One contiguous run, shared by the block's threads; `destination` may be null.
template <typename Element, bool WithHash>
__device__ std::uint64_t run(
    const typename Element::Source* source, typename Element::Destination* destination,
    std::int64_t count, std::uint64_t index) {
    using Destination = typename Element::Destination;
    std::uint64_t total = 0;
    const auto one = [&](std::int64_t i) {
        const Destination bits = Element::element(source[i]);
        if (destination != nullptr) {
            destination[i] = bits;
        }
        if constexpr (WithHash) {
            total += keyed(bits, index + i);
        }
    };
    // Elements before the first 16-byte boundary of the destination (of the source if there is
    // none) are done one by one, and so is all of a run whose ends are not aligned alike.
    const auto anchor = destination != nullptr ? reinterpret_cast<std::uintptr_t>(destination)
                                               : reinterpret_cast<std::uintptr_t>(source);
    const std::size_t anchor_size =
        destination != nullptr ? sizeof(Destination) : sizeof(typename Element::Source);
    std::int64_t head = (kVectorBytes - anchor % kVectorBytes) % kVectorBytes / anchor_size;
    head = head < count ? head : count;
    constexpr std::size_t kSourceBytes = Element::kVector * sizeof(typename Element::Source);
    constexpr std::size_t kSourceAlign = kSourceBytes < kVectorBytes ? kSourceBytes : kVectorBytes;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(source + head) % kSourceAlign == 0;
    const std::int64_t vectors = is_aligned ? (count - head) / Element::kVector : 0;
    for (std::int64_t i = threadIdx.x; i < head; i += kThreads) {
        one(i);
    }
    for (std::int64_t base = threadIdx.x; base < vectors; base += kThreads * kUnroll) {
        uint4 values[kUnroll];
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) {
            const std::int64_t vector = base + step * kThreads;
            if (vector < vectors) {
                values[step] = Element::vector(source + head + vector * Element::kVector);
            }
        }
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) {
            const std::int64_t vector = base + step * kThreads;
            if (vector < vectors) {
                const std::int64_t first = head + vector * Element::kVector;
                if (destination != nullptr) {
                    __stcs(reinterpret_cast<uint4*>(destination + first), values[step]);
                }
                if constexpr (WithHash) {
                    total += hash_vector<Destination>(values[step], index + first);
                }
            }
        }
    }
    for (std::int64_t i = head + vectors * Element::kVector + threadIdx.x; i < count;
         i += kThreads) {
        one(i);
    }
    return total;
}

// The elements [first, first + count) of a segment, row by row.
template <typename Element, bool WithHash>
__device__ std::uint64_t run_rows(
    const DeviceSegment& segment, std::int64_t first, std::int64_t count) {
    const auto* source = reinterpret_cast<const typename Element::Source*>(segment.source);
    auto* destination = reinterpret_cast<typename Element::Destination*>(segment.destination);
    std::uint64_t total = 0;
    while (count > 0) {
        const std::int64_t row = first / segment.row_elements;
        const std::int64_t column = first - row * segment.row_elements;
        const std::int64_t rest = segment.row_elements - column;
        const std::int64_t length = count < rest ? count : rest;
        total += run<Element, WithHash>(
            source + row * segment.source_stride + column,
            destination == nullptr ? nullptr
                                   : destination + row * segment.destination_stride + column,
            length,
            static_cast<std::uint64_t>(segment.start + row * segment.index_stride + column));
        first += length;
        count -= length;
    }
    return total;
}

template <bool WithHash>
__device__ std::uint64_t run_tile(
    const DeviceSegment& segment, std::int64_t first, std::int64_t count) {
    switch (static_cast<Operation>(segment.operation)) {
        case Operation::kCopy1:
            return run_rows<Copy<std::uint8_t>, WithHash>(segment, first, count);
        case Operation::kCopy2:
            return run_rows<Copy<std::uint16_t>, WithHash>(segment, first, count);
        case Operation::kCopy4:
            return run_rows<Copy<std::uint32_t>, WithHash>(segment, first, count);
        case Operation::kCopy8:
            return run_rows<Copy<std::uint64_t>, WithHash>(segment, first, count);
        case Operation::kFloatToBfloat16:
            return run_rows<Narrow<true>, WithHash>(segment, first, count);
        case Operation::kFloatToHalf:
            return run_rows<Narrow<false>, WithHash>(segment, first, count);
        case Operation::kBfloat16ToFloat:
            return run_rows<Widen<true>, WithHash>(segment, first, count);
        case Operation::kHalfToFloat:
            return run_rows<Widen<false>, WithHash>(segment, first, count);
    }
    return 0;
}

template <bool WithHash>
__global__ void __launch_bounds__(kThreads, WithHash ? kBlocksWithHash : kBlocksWithoutHash)
run_segments(
    const DeviceSegment* __restrict__ segments, const std::int32_t* __restrict__ tile_segments,
    std::int64_t num_tiles, unsigned long long* __restrict__ hashes) {
    for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const DeviceSegment& segment = segments[tile_segments[tile]];
        const std::int64_t first = (tile - segment.first_tile) * kDeviceTileElements;
        const std::int64_t rest = segment.rows * segment.row_elements - first;
        std::uint64_t total = run_tile<WithHash>(
            segment, first, rest < kDeviceTileElements ? rest : kDeviceTileElements);
        if constexpr (WithHash) {
            for (int offset = 16; offset > 0; offset /= 2) {
                total += __shfl_down_sync(0xffffffffu, total, offset);
            }
            // Sums mod 2^64 do not depend on the order in which warps arrive.
            if (threadIdx.x % 32 == 0 && total != 0) {
                atomicAdd(hashes + segment.hash_slot, static_cast<unsigned long long>(total));
            }
        }
    }
}

}  // namespace

int launch_segments(
    const DeviceSegment* segments, const std::int32_t* tile_segments, std::int64_t num_tiles,
    unsigned long long* hashes, int device, void* stream) {
    int previous = 0;
    int multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&previous);
    if (error == cudaSuccess && previous != device) {
        error = cudaSetDevice(device);
    }
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error == cudaSuccess && num_tiles > 0) {
        const int per_multiprocessor = hashes != nullptr ? kBlocksWithHash : kBlocksWithoutHash;
        const std::int64_t limit = static_cast<std::int64_t>(multiprocessors) * per_multiprocessor;
        const auto blocks = static_cast<unsigned>(num_tiles < limit ? num_tiles : limit);
        const auto queue = static_cast<cudaStream_t>(stream);
        if (hashes != nullptr) {
            run_segments<true><<<blocks, kThreads, 0, queue>>>(
                segments, tile_segments, num_tiles, hashes);
        } else {
            run_segments<false><<<blocks, kThreads, 0, queue>>>(
                segments, tile_segments, num_tiles, hashes);
        }
        error = cudaGetLastError();
    }
    if (previous != device) {
        cudaSetDevice(previous);
    }
    return static_cast<int>(error);
}

const char* cuda_error_text(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

}  // namespace lightrft
