// The table of what all prompts share (see shared.h).
#include "shared.h"

#include <algorithm>

namespace drafting {

namespace {

// Slots for each token of the window: 24 bytes.
constexpr Place SLOTS_PER_TOKEN = 3;
// A tick is this part of the window, so a forgotten entry is that much older than the window at most.
constexpr Place TICKS = 64;
// All slots are swept in this many ticks, so no entry gets as old as ticks take to repeat (256).
constexpr std::size_t SWEEP_TICKS = 128;
// Before anything was seen a guess is right with this probability, which counts as so many guesses.
constexpr float PRIOR = 0.3f, PRIOR_GUESSES = 5.0f;
// Beyond these guesses, half are forgotten: the policy changes.
constexpr float MOST_COUNTED = 400.0f;

}  // namespace

Shared::Shared(Place window) : tick_tokens_(std::max<Place>(window / TICKS, 1)) {
    require(window >= 0, "a window has 0 tokens or more");
    if (window) slots_ = make_array<Slot>(slabs_, static_cast<std::size_t>(SLOTS_PER_TOKEN * window));
}

std::size_t Shared::place_of(std::uint64_t hash) const { return (hash >> 32) * slots_.size() >> 32; }

bool Shared::knows(const Slot& slot, std::uint64_t hash) const {
    return slot.votes && slot.mark == static_cast<std::uint16_t>(hash) &&
           static_cast<std::uint8_t>(tick_ - slot.tick) <= TICKS;
}

Shared::Hashes Shared::hash(std::span<const Token> text, Place fewest) const {
    Hashes hashes{};
    if (empty()) return hashes;
    // FNV-1a from the last token back, with the final mix of MurmurHash3.
    std::uint64_t value = 14695981039346656037u;
    Place back = 0;
    for (std::size_t order = 0; order < ORDERS.size() && ORDERS[order] <= static_cast<Place>(text.size()); ++order) {
        for (; back < ORDERS[order]; ++back)
            value = (value ^ static_cast<std::uint32_t>(text[text.size() - 1 - back])) * 1099511628211u;
        if (ORDERS[order] < fewest) continue;
        const std::uint64_t mixed = (value ^ value >> 33) * 0xFF51AFD7ED558CCDu;
        // 0 stands for a context that is left out.
        hashes[order] = std::max<std::uint64_t>(mixed ^ mixed >> 33, 1);
        prefetch(slots_, static_cast<Place>(place_of(hashes[order])));
    }
    return hashes;
}

Shared::Known Shared::longest_known(const Hashes& hashes) const {
    for (std::size_t order = ORDERS.size(); order-- > 0;) {
        if (!hashes[order]) continue;
        const Slot& slot = slots_[place_of(hashes[order])];
        if (knows(slot, hashes[order])) return {order, &slot};
    }
    return {};
}

Shared::Guess Shared::guess(const Hashes& hashes) const {
    const auto [order, slot] = longest_known(hashes);
    if (slot == nullptr) return {};
    return {slot->token, ORDERS[order], kinds_[order][slot->votes].probability()};
}

float Shared::Kind::probability() const { return (right + PRIOR * PRIOR_GUESSES) / (all + PRIOR_GUESSES); }

float Shared::best() const {
    float best = 0.0f;
    for (const auto& by_votes : kinds_)
        for (const Kind& kind : by_votes) best = std::max(best, kind.probability());
    return best;
}

void Shared::enter(const Hashes& hashes, Token token) {
    if (const auto [order, slot] = longest_known(hashes); slot != nullptr) {
        Kind& kind = kinds_[order][slot->votes];
        if (kind.all >= MOST_COUNTED) kind = {kind.right / 2, kind.all / 2};
        kind.all += 1.0f;
        kind.right += slot->token == token ? 1.0f : 0.0f;
    }
    for (std::size_t order = 0; order < ORDERS.size() && hashes[order]; ++order) {
        Slot& slot = slots_[place_of(hashes[order])];
        if (knows(slot, hashes[order]) && slot.token == token) {
            slot.votes = static_cast<std::uint8_t>(std::min<std::size_t>(slot.votes + 1u, MOST_VOTES));
            slot.tick = tick_;
            continue;
        }
        // Majority vote, also between contexts that share a slot (see texts.cpp).
        const bool old = static_cast<std::uint8_t>(tick_ - slot.tick) > TICKS;
        if (slot.votes > 1 && !old)
            --slot.votes;
        else
            slot = {token, static_cast<std::uint16_t>(hashes[order]), 1, tick_};
    }
    if (++entered_ == tick_tokens_) advance();
}

// Begin the next tick, and empty old slots among the next ones.
void Shared::advance() {
    entered_ = 0;
    ++tick_;
    const std::size_t end = std::min(swept_ + slots_.size() / SWEEP_TICKS + 1, slots_.size());
    for (; swept_ < end; ++swept_)
        if (static_cast<std::uint8_t>(tick_ - slots_[swept_].tick) > TICKS) slots_[swept_] = {};
    if (swept_ == slots_.size()) swept_ = 0;
}

}  // namespace drafting
