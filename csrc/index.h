// The draft index of one prompt, opened for lookups: its arrays, the longest match, and the best continuation.
//
// `rhyme_openrlhf/history/index.py` documents the buffer's format and the rules by which a branch is chosen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

namespace drafting {

using Token = std::int32_t;
// A position in `tokens`, a place in `suffixes`, or a number of tokens. Signed, because differences are taken.
using Place = std::int64_t;

// What a byte of `shared` says of the tokens that neighbours share: so many, or more.
inline constexpr Place MOST_SHARED = 255;
// Suffixes between two prefix sums of rewards: their grades are one cache line.
inline constexpr Place SUM_EVERY = 32;
// With fewer tokens before it a node goes on as before less often.
inline constexpr Place SURE_MATCH = 12;

// Bring what is at an element into the caches, without waiting for it. The element need not exist: the address is
// never read, so this is one of the few places that compute one.
template <typename T>
inline void prefetch(std::span<T> array, Place at) {
    __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(array.data()) +
                                                     static_cast<std::uintptr_t>(at) * sizeof(T)));
}

// A buffer is not a whole draft index of this version; the message says what is wrong with it.
class BufferError : public std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// A node of the tree: the sorted suffixes [low, high), which have their first `length` tokens in common.
struct Node {
    Place low = 0;
    Place high = 0;
    Place length = 0;

    bool empty() const { return low == high; }
    Place count() const { return high - low; }
};

// How a draft from history ends (see `walk`).
struct WalkRules {
    Place window = 0;
    double stop_confidence = 0.0;
    double extend_confidence = 0.0;
};

struct Walked {
    // Tokens that were filled in.
    Place found = 0;
    // The position of a suffix that begins with all that matched and was drafted.
    Place at = 0;
};

class Index {
public:
    // No tokens: nothing ever matches.
    Index() = default;

    // Open a buffer. `owner` keeps its memory alive. Throws BufferError unless header and sizes fit.
    Index(std::span<const std::byte> buffer, std::shared_ptr<const void> owner);

    bool empty() const { return tokens.empty(); }
    Place size() const { return static_cast<Place>(tokens.size()); }

    // The node of the longest end of `text` that occurs and goes on, of `longest` down to `shortest` tokens; empty
    // without one. Negative ids in `text` match nothing.
    Node longest_match(std::span<const Token> text, Place longest, Place shortest) const;

    // Follow the best child from `node` at each branch. What all suffixes of a node have in common is read from the
    // one at place `near`, which begins at position `at`, as long as it is one of them: its tokens are in the caches.
    // `confidence[i]` becomes the estimated probability that the draft is right up to and including token i; behind
    // the first token the draft ends where that is below the stop confidence, and behind `window` tokens where it is
    // below the extend confidence.
    Walked walk(Node node, Place near, Place at, const WalkRules& rules, std::span<Token> out,
                std::span<float> confidence) const;

    // The token behind the first `depth` of the suffix at `place`.
    Token token_at(Place place, Place depth) const { return tokens[suffixes[place] + depth]; }

    // Whether any suffix of the node that ends at `high` has a token behind `depth`. Separators sort first: if the
    // last suffix goes on with one, all of them do.
    bool goes_on(Place high, Place depth) const { return token_at(high - 1, depth) >= 0; }

    // The node of the suffixes that have their first `depth` tokens in common with the one at `place`.
    Node node_around(Place place, Place depth) const {
        return {node_begin(place, depth), node_end(place, depth), depth};
    }

    // The child of `node` that `token` leads to; empty where there is none.
    Node child_of(const Node& node, Token token) const;

    std::span<const std::int64_t> rewards;
    std::span<const std::int64_t> sums;
    std::span<const std::int32_t> suffixes;
    std::span<const std::int32_t> places;
    std::span<const Token> tokens;
    std::span<const std::uint16_t> grades;
    std::span<const std::uint8_t> shared;

private:
    struct Matched {
        Node node;
        // How many of the asked tokens, from the first on, occur at all.
        Place occurs;
    };
    // The best child of a node: its suffixes, up to where they are the same, and the sum of their rewards.
    struct Child {
        Place low, high, known;
        std::int64_t total;
    };

