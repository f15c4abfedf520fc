// How likely draft tokens are to be accepted, and how many of them a decode step verifies (RLHFSpec 5.2 and 5.3).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index.h"

namespace drafting {

// Draft tokens to verify of each draft, their sum, and how many of them are expected to be accepted.
struct Chosen {
    std::vector<std::int64_t> lengths;
    std::int64_t drafts = 0;
    double expected = 0.0;
};

// The draft lengths that yield most tokens a second.
//
// All running samples' drafts compete: tokens are taken in the order of the probability that they are accepted, each
// after those before it in its draft, up to the number D at which
//
//     (running + expected accepted draft tokens) / seconds[D]
//
// is greatest (RLHFSpec eq. 2; each running sample yields one sure token). The paper stops at the first decline;
// measured step times are staircases, where the next stair may be worth more than the edge of this one, so every cut is
// looked at: the walk is one addition and one division a cut.
//
// `acceptance`: one draft after the other, the probability that a token is accepted if those before it are; `lengths`:
// tokens of each draft; `seconds`: of a step with 0, 1, ... draft tokens; `tried`: tokens of the longest draft that are
// taken where nothing is worth it. Two tokens whose probabilities differ by less than 0.4 % are taken in the order of
// their samples. Throws std::invalid_argument where sizes do not fit.
Chosen choose(std::span<const float> acceptance, std::span<const std::int64_t> lengths, std::span<const double> seconds,
              std::int64_t running, std::int64_t tried);

// The first `taken` tokens of each draft, one after the other without gaps. Throws std::invalid_argument where sizes do
// not fit, or more is taken than there is.
std::vector<Token> cut(std::span<const Token> tokens, std::span<const std::int64_t> lengths,
                       std::span<const std::int64_t> taken);

// Lower edges of the classes after the first, of what a token's chance is looked up by.
struct Edges {
    std::span<const double> match;
    std::span<const double> recent;
    std::span<const double> confidence;

    std::size_t cells() const { return (match.size() + 1) * (recent.size() + 1) * (confidence.size() + 1); }
};

// The drafts of a step, one after the other: of each its source, tokens matched before it, its sample's recent
// acceptance in thousandths, its length; of each token the confidence that it is right if those before it are.
struct Judged {
    std::span<const std::int64_t> sources;
    std::span<const std::int64_t> matches;
    std::span<const std::int64_t> recents;
    std::span<const std::int64_t> lengths;
    std::span<const float> confidences;
};

// Fill each token's cell, its place in a table [sources, matches, recents, confidences]. Throws std::invalid_argument
// where sizes do not fit, or a source is none of the table's.
void find_cells(const Judged& drafts, const Edges& edges, std::size_t table_size, std::span<std::int32_t> cells);

// Count what became of drafts, by the cells of their tokens: `numbers` (-1 for a draft that teaches nothing), tokens
// verified and accepted. `begins`: where each draft's tokens begin in `cells`, and where the last one's end. What was
// verified past a draft's end teaches nothing. Returns how many tokens were verified before it.
std::int64_t learn(std::span<double> offered, std::span<double> accepted, std::span<const std::int32_t> cells,
                   std::span<const std::int64_t> begins, std::span<const std::int64_t> numbers,
                   std::span<const std::int64_t> verified, std::span<const std::int64_t> hits);

// Make each row of `width` values the non-decreasing one nearest to it in weighted squares (pool adjacent violators).
void make_isotonic(std::span<const double> values, std::span<const double> weights, std::size_t width,
                   std::span<float> out);

}  // namespace drafting
