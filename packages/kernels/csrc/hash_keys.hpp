// The keys of the position-keyed hash that weight_bucket/reference.py defines.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define LIGHTRFT_BOTH __host__ __device__
#else
#define LIGHTRFT_BOTH
#endif

namespace lightrft {

constexpr int kBlockBits = 10;
constexpr std::int64_t kBlockElements = 1 << kBlockBits;

// SplitMix64's output function.
LIGHTRFT_BOTH constexpr std::uint64_t mix64(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// What depends on an element's place in its block.
struct KeyTable {
    std::uint32_t mask[kBlockElements];
    std::uint32_t factor[kBlockElements];  // odd
};

constexpr KeyTable make_key_table() {
    KeyTable table{};
    for (std::int64_t place = 0; place < kBlockElements; ++place) {
        const std::uint64_t key = mix64(~static_cast<std::uint64_t>(place));
        table.mask[place] = static_cast<std::uint32_t>(key);
        table.factor[place] = static_cast<std::uint32_t>(key >> 32) | 1u;
    }
    return table;
}

// What depends on the block: a mask of its elements and the factor of their sum.
struct BlockKey {
    LIGHTRFT_BOTH explicit BlockKey(std::uint64_t block) : factor(mix64(block)) {
        mask = static_cast<std::uint32_t>(factor >> 32);
        factor |= 1u;
    }
    std::uint64_t factor;
    std::uint32_t mask;
};

// One element before the factor of its block; `masked` is its bits under both masks.
LIGHTRFT_BOTH inline std::uint64_t mix_element(std::uint32_t masked, std::uint32_t factor) {
    std::uint32_t x = masked * factor;
    x ^= x >> 15;
    const std::uint64_t product = static_cast<std::uint64_t>(x) * factor;
    return product ^ (product >> 32);
}

}  // namespace lightrft
