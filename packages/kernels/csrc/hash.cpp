#include "hash.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "parallel.hpp"

namespace lightrft {
namespace {

constexpr std::int64_t kTileElements = 1 << 16;

// SplitMix64's output function.
inline std::uint64_t mix64(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// A macro, because a template cannot be cloned for several instruction sets.
#define LIGHTRFT_HASH_TILE(NAME, ELEMENT)                                             \
    LIGHTRFT_VECTORISED                                                               \
    std::uint64_t NAME(const ELEMENT* values, std::int64_t count, std::uint64_t start) { \
        std::uint64_t total = 0;                                                      \
        for (std::int64_t i = 0; i < count; ++i) {                                    \
            const std::uint64_t bits = values[i];                                     \
            total += mix64(bits ^ mix64(start + static_cast<std::uint64_t>(i)));      \
        }                                                                             \
        return total;                                                                 \
    }

LIGHTRFT_HASH_TILE(hash_tile_1, std::uint8_t)
LIGHTRFT_HASH_TILE(hash_tile_2, std::uint16_t)
LIGHTRFT_HASH_TILE(hash_tile_4, std::uint32_t)
LIGHTRFT_HASH_TILE(hash_tile_8, std::uint64_t)

#undef LIGHTRFT_HASH_TILE

template <typename Element>
std::uint64_t hash_elements(
    const void* data, std::int64_t numel, std::uint64_t start, int num_threads,
    std::uint64_t (*hash_tile)(const Element*, std::int64_t, std::uint64_t)) {
    const auto* values = static_cast<const Element*>(data);
    // Sums wrap mod 2^64, so the order in which threads finish does not matter.
    std::vector<std::uint64_t> totals(static_cast<std::size_t>(num_threads), 0);
    const std::int64_t num_tiles = (numel + kTileElements - 1) / kTileElements;
    for_each_tile(num_tiles, num_threads, [&](std::int64_t tile, int thread) {
        const std::int64_t first = tile * kTileElements;
        const std::int64_t count = std::min(kTileElements, numel - first);
        totals[static_cast<std::size_t>(thread)] +=
            hash_tile(values + first, count, start + static_cast<std::uint64_t>(first));
    });
    std::uint64_t total = 0;
    for (const std::uint64_t part : totals) {
        total += part;
    }
    return total;
}

}  // namespace

std::uint64_t hash_range(
    const void* data, std::int64_t numel, int itemsize, std::uint64_t start, int num_threads) {
    switch (itemsize) {
        case 1:
            return hash_elements<std::uint8_t>(data, numel, start, num_threads, hash_tile_1);
        case 2:
            return hash_elements<std::uint16_t>(data, numel, start, num_threads, hash_tile_2);
        case 4:
            return hash_elements<std::uint32_t>(data, numel, start, num_threads, hash_tile_4);
        case 8:
            return hash_elements<std::uint64_t>(data, numel, start, num_threads, hash_tile_8);
        default:
            throw std::invalid_argument("element size must be 1, 2, 4 or 8 bytes");
    }
}

}  // namespace lightrft
