#include "bucket.cuh"

#include <cuda_runtime.h>

#include "hash_keys.hpp"

namespace lightrft {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;
constexpr int kUnroll = 4;  // vectors in flight for each thread
// A source that is shifted takes half as much memory again on its way.
constexpr int kUnrollShifted = 2;
// What the registers of the kernels with and without hash leave room for.
constexpr int kBlocksWithHash = 2;
constexpr int kBlocksWithoutHash = 3;

__device__ const KeyTable device_keys = make_key_table();

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

template <int kCount>
struct Words {
    std::uint32_t word[kCount];
};

// The widest access for a load of this many words.
template <int kCount>
constexpr int kAccessWords = kCount < 4 ? kCount : 4;

template <int kCount, bool IsStreaming>
__device__ Words<kCount> load_aligned(const std::uint32_t* source) {
    Words<kCount> out;
    if constexpr (kAccessWords<kCount> == 4) {
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const auto* vector = reinterpret_cast<const uint4*>(source) + i;
            const uint4 raw = IsStreaming ? __ldcs(vector) : __ldg(vector);
            out.word[4 * i] = raw.x;
            out.word[4 * i + 1] = raw.y;
            out.word[4 * i + 2] = raw.z;
            out.word[4 * i + 3] = raw.w;
        }
    } else {
        static_assert(kCount == 2);
        const auto* vector = reinterpret_cast<const uint2*>(source);
        const uint2 raw = IsStreaming ? __ldcs(vector) : __ldg(vector);
        out.word[0] = raw.x;
        out.word[1] = raw.y;
    }
    return out;
}

// Words that begin `skip` bytes, 0 < skip < access, after an aligned address: wide loads of all
// memory that has a part in them, then shifts. Elements are never cut, so `skip` is a multiple of
// their size. Neighbouring threads load the same vectors: they come from L1.
template <int kCount, int kElementBytes>
__device__ Words<kCount> load_shifted(const std::uint32_t* aligned, unsigned skip) {
    constexpr int kAccess = kAccessWords<kCount>;
    const Words<kCount> low = load_aligned<kCount, false>(aligned);
    const Words<kAccess> high = load_aligned<kAccess, false>(aligned + kCount);
    std::uint32_t word[kCount + kAccess];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        word[i] = low.word[i];
    }
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
        word[kCount + i] = high.word[i];
    }
    if constexpr (kAccess == 4) {
#pragma unroll
        for (int i = 0; i < kCount + 2; ++i) {
            word[i] = skip & 8u ? word[i + 2] : word[i];
        }
    }
    if constexpr (kElementBytes <= 4) {
#pragma unroll
        for (int i = 0; i < kCount + 1; ++i) {
            word[i] = skip & 4u ? word[i + 1] : word[i];
        }
    }
    Words<kCount> out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        out.word[i] = kElementBytes < 4
                          ? __funnelshift_r(word[i], word[i + 1], 8u * (skip & 3u))
                          : word[i];
    }
    return out;
}

// How one element becomes another, and a vector of 16 bytes of them at a time. Loads of aligned
// sources and all stores are marked as streaming: nothing is read twice.
template <typename Bits>
struct Copy {
    using Source = Bits;
    using Destination = Bits;
    __device__ static Bits element(Bits value) { return value; }
    __device__ static Words<4> vector(const Words<4>& source) { return source; }
};

template <bool IsBfloat16>
struct Narrow {
    using Source = float;
    using Destination = std::uint16_t;
    __device__ static std::uint32_t pair(float low, float high) {
        return IsBfloat16 ? pack_bfloat16(low, high) : pack_half(low, high);
    }
    __device__ static std::uint16_t element(float value) {
        return static_cast<std::uint16_t>(pair(value, 0.0f));
    }
    __device__ static Words<4> vector(const Words<8>& source) {
        Words<4> out;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out.word[i] = pair(
                __uint_as_float(source.word[2 * i]), __uint_as_float(source.word[2 * i + 1]));
        }
        return out;
    }
};

template <bool IsBfloat16>
struct Widen {
    using Source = std::uint16_t;
    using Destination = std::uint32_t;
    __device__ static std::uint32_t element(std::uint16_t bits) {
        return IsBfloat16 ? static_cast<std::uint32_t>(bits) << 16
                          : __float_as_uint(half_to_float(bits));
    }
    __device__ static Words<4> vector(const Words<2>& source) {
        Words<4> out;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            out.word[2 * i] = element(static_cast<std::uint16_t>(source.word[i] & 0xffffu));
            out.word[2 * i + 1] = element(static_cast<std::uint16_t>(source.word[i] >> 16));
        }
        return out;
    }
};

