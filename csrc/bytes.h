// TOGETHER bytes looked at at once: by SSE2, which every x86-64 processor has, or in a loop elsewhere.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "index.h"

namespace drafting {

inline constexpr Place TOGETHER = 32;

// Which of the TOGETHER bytes from `at` on are at least `least`: bit i of the i-th.
inline std::uint32_t bytes_at_least(std::span<const std::uint8_t> bytes, Place at, std::uint8_t least) {
    const auto there = bytes.subspan(at, TOGETHER);
#if defined(__SSE2__)
    const __m128i asked = _mm_set1_epi8(static_cast<char>(least));
    const auto of_half = [&](std::size_t begin) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(there.data() + begin));
        return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(half, asked), half)));
    };
    return of_half(0) | of_half(16) << 16;
#else
    std::uint32_t bits = 0;
    for (std::size_t place = 0; place < there.size(); ++place) bits |= std::uint32_t{there[place] >= least} << place;
    return bits;
#endif
}

// The least of the bytes from `at` on, all but the first of `count` (1 to TOGETHER); 255 where there is none.
inline std::uint8_t least_byte_behind(std::span<const std::uint8_t> bytes, Place at, Place count) {
    const auto there = bytes.subspan(at, TOGETHER);
#if defined(__SSE2__)
    // 255, `count - 1` zeros, then 255 again: what is not asked for is set to 255.
    alignas(16) static constexpr auto MASKS = [] {
        std::array<std::uint8_t, 2 * TOGETHER> masks{};
        std::fill(masks.begin() + TOGETHER, masks.end(), std::uint8_t{255});
        return masks;
    }();
    const auto masks = std::span(MASKS).subspan(TOGETHER - count, TOGETHER);
    const auto of_half = [&](std::size_t begin) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(there.data() + begin));
        return _mm_or_si128(half, _mm_loadu_si128(reinterpret_cast<const __m128i*>(masks.data() + begin)));
    };
    __m128i least = _mm_min_epu8(_mm_or_si128(of_half(0), _mm_cvtsi32_si128(255)), of_half(16));
    least = _mm_min_epu8(least, _mm_srli_si128(least, 8));
    least = _mm_min_epu8(least, _mm_srli_si128(least, 4));
    least = _mm_min_epu8(least, _mm_srli_si128(least, 2));
    least = _mm_min_epu8(least, _mm_srli_si128(least, 1));
    return static_cast<std::uint8_t>(_mm_cvtsi128_si32(least));
#else
    std::uint8_t least = 255;
    for (Place place = 1; place < count; ++place) least = std::min(least, there[place]);
    return least;
#endif
}

}  // namespace drafting
