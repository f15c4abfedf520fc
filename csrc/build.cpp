// The buffer of a draft index (format: rhyme_openrlhf/history/index.py): its layout, opening it, and building it.
//
// Suffixes are sorted by prefix doubling (Manber and Myers 1993), in O(n log n) also for text that repeats itself.
//
// Invariant: the same text makes the same bytes, on every processor.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "index.h"

namespace drafting {

namespace {

constexpr std::array<char, 8> MAGIC{'R', 'H', 'Y', 'M', 'E', 'I', 'D', 'X'};
// The version that is written, and the oldest that is read: without earlier runs, with zeros where own pieces begin.
constexpr std::uint32_t VERSION = 4, OLDEST_VERSION = 3;
// Every array begins at a multiple of this.
constexpr std::size_t ALIGNMENT = 8;
// A grade has 16 bits.
constexpr std::size_t MOST_PIECES = std::size_t{1} << 16;

struct Header {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t pieces;
    std::int64_t count;
    std::int64_t size;
    std::int64_t own_begin;
    std::array<std::byte, 16> zeros;
    std::uint64_t checksum;
};
static_assert(sizeof(Header) == 64 && std::is_trivially_copyable_v<Header>);

// Where each array begins in a buffer of `count` tokens, and where the last one ends.
struct Layout {
    std::size_t rewards, sums, suffixes, places, tokens, grades, shared, end;

