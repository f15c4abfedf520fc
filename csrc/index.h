// The draft index of one prompt: a sorted suffix array over the prompt's last responses, read from one buffer.
//
// A node of the suffix tree is an interval [low, high) of the sorted suffixes whose first `length` tokens are equal.
// `rhyme_openrlhf/history/index.py` documents the buffer's format and the rules that choose a branch.
//
// Invariants: an index never changes; every piece of text ends with a separator of its own, a negative token, so a
// comparison of two suffixes stops inside the text; a cursor finds exactly what a search finds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

namespace drafting {

using Token = std::int32_t;
// A position in `tokens`, a place in `suffixes`, or a number of tokens. Signed, because differences are taken.
using Place = std::int64_t;

// A byte of `shared` holds the number of tokens that two neighbours share; this value means "or more".
inline constexpr Place MOST_SHARED = 255;
// Suffixes between two prefix sums of rewards: the grades of that many suffixes are one cache line.
inline constexpr Place SUM_EVERY = 32;
// What stands for a token that is not there: negative, and no separator.
inline constexpr Token NO_TOKEN = std::numeric_limits<Token>::min();
// A match of fewer tokens predicts the next token less reliably.
inline constexpr Place SURE_MATCH = 12;

inline void require(bool fits, const char* problem) {
    if (!fits) throw std::invalid_argument(problem);
}

// Start loading an element of a span or vector into the caches. The element need not exist, because the address is
// never read; only here is an address computed by hand.
template <typename Elements>
inline void prefetch(const Elements& elements, Place at) {
    __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(elements.data()) +
                                                     static_cast<std::uintptr_t>(at) * sizeof(*elements.data())));
}

// Call `work` for each `size` items, and for what is left.
template <typename Items, typename Work>
void in_groups(Items items, std::size_t size, Work work) {
    for (; !items.empty(); items = items.subspan(std::min(size, items.size())))
        work(items.first(std::min(size, items.size())));
}

// The buffer is not a whole draft index of this version; the message says what is wrong with the buffer.
class BufferError : public std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

struct Node {
    Place low = 0;
    Place high = 0;
    Place length = 0;

    bool empty() const { return low == high; }
    Place count() const { return high - low; }
};

// Where a draft from history ends: inside the window below the stop confidence, beyond it below the extend confidence.
struct StopRule {
    Place window = 0;
    double stop_confidence = 0.0;
    double extend_confidence = 0.0;
};

struct Continuation {
    // Number of tokens drafted.
    Place size = 0;
    // Position of a suffix that begins with the match and the draft.
    Place at = 0;
    // Whether the draft occurs in responses of earlier runs alone.
    bool earlier = false;
};

class Index {
public:
    // An index without tokens: nothing matches.
    Index() = default;

    // Open a buffer; `owner` keeps the buffer's memory alive. Throws BufferError unless header and sizes fit.
    Index(std::span<const std::byte> buffer, std::shared_ptr<const void> owner);

    bool empty() const { return tokens.empty(); }
    Place size() const { return static_cast<Place>(tokens.size()); }

    // The node of the longest suffix of `text`, of `shortest` to `longest` tokens, that occurs and is followed by a
    // token; an empty node if there is none. Negative tokens in `text` match nothing.
    Node longest_match(std::span<const Token> text, Place longest, Place shortest) const;

    // Draft the best continuation of `node` into `out`. The suffix at place `near` begins at position `at`; tokens are
    // read from that suffix while it stays in the node, because its tokens are in the caches.
    // `confidence[i]` becomes the estimated probability that the tokens up to and including i are all right. The draft
    // ends by the stop rule, but never before its first token.
    Continuation walk(Node node, Place near, Place at, const StopRule& rule, std::span<Token> out,
                      std::span<float> confidence) const;

    // The position in `tokens` where this run's own responses begin, behind those of earlier runs.
    Place own_begin = 0;
    std::span<const std::int64_t> rewards;
    std::span<const std::int64_t> sums;
    std::span<const std::int32_t> suffixes;
    std::span<const std::int32_t> places;
    std::span<const Token> tokens;
    std::span<const std::uint16_t> grades;
    std::span<const std::uint8_t> shared;

private:
    friend class Cursor;
    struct Match {
        Node node;
        // How many of the text's tokens, from the first on, occur at all.
        Place occurs;
    };

    // The token at a position; behind the text, where only a damaged index leads, another separator.
    Token at(Place position) const { return position < size() ? tokens[position] : NO_TOKEN; }
    Place place_of(Place position) const { return position < size() ? places[position] : 0; }
    Token token_at(Place place, Place depth) const { return at(suffixes[place] + depth); }
    // Whether a token follows the first `depth` ones in any suffix of a node that ends at `high`. Separators sort
    // first, so the last suffix decides.
    bool goes_on(Place high, Place depth) const { return token_at(high - 1, depth) >= 0; }

    Match match(std::span<const Token> text) const;
    bool same(Place model, Place place, Place known, Place depth) const;
    Place run_begin(Place place, Place depth) const;
    Place run_end(Place place, Place high, Place known, Place depth) const;
    Node node_around(Place place, Place depth) const;
    Node child_of(const Node& node, Token token) const;
    Place first_at_least(const Node& node, Token token) const;
    Place common(const Node& node, Place most) const;
    Node best_child(const Node& node) const;
    Continuation continuation(Place size, Place at, const Node& node) const;
    std::int64_t priority(Place low, Place high) const;
    Place latest(Place low, Place high) const;

    std::shared_ptr<const void> owner_;
};

// The position of one sample in a draft index, from which most matches follow without a search.
//
// A sample usually continues as its draft did. The longest match is then the last match plus the new tokens, at a known
// position of the text. If a token differs, the sample usually takes another branch of the same node. Only the
// remaining cases are searched. A match grows by at most as many tokens as the text grows, so a cursor never misses a
// longer one, and that bound also limits the search.
class Cursor {
public:
    struct Found {
        Node node;
        // A place inside the node.
        Place near = 0;
    };
    // As `Index::longest_match`, of `least` to `longest` tokens. `text` is the text of the last call plus new tokens;
    // `longest` is the same in all calls.
    Found follow(const Index& index, std::span<const Token> text, Place longest, Place least);

    // Expect the sample to continue as the suffix at position `at`, which begins with the match.
    void move_to(Place at) { at_ = at + length_; }

    // Forget the match, because the sample's index was replaced.
    void reset(Place longest) {
        *this = Cursor();
        bound_ = static_cast<std::int32_t>(longest);
    }

    // The position in the index's tokens behind the match, and the length of the match (0: none).
    Place at() const { return at_; }
    Place length() const { return length_; }

    // Prefetch what `follow` and `walk` will read for a text of `count` tokens. The three passes read what the pass
    // before them prefetched: the position's tokens and place, the node around that place, the node's rewards and text.
    void prefetch_pass(int pass, const Index& index, Place count, Place longest) const;

private:
    std::int32_t at_ = 0;
    // Tokens of the text at the last call.
    std::int32_t seen_ = 0;
    std::int32_t length_ = 0;
    // Upper bound of the longest match; equal to `length_` if there is a match.
    std::int32_t bound_ = 0;
};

// Return the buffer, without its checksum, of a draft index over `text`: pieces of these lengths, each with its
// separator, and with these fixed-point rewards; the first `earlier` pieces are of earlier runs. Throws
// std::invalid_argument if the numbers do not fit the text.
std::vector<std::uint8_t> build(std::span<const Token> text, std::span<const std::int64_t> lengths,
                                std::span<const std::int64_t> rewards, std::size_t earlier);

}  // namespace drafting
