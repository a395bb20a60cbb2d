// The inner loop of the hash on AVX2, eight elements at a time; compiled with -mavx2, so nothing
// here may be inlined elsewhere.
#include "hash.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

namespace lightrft {
namespace {

struct Load1 {
    static constexpr int kBytes = 1;
    static __m256i eight(const char* values) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
    }
    static std::uint32_t one(const char* values) { return static_cast<unsigned char>(*values); }
};

struct Load2 {
    static constexpr int kBytes = 2;
    static __m256i eight(const char* values) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    }
    static std::uint32_t one(const char* values) {
        return *reinterpret_cast<const std::uint16_t*>(values);
    }
};

struct Load4 {
    static constexpr int kBytes = 4;
    static __m256i eight(const char* values) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    }
    static std::uint32_t one(const char* values) {
        return *reinterpret_cast<const std::uint32_t*>(values);
    }
};

inline __m256i load_keys(const std::uint32_t* keys) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
}

inline __m256i fold(__m256i product) {
    return _mm256_xor_si256(product, _mm256_srli_epi64(product, 32));
}

template <typename Load>
std::uint64_t sum_block(
    const void* data, std::int64_t count, std::int64_t place, std::uint32_t mask) {
    const auto* values = static_cast<const char*>(data);
    const std::uint32_t* masks = kKeys.mask + place;
    const std::uint32_t* factors = kKeys.factor + place;
    const __m256i block_mask = _mm256_set1_epi32(static_cast<int>(mask));
    __m256i even = _mm256_setzero_si256();
    __m256i odd = _mm256_setzero_si256();
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256i key = _mm256_xor_si256(load_keys(masks + i), block_mask);
        const __m256i factor = load_keys(factors + i);
        __m256i x = _mm256_xor_si256(Load::eight(values + i * Load::kBytes), key);
        x = _mm256_mullo_epi32(x, factor);
        x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
        even = _mm256_add_epi64(even, fold(_mm256_mul_epu32(x, factor)));
        const __m256i high = _mm256_srli_epi64(x, 32);
        odd = _mm256_add_epi64(odd, fold(_mm256_mul_epu32(high, _mm256_srli_epi64(factor, 32))));
    }
    alignas(32) std::uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(even, odd));
    std::uint64_t total = lanes[0] + lanes[1] + lanes[2] + lanes[3];
    for (; i < count; ++i) {
        const std::uint32_t x = (Load::one(values + i * Load::kBytes) ^ masks[i] ^ mask) * factors[i];
        const std::uint64_t product = static_cast<std::uint64_t>(x ^ (x >> 15)) * factors[i];
        total += product ^ (product >> 32);
    }
    return total;
}

}  // namespace

const SumBlock kSumBlockAvx2[3] = {sum_block<Load1>, sum_block<Load2>, sum_block<Load4>};

}  // namespace lightrft

#endif
