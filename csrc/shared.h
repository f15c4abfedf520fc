// What the responses of all prompts share: for the last few tokens, the token that mostly followed them.
//
// A slot of one table holds a context (the hash of ORDERS[k] tokens), the token that mostly followed it, and votes for
// that token. A guess comes from the longest known context. How often such guesses are right is counted by the length
// of the context and the votes, each time a token is entered. So the table knows its acceptance without any draft.
//
// Invariants: a guess followed its context within the last `window` entered tokens; the table has at most 24 bytes for
// each token of the window; entering and guessing cost the same however many tokens there are. A slot that another
// context took over loses a guess. Two contexts with the same hash give a wrong guess, which verification rejects.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "index.h"
#include "memory.h"

namespace drafting {

class Shared {
public:
    // The lengths of contexts.
    static constexpr std::array<Place, 10> ORDERS{1, 2, 3, 4, 5, 6, 7, 8, 10, 12};
    static constexpr Place LONGEST = ORDERS.back();
    using Hashes = std::array<std::uint64_t, ORDERS.size()>;

    // `window`: tokens that are remembered; 0: none, and then nothing is known.
    explicit Shared(Place window);

    bool empty() const { return slots_.empty(); }
    std::size_t memory_bytes() const { return slots_.size() * sizeof(Slot); }

    struct Guess {
        // -1: no context is known.
        Token token = -1;
        // The tokens of the known context, and the probability that the guess is right.
        Place matched = 0;
        float probability = 0.0f;
    };

    // Hash the ends of a text, and prefetch their slots. Contexts that are longer than the text or shorter than
    // `fewest` are left out.
    Hashes hash(std::span<const Token> text, Place fewest = 0) const;
    // Guess what follows a text with these hashes.
    Guess guess(const Hashes& hashes) const;
    // The probability that the likeliest guess of any kind is right.
    float best() const;
    // Enter that `token` followed a text with these hashes.
    void enter(const Hashes& hashes, Token token);

private:
    struct Slot {
        Token token;
        // Bits of the context's hash that do not choose the slot.
        std::uint16_t mark;
        // 0: empty.
        std::uint8_t votes;
        // When the token last followed the context, in ticks.
        std::uint8_t tick;
    };
    static constexpr std::size_t MOST_VOTES = 15;
    // Guesses of one kind, and how many of them were right.
    struct Kind {
        float right = 0.0f, all = 0.0f;
        float probability() const;
    };
    struct Known {
        std::size_t order = 0;
        const Slot* slot = nullptr;
    };

    std::size_t place_of(std::uint64_t hash) const;
    bool knows(const Slot& slot, std::uint64_t hash) const;
    Known longest_known(const Hashes& hashes) const;
    void advance();

    // On huge pages: finding the page of a slot would take longer than reading the slot.
    Slabs slabs_;
    Array<Slot> slots_;
    std::array<std::array<Kind, MOST_VOTES + 1>, ORDERS.size()> kinds_{};
    // Tokens of a tick, tokens entered in this tick, the tick, and the slot that is looked at next for old entries.
    Place tick_tokens_, entered_ = 0;
    std::uint8_t tick_ = 0;
    std::size_t swept_ = 0;
};

}  // namespace drafting
