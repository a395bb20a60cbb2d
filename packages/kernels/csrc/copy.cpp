#include "copy.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "hash.hpp"
#include "parallel.hpp"

namespace lightrft {
namespace {

// Small enough for what is copied to be hashed from the cache; whole blocks of the hash.
constexpr std::int64_t kTileElements = 1 << 15;

struct Tile {
    std::size_t segment;
    std::int64_t first;
    std::int64_t count;
};

template <typename To, typename From>
inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

LIGHTRFT_VECTORISED
void float_to_bfloat16(
    const std::uint32_t* source, std::uint16_t* out, std::int64_t count, std::uint16_t nan) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t bits = source[i];
        const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        out[i] = static_cast<std::uint16_t>(is_nan ? nan : rounded);
    }
}

LIGHTRFT_VECTORISED
void float_to_half(const std::uint32_t* source, std::uint16_t* out, std::int64_t count) {
    constexpr std::uint32_t kSmallestNormal = 0x38800000u;  // 2^-14
    constexpr std::uint32_t kTooLarge = 0x47800000u;        // 2^16
    constexpr std::uint32_t kInfinity = 0x7f800000u;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t bits = source[i];
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        // Exponent bias 127 -> 15 and round to nearest even; a carry may reach infinity.
        const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // The floating-point unit rounds to multiples of 2^-24, the spacing of subnormals.
        const float shifted = bit_cast<float>(magnitude) + 0.5f;
        const std::uint32_t subnormal = bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
        const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
        std::uint32_t result = magnitude < kSmallestNormal ? subnormal : normal;
        result = magnitude >= kTooLarge ? 0x7c00u : result;
        result = magnitude > kInfinity ? nan : result;
        out[i] = static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | result);
    }
}

LIGHTRFT_VECTORISED
void bfloat16_to_float(const std::uint16_t* source, std::uint32_t* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<std::uint32_t>(source[i]) << 16;
    }
}

LIGHTRFT_VECTORISED
void half_to_float(const std::uint16_t* source, std::uint32_t* out, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t sign = (source[i] & 0x8000u) << 16;
        const std::uint32_t magnitude = source[i] & 0x7fffu;
        const std::uint32_t normal = (magnitude << 13) + 0x38000000u;
        const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
        const std::uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
        const std::uint32_t special = 0x7f800000u | ((magnitude & 0x3ffu) << 13) | quiet;
        std::uint32_t result = magnitude < 0x400u ? bit_cast<std::uint32_t>(small) : normal;
        result = magnitude >= 0x7c00u ? special : result;
        out[i] = sign | result;
    }
}

template <typename To, typename From>
To* at(From* base, std::int64_t index) {
    return reinterpret_cast<To*>(base) + index;
}

void copy_elements(
    const CopySegment& segment, std::int64_t first, std::int64_t count, char* destination,
    std::uint16_t bf16_nan) {
    using Half = std::uint16_t;
    using Single = std::uint32_t;
    switch (segment.cast) {
        case Cast::kNone:
            std::memcpy(
                destination, segment.source + first * segment.itemsize,
                static_cast<std::size_t>(count * segment.itemsize));
            return;
        case Cast::kFloatToBfloat16:
            return float_to_bfloat16(
                at<const Single>(segment.source, first), at<Half>(destination, 0), count,
                bf16_nan);
        case Cast::kFloatToHalf:
            return float_to_half(
                at<const Single>(segment.source, first), at<Half>(destination, 0), count);
        case Cast::kBfloat16ToFloat:
            return bfloat16_to_float(
                at<const Half>(segment.source, first), at<Single>(destination, 0), count);
        case Cast::kHalfToFloat:
            return half_to_float(
                at<const Half>(segment.source, first), at<Single>(destination, 0), count);
    }
}

// Copies one tile, or casts it into `scratch` if it has no destination; returns its hash.
std::uint64_t run_tile(
    const CopySegment& segment, std::int64_t first, std::int64_t count, std::uint16_t bf16_nan,
    bool with_hash, std::vector<char>& scratch) {
    const char* result = segment.source + first * segment.itemsize;
    if (segment.destination != nullptr || segment.cast != Cast::kNone) {
        char* destination = segment.destination + first * segment.itemsize;
        if (segment.destination == nullptr) {
            scratch.resize(static_cast<std::size_t>(kTileElements * segment.itemsize));
            destination = scratch.data();
        }
        copy_elements(segment, first, count, destination, bf16_nan);
        result = destination;
    }
    if (!with_hash) {
        return 0;
    }
    return hash_range(
        result, count, static_cast<int>(segment.itemsize),
        segment.start + static_cast<std::uint64_t>(first));
}

}  // namespace

void run_segments(
    const std::vector<CopySegment>& segments, std::uint16_t bf16_nan, int num_threads,
    std::uint64_t* hashes) {
    std::vector<Tile> tiles;
    for (std::size_t index = 0; index < segments.size(); ++index) {
        const std::int64_t numel = segments[index].numel;
        for (std::int64_t first = 0; first < numel; first += kTileElements) {
            tiles.push_back({index, first, std::min(kTileElements, numel - first)});
        }
    }
    std::vector<std::atomic<std::uint64_t>> totals(hashes == nullptr ? 0 : segments.size());
    std::vector<std::vector<char>> scratch(static_cast<std::size_t>(num_threads));
    for_each_tile(
        static_cast<std::int64_t>(tiles.size()), num_threads, [&](std::int64_t number, int thread) {
            const Tile& tile = tiles[static_cast<std::size_t>(number)];
            const std::uint64_t hash = run_tile(
                segments[tile.segment], tile.first, tile.count, bf16_nan, hashes != nullptr,
                scratch[static_cast<std::size_t>(thread)]);
            if (hashes != nullptr) {
                // Sums wrap mod 2^64, so the order in which threads add does not matter.
                totals[tile.segment].fetch_add(hash, std::memory_order_relaxed);
            }
        });
    for (std::size_t index = 0; index < totals.size(); ++index) {
        hashes[index] += totals[index].load(std::memory_order_relaxed);
    }
}

}  // namespace lightrft