// Hashes of 16 bytes of elements. The hash counts in units of at most 32 bits: an element of 64
// bits is two of them. The vectors of one thread are a multiple of 1024 units apart, so that
// their places in a block, hence the keys, stay the same.
template <typename Destination>
struct VectorHash {
    static constexpr int kUnitBytes = sizeof(Destination) < 4 ? sizeof(Destination) : 4;
    static constexpr int kUnits = kVectorBytes / kUnitBytes;
    static_assert(kThreads * kUnits % kBlockElements == 0);

    std::uint32_t mask[kUnits];
    std::uint32_t factor[kUnits];
    bool crosses_blocks;

    // first: unit of the thread's first vector.
    __device__ explicit VectorHash(std::uint64_t first) {
        const auto place = static_cast<unsigned>(first % kBlockElements);
        crosses_blocks = place + kUnits > kBlockElements;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const unsigned unit = (place + i) % kBlockElements;
            mask[i] = device_keys.mask[unit];
            factor[i] = device_keys.factor[unit];
        }
    }

    __device__ static std::uint32_t unit(const Words<4>& vector, int i) {
        constexpr int kPerWord = 4 / kUnitBytes;
        const std::uint32_t word = vector.word[i / kPerWord];
        if constexpr (kUnitBytes == 4) {
            return word;
        } else {
            constexpr int kBits = 8 * kUnitBytes;
            return word >> (i % kPerWord * kBits) & ((1u << kBits) - 1);
        }
    }

    __device__ std::uint64_t operator()(const Words<4>& vector, std::uint64_t first) const {
        const std::uint64_t block = first >> kBlockBits;
        const BlockKey key(block);
        if (!crosses_blocks) {
            std::uint64_t sum = 0;
#pragma unroll
            for (int i = 0; i < kUnits; ++i) {
                sum += mix_element(unit(vector, i) ^ mask[i] ^ key.mask, factor[i]);
            }
            return sum * key.factor;
        }
        const BlockKey next(block + 1);
        const auto in_block = static_cast<int>(kBlockElements - first % kBlockElements);
        std::uint64_t sums[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const bool is_next = i >= in_block;
            const std::uint32_t block_mask = is_next ? next.mask : key.mask;
            const std::uint64_t mixed =
                mix_element(unit(vector, i) ^ mask[i] ^ block_mask, factor[i]);
            sums[0] += is_next ? 0 : mixed;
            sums[1] += is_next ? mixed : 0;
        }
        return sums[0] * key.factor + sums[1] * next.factor;
    }
};

__device__ std::uint64_t hash_unit(std::uint32_t bits, std::uint64_t index) {
    const BlockKey key(index >> kBlockBits);
    const auto place = static_cast<unsigned>(index % kBlockElements);
    return mix_element(bits ^ device_keys.mask[place] ^ key.mask, device_keys.factor[place]) *
           key.factor;
}

template <typename Destination>
__device__ std::uint64_t hash_element(Destination bits, std::uint64_t index) {
    if constexpr (sizeof(Destination) == 8) {
        return hash_unit(static_cast<std::uint32_t>(bits), 2 * index) +
               hash_unit(static_cast<std::uint32_t>(bits >> 32), 2 * index + 1);
    } else {
        return hash_unit(bits, index);
    }
}

// `vectors` vectors from `source`, which lies `skip` bytes after an aligned address.
template <typename Element, bool WithHash, bool IsShifted>
__device__ std::uint64_t run_vectors(
    const typename Element::Source* source, typename Element::Destination* destination,
    std::int64_t vectors, std::uint64_t index, unsigned skip) {
    using Source = typename Element::Source;
    using Destination = typename Element::Destination;
    constexpr int kVector = kVectorBytes / sizeof(Destination);
    constexpr int kSourceWords = kVector * sizeof(Source) / 4;
    constexpr std::uint64_t kUnitsPerElement = sizeof(Destination) == 8 ? 2 : 1;
    const auto* words =
        reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const char*>(source) - skip);
    const VectorHash<Destination> hash(
        WithHash ? (index + threadIdx.x * kVector) * kUnitsPerElement : 0);
    constexpr int kSteps = IsShifted ? kUnrollShifted : kUnroll;
    std::uint64_t total = 0;
    const auto load = [&](std::int64_t vector) {
        const std::uint32_t* from = words + vector * kSourceWords;
        if constexpr (IsShifted) {
            return Element::vector(load_shifted<kSourceWords, sizeof(Source)>(from, skip));
        } else {
            return Element::vector(load_aligned<kSourceWords, true>(from));
        }
    };
    const auto finish = [&](std::int64_t vector, const Words<4>& value) {
        const std::int64_t first = vector * kVector;
        if (destination != nullptr) {
            __stcs(
                reinterpret_cast<uint4*>(destination + first),
                make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]));
        }
        if constexpr (WithHash) {
            total += hash(value, (index + first) * kUnitsPerElement);
        }
    };
    std::int64_t vector = threadIdx.x;
    // All loads of a step are issued before the first store.
#pragma unroll 1
    for (; vector + (kSteps - 1) * kThreads < vectors; vector += kSteps * kThreads) {
        Words<4> values[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            values[step] = load(vector + step * kThreads);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            finish(vector + step * kThreads, values[step]);
        }
    }