    Layout(std::size_t count, std::size_t pieces) {
        end = sizeof(Header);
        const auto next = [this](std::size_t bytes) {
            const std::size_t begin = end;
            end += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
            return begin;
        };
        rewards = next(pieces * sizeof(std::int64_t));
        sums = next((count / SUM_EVERY + 1) * sizeof(std::int64_t));
        suffixes = next(count * sizeof(std::int32_t));
        places = next(count * sizeof(std::int32_t));
        tokens = next(count * sizeof(Token));
        grades = next(count * sizeof(std::uint16_t));
        shared = next(count * sizeof(std::uint8_t));
    }
};

// The `count` elements of a buffer from an aligned byte on. Only here bytes become other types.
template <typename T, typename Bytes>
std::span<T> elements(Bytes buffer, std::size_t begin, std::size_t count) {
    const auto part = buffer.subspan(begin, count * sizeof(T));
    return {reinterpret_cast<T*>(part.data()), count};
}

// Whether all numbers are from 0 to `bound` - 1.
template <typename T>
bool all_below(std::span<const T> numbers, std::size_t bound) {
    using Unsigned = std::make_unsigned_t<T>;
    Unsigned greatest = 0;
    for (const T number : numbers) greatest = std::max(greatest, static_cast<Unsigned>(number));
    return numbers.empty() || greatest < bound;
}

// A key, and the number of the element that has the key.
struct Keyed {
    std::uint64_t key;
    std::int32_t number;
};

// Sort by the lowest `bits` of the keys (radix sort, stable). `std::stable_sort` takes several times as long.
void sort_by_key(std::vector<Keyed>& items, int bits) {
    constexpr int DIGIT_BITS = 11;
    constexpr std::size_t DIGITS = std::size_t{1} << DIGIT_BITS;
    std::vector<Keyed> sorted(items.size());
    for (int shift = 0; shift < bits; shift += DIGIT_BITS) {
        std::array<std::uint32_t, DIGITS> begins{};
        for (const Keyed& item : items) ++begins[item.key >> shift & (DIGITS - 1)];
        std::uint32_t begin = 0;
        for (std::uint32_t& digit : begins) begin += std::exchange(digit, begin);
        for (const Keyed& item : items) sorted[begins[item.key >> shift & (DIGITS - 1)]++] = item;
        items.swap(sorted);
    }
}

// Write each token's rank among the tokens that occur, from 1 on; return the number of different tokens.
std::uint32_t rank_tokens(std::span<const Token> text, std::vector<std::uint32_t>& ranks) {
    std::vector<Keyed> items(text.size());
    for (std::size_t at = 0; at < text.size(); ++at) {
        // Separators are negative and come first.
        items[at] = {static_cast<std::uint32_t>(text[at]) ^ 0x80000000u, static_cast<std::int32_t>(at)};
    }
    sort_by_key(items, 32);
    std::uint32_t rank = 0;
    for (std::size_t place = 0; place < items.size(); ++place) {
        rank += place == 0 || items[place].key != items[place - 1].key;
        ranks[items[place].number] = rank;
    }
    return rank;
}

// Sort `order`, which is sorted by the first `width` tokens, by all tokens, and write each suffix's place in it.
// `ranks[i]`: where the group of suffixes that equal suffix i so far begins in `order`; overwritten.
void refine(std::span<std::int32_t> order, std::vector<std::int32_t>& ranks, std::size_t width,
            std::span<std::int32_t> places) {
    const std::size_t count = order.size();
    std::vector<std::int32_t> by_second(count), new_ranks(count), free(count);
    while (true) {
        // All suffixes, sorted by what follows their first `width` tokens: `order` itself, moved by `width`.
        std::size_t filled = 0;
        for (std::size_t suffix = count - width; suffix < count; ++suffix)
            by_second[filled++] = static_cast<std::int32_t>(suffix);
        for (std::size_t place = 0; place < count; ++place) {
            free[place] = static_cast<std::int32_t>(place);
            if (order[place] >= static_cast<std::int32_t>(width))
                by_second[filled++] = order[place] - static_cast<std::int32_t>(width);
        }
        for (const std::int32_t suffix : by_second) order[free[static_cast<std::size_t>(ranks[suffix])]++] = suffix;
        std::int32_t head = 0;
        std::size_t groups = 1;
        new_ranks[order[0]] = 0;
        for (std::size_t place = 1; place < count; ++place) {
            const std::size_t before = order[place - 1], suffix = order[place];
            // Two suffixes of one group have `width` equal tokens and no separator among them: both go on behind.
            if (ranks[before] != ranks[suffix] || ranks[before + width] != ranks[suffix + width]) {
                head = static_cast<std::int32_t>(place);
                ++groups;
            }
            new_ranks[suffix] = head;
        }
        ranks.swap(new_ranks);
        if (groups == count) {
            std::copy(ranks.begin(), ranks.end(), places.begin());
            return;
        }
        width *= 2;
    }
}

// Sort the suffixes of `text`, and write each suffix's place. The first round sorts by as many tokens as fit into one
// key, which saves the rounds for 1, 2 and often 4 tokens.
void sort_suffixes(std::span<const Token> text, std::span<std::int32_t> order, std::span<std::int32_t> places) {
    constexpr int KEY_BITS = 63;
    const std::size_t count = text.size();
    if (!count) return;
    std::vector<std::uint32_t> tokens(count);
    const int bits = std::max<int>(std::bit_width(rank_tokens(text, tokens)), 1);
    const std::size_t width = std::min<std::size_t>(static_cast<std::size_t>(KEY_BITS / bits), count);
    std::vector<Keyed> items(count);
    std::uint64_t key = 0;
    for (std::size_t at = count; at-- > 0;) {
        // 0 stands for the end of the text.
        key = key >> bits | std::uint64_t{tokens[at]} << (bits * static_cast<int>(width - 1));
        items[at] = {key, static_cast<std::int32_t>(at)};
    }
    sort_by_key(items, bits * static_cast<int>(width));
    std::vector<std::int32_t> ranks(count);
    std::int32_t head = 0;
    for (std::size_t place = 0; place < count; ++place) {
        if (place && items[place].key != items[place - 1].key) head = static_cast<std::int32_t>(place);
        order[place] = items[place].number;
        ranks[items[place].number] = head;
    }
    refine(order, ranks, width, places);
}

// Fill `shared`: how many first tokens each suffix shares with the suffix sorted before it, at most MOST_SHARED. In the
// order of the text a suffix shares at most one token less than the suffix before it (Kasai and others 2001).
void share(std::span<const Token> text, std::span<const std::int32_t> order, std::span<const std::int32_t> places,
           std::span<std::uint8_t> shared) {
    Place length = 0;
    for (std::size_t suffix = 0; suffix < text.size(); ++suffix) {
        const std::int32_t place = places[suffix];
        if (place == 0) {
            shared[0] = 0;
            length = 0;
            continue;
        }
        const Place before = order[place - 1];
        // Every separator occurs once, so no two suffixes are equal.
        while (text[suffix + static_cast<std::size_t>(length)] == text[before + length]) ++length;
        shared[place] = static_cast<std::uint8_t>(std::min(length, MOST_SHARED));
        length = std::max<Place>(0, length - 1);
    }
}

}  // namespace

Index::Index(std::span<const std::byte> buffer, std::shared_ptr<const void> owner) : owner_(std::move(owner)) {
    if (buffer.size() < sizeof(Header)) {
        throw BufferError("draft index is torn: " + std::to_string(buffer.size()) + " bytes, its header alone has " +
                          std::to_string(sizeof(Header)));
    }
    Header header;
    std::memcpy(&header, buffer.data(), sizeof header);
    if (header.magic != MAGIC || header.version < OLDEST_VERSION || header.version > VERSION)
        throw BufferError("not a draft index of format version " + std::to_string(OLDEST_VERSION) + " to " +
                          std::to_string(VERSION));
    const bool possible =
        header.count >= 0 && header.count <= std::numeric_limits<std::int32_t>::max() && header.own_begin >= 0 &&
        header.own_begin <= header.count && header.pieces <= MOST_PIECES;
    const auto count = possible ? static_cast<std::size_t>(header.count) : 0;
    const Layout at(count, header.pieces);
    if (!possible || header.size != static_cast<std::int64_t>(buffer.size()) || at.end != buffer.size())
        throw BufferError("draft index is torn: its sizes do not fit its " + std::to_string(buffer.size()) + " bytes");
    if (reinterpret_cast<std::uintptr_t>(buffer.data()) % ALIGNMENT)
        throw BufferError("a draft index must be aligned to 8 bytes");
    own_begin = header.own_begin;
    rewards = elements<const std::int64_t>(buffer, at.rewards, header.pieces);
    sums = elements<const std::int64_t>(buffer, at.sums, count / SUM_EVERY + 1);
    suffixes = elements<const std::int32_t>(buffer, at.suffixes, count);
    places = elements<const std::int32_t>(buffer, at.places, count);
    tokens = elements<const Token>(buffer, at.tokens, count);
    grades = elements<const std::uint16_t>(buffer, at.grades, count);
    shared = elements<const std::uint8_t>(buffer, at.shared, count);
    // What the arrays say of each other is as it was built, or the checksum would not fit. No read depends on it.
    if (!all_below(suffixes, count) || !all_below(places, count) || !all_below(grades, header.pieces))
        throw BufferError("draft index is damaged: a number in it is greater than there are tokens or rewards");
}

std::vector<std::uint8_t> build(std::span<const Token> text, std::span<const std::int64_t> lengths,
                                std::span<const std::int64_t> rewards, std::size_t earlier) {
    if (text.size() > std::numeric_limits<std::int32_t>::max() || lengths.size() > MOST_PIECES ||
        lengths.size() != rewards.size() || earlier > lengths.size()) {
        throw std::invalid_argument("more tokens or pieces than a draft index holds");
    }
    // The different rewards, and for each token the number of its piece's reward: the token's grade.
    std::vector<std::int64_t> occurring(rewards.begin(), rewards.end());
    std::sort(occurring.begin(), occurring.end());
    occurring.erase(std::unique(occurring.begin(), occurring.end()), occurring.end());
    std::vector<std::uint16_t> grade_of;
    grade_of.reserve(text.size());
    for (std::size_t piece = 0; piece < lengths.size(); ++piece) {
        const auto found = std::lower_bound(occurring.begin(), occurring.end(), rewards[piece]);
        require(lengths[piece] >= 1 && static_cast<std::size_t>(lengths[piece]) <= text.size() - grade_of.size(),
                "the pieces of a draft index must be all of its text");
        const auto its = text.subspan(grade_of.size(), static_cast<std::size_t>(lengths[piece]));
        require(its.back() == -1 - static_cast<Token>(piece) &&
                    std::all_of(its.begin(), its.end() - 1, [](Token token) { return token >= 0; }),
                "a piece of a draft index must end with its separator, its only negative token");
        grade_of.resize(grade_of.size() + its.size(), static_cast<std::uint16_t>(found - occurring.begin()));
    }
    require(grade_of.size() == text.size(), "the pieces of a draft index must be all of its text");

    const Layout at(text.size(), lengths.size());
    std::vector<std::uint8_t> made(at.end);
    const std::span<std::uint8_t> buffer(made);
    const auto own = lengths.begin() + static_cast<std::ptrdiff_t>(earlier);
    Header header{MAGIC,
                  VERSION,
                  static_cast<std::uint32_t>(lengths.size()),
                  static_cast<std::int64_t>(text.size()),
                  static_cast<std::int64_t>(at.end),
                  std::accumulate(lengths.begin(), own, std::int64_t{0}),
                  {},
                  0};
    std::memcpy(buffer.data(), &header, sizeof header);
    std::copy(text.begin(), text.end(), elements<Token>(buffer, at.tokens, text.size()).begin());
    const auto suffixes = elements<std::int32_t>(buffer, at.suffixes, text.size());
    const auto places = elements<std::int32_t>(buffer, at.places, text.size());
    sort_suffixes(text, suffixes, places);
    share(text, suffixes, places, elements<std::uint8_t>(buffer, at.shared, text.size()));
    std::copy(occurring.begin(), occurring.end(), elements<std::int64_t>(buffer, at.rewards, lengths.size()).begin());
    const auto grades = elements<std::uint16_t>(buffer, at.grades, text.size());
    const auto sums = elements<std::int64_t>(buffer, at.sums, text.size() / SUM_EVERY + 1);
    std::int64_t sum = 0;
    for (std::size_t place = 0; place < text.size(); ++place) {
        if (place % SUM_EVERY == 0) sums[place / SUM_EVERY] = sum;
        grades[place] = grade_of[suffixes[place]];
        sum += occurring[grades[place]];
    }
    // The sum of all rewards is the last one, if it falls on a multiple.
    if (text.size() % SUM_EVERY == 0) sums[text.size() / SUM_EVERY] = sum;
    return made;
}

}  // namespace drafting
