#include "hash.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>

namespace lightrft {

constexpr KeyTable kTable = make_key_table();
const KeyTable kKeys = kTable;

namespace {

template <typename Element>
std::uint64_t sum_block(
    const void* values, std::int64_t count, std::int64_t place, std::uint32_t mask) {
    const auto* elements = static_cast<const Element*>(values);
    std::uint64_t total = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t masked = elements[i] ^ kKeys.mask[place + i] ^ mask;
        total += mix_element(masked, kKeys.factor[place + i]);
    }
    return total;
}

constexpr SumBlock kSumBlockPlain[3] = {
    sum_block<std::uint8_t>, sum_block<std::uint16_t>, sum_block<std::uint32_t>};

const SumBlock* choose() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        return kSumBlockAvx2;
    }
#endif
    return kSumBlockPlain;
}

std::uint64_t hash_words(
    const char* data, std::int64_t numel, int itemsize, std::uint64_t start, SumBlock sum) {
    std::uint64_t total = 0;
    while (numel > 0) {
        const auto place = static_cast<std::int64_t>(start % kBlockElements);
        const std::int64_t count = std::min(kBlockElements - place, numel);
        const BlockKey key(start >> kBlockBits);
        total += key.factor * sum(data, count, place, key.mask);
        data += count * itemsize;
        start += static_cast<std::uint64_t>(count);
        numel -= count;
    }
    return total;
}

}  // namespace

std::uint64_t hash_range(
    const void* data, std::int64_t numel, int itemsize, std::uint64_t start) {
    static const SumBlock* const sums = choose();
    const auto* bytes = static_cast<const char*>(data);
    switch (itemsize) {
        case 1:
            return hash_words(bytes, numel, 1, start, sums[0]);
        case 2:
            return hash_words(bytes, numel, 2, start, sums[1]);
        case 4:
            return hash_words(bytes, numel, 4, start, sums[2]);
        case 8:  // two halves, the low one first
            return hash_words(bytes, 2 * numel, 4, 2 * start, sums[2]);
        default:
            throw std::invalid_argument("element size must be 1, 2, 4 or 8 bytes");
    }
}

}  // namespace lightrft