    Matched match(std::span<const Token> text, Place length) const;
    Place node_begin(Place place, Place depth) const;
    Place node_end(Place place, Place depth) const;
    Place child_end(Place low, Place high, Place depth) const;
    Place first_at_least(Place low, Place high, Place depth, Token token) const;
    bool same(Place model, Place place, Place depth) const;
    bool is_small(Place low, Place high) const;
    Place least_shared(Place low, Place high) const;
    Place common(Place low, Place high, Place depth, Place most) const;
    Child best_child(Place low, Place high, Place depth, std::int64_t total) const;
    Child best_of_small(Place low, Place high, Place depth, std::int64_t total) const;
    bool is_better(Place start, Place end, std::int64_t priority, const Child& best, std::int64_t best_priority) const;
    Place latest(Place low, Place high) const;
    std::int64_t priority(Place low, Place high) const;
    std::int64_t sum_one_by_one(Place low, Place high) const;

    std::shared_ptr<const void> owner_;
};

// Where one sample is in a draft index, so that its next match is mostly known and not searched for.
//
// A sample mostly goes on as the history that it was drafted from. Then its longest match is the last one with the new
// tokens behind it, at a known position of the text, whose place among the sorted suffixes is stored; and where its
// last token is another one than there, that is mostly another branch of the same node. Only what is left is searched.
//
// Invariants:
// - What `follow` finds is what `Index::longest_match` finds.
// - A match grows by as many tokens as the text at most: the longest match of a text less its last k tokens, and k, are
//   a bound for the longest match of the text. So a cursor of a match never misses a longer one, and after a search
//   without a result only the few lengths are searched for that there can be since.
class Cursor {
public:
    // The node of the longest end of `text` that occurs and goes on, of `longest` down to `least` tokens, and a place
    // in it. `text` is what it was the last time, and what came since; `longest` is always the same.
    struct Found {
        Node node;
        Place near = 0;
    };
    Found follow(const Index& index, std::span<const Token> text, Place longest, Place least);

    // The sample is expected to go on as the suffix that begins at `at`, and begins with its match.
    void move_to(Place at) { at_ = at + length_; }

    // Another index: what matched in the earlier one says nothing.
    void lose(Place longest) { *this = Cursor(longest); }

    // Where in the index's tokens the match goes on.
    Place at() const { return at_; }
    Place length() const { return length_; }

    // Fetch, in this order and with other work in between, what `follow` will read for a text of now `count` tokens:
    // history there and its suffix's place; the node around that suffix; its rewards, and what its first suffix says.
    void foresee_text(const Index& index, Place count, Place longest) const;
    void foresee_node(const Index& index, Place count, Place longest) const;
    void foresee_branch(const Index& index, Place count, Place longest) const;

    Cursor() = default;

private:
    explicit Cursor(Place bound) : bound_(static_cast<std::int32_t>(bound)) {}

    // The longest match as far as it is known without a search. It occurs; whether it goes on has to be seen.
    // Length 0: what it is has to be searched for, below the bound.
    struct Followed {
        Place length, at, bound;
    };
    Followed followed(const Index& index, std::span<const Token> text, Place longest, Place least) const;
    static Followed shorter(const Index& index, Place at, Place bound, Place least, Token token);

    std::int32_t at_ = 0;
    std::int32_t seen_ = 0;
    std::int32_t length_ = 0;
    // For the length of the longest match; `length_` if there is one.
    std::int32_t bound_ = 0;
};

// Fill a buffer that holds `text` (pieces of these lengths, each with its separator, and their fixed-point rewards) but
// for the checksum. Throws std::invalid_argument where the lengths do not fit the text.
std::vector<std::byte> build(std::span<const Token> text, std::span<const std::int64_t> lengths,
                             std::span<const std::int64_t> rewards);

}  // namespace drafting