#pragma unroll 1
    for (; vector < vectors; vector += kThreads) {
        finish(vector, load(vector));
    }
    return total;
}

// One contiguous run, shared by the block's threads; `destination` may be null.
template <typename Element, bool WithHash>
__device__ std::uint64_t run(
    const typename Element::Source* source, typename Element::Destination* destination,
    std::int64_t count, std::uint64_t index) {
    using Source = typename Element::Source;
    using Destination = typename Element::Destination;
    constexpr int kVector = kVectorBytes / sizeof(Destination);
    constexpr std::size_t kAccessBytes = 4 * kAccessWords<kVector * sizeof(Source) / 4>;
    // Elements before the first 16-byte boundary of the destination (of the source if there is
    // none), and those after the last vector, are done one by one.
    std::int64_t head =
        destination != nullptr
            ? -reinterpret_cast<std::uintptr_t>(destination) % kVectorBytes / sizeof(Destination)
            : -reinterpret_cast<std::uintptr_t>(source) % kAccessBytes / sizeof(Source);
    head = head < count ? head : count;
    const std::int64_t vectors = (count - head) / kVector;
    std::uint64_t total = 0;
    const auto one = [&](std::int64_t i) {
        const Destination bits = Element::element(source[i]);
        if (destination != nullptr) {
            destination[i] = bits;
        }
        if constexpr (WithHash) {
            total += hash_element(bits, index + i);
        }
    };
#pragma unroll 1
    for (std::int64_t i = threadIdx.x; i < head; i += kThreads) {
        one(i);
    }
#pragma unroll 1
    for (std::int64_t i = head + vectors * kVector + threadIdx.x; i < count; i += kThreads) {
        one(i);
    }
    const auto skip =
        static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(source + head) % kAccessBytes);
    auto* out = destination == nullptr ? nullptr : destination + head;
    if (skip == 0) {
        total += run_vectors<Element, WithHash, false>(
            source + head, out, vectors, index + head, skip);
    } else {
        total += run_vectors<Element, WithHash, true>(
            source + head, out, vectors, index + head, skip);
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
__device__ std::uint64_t run_segment(
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

// The tiles [tile, last) of the table, which may belong to several segments; the hash of each part
// is handed to add(slot, hash).
template <bool WithHash, typename Add>
__device__ void run_tiles(
    const DeviceSegment* segments, std::int64_t num_segments, std::int64_t tile, std::int64_t last,
    const Add& add) {
    std::int64_t number = 0;
    for (std::int64_t size = num_segments; size > 1;) {
        const std::int64_t half = size / 2;
        number += segments[number + half].first_tile <= tile ? half : 0;
        size -= half;
    }
    for (; tile < last; ++number) {
        const DeviceSegment& segment = segments[number];
        const std::int64_t numel = segment.rows * segment.row_elements;
        const std::int64_t first = (tile - segment.first_tile) * kDeviceTileElements;
        const std::int64_t wanted = (last - tile) * kDeviceTileElements;
        const std::int64_t count = wanted < numel - first ? wanted : numel - first;
        add(segment.hash_slot, run_segment<WithHash>(segment, first, count));
        tile += (count + kDeviceTileElements - 1) / kDeviceTileElements;
    }
}

template <bool WithHash>
__global__ void __launch_bounds__(kThreads, WithHash ? kBlocksWithHash : kBlocksWithoutHash)
run_table(
    const DeviceSegment* __restrict__ segments, std::int64_t num_segments, std::int64_t num_tiles,
    unsigned long long* __restrict__ hashes) {
    const auto block = static_cast<std::int64_t>(blockIdx.x);
    const auto num_blocks = static_cast<std::int64_t>(gridDim.x);
    const auto add = [&](std::int64_t slot, std::uint64_t total) {
        if constexpr (WithHash) {
            for (int offset = 16; offset > 0; offset /= 2) {
                total += __shfl_down_sync(0xffffffffu, total, offset);
            }
            // Sums mod 2^64 do not depend on the order in which warps arrive.
            if (threadIdx.x % 32 == 0 && total != 0) {
                atomicAdd(hashes + slot, static_cast<unsigned long long>(total));
            }
        }
    };
    // One stretch for each block: all of them have the same length but for one tile.
    run_tiles<WithHash>(
        segments, num_segments, num_tiles * block / num_blocks,
        num_tiles * (block + 1) / num_blocks, add);
}

}  // namespace

int launch_segments(
    const DeviceSegment* segments, std::int64_t num_segments, std::int64_t num_tiles,
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
            run_table<true><<<blocks, kThreads, 0, queue>>>(
                segments, num_segments, num_tiles, hashes);
        } else {
            run_table<false><<<blocks, kThreads, 0, queue>>>(
                segments, num_segments, num_tiles, hashes);
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
