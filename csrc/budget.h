// How likely draft tokens are to be accepted, and how many of them a decode step verifies (RLHFSpec, 5.2 and 5.3).
//
// Invariants: drafts lie one behind the other in their arrays, without gaps, and `lengths` says where each ends. Arrays
// that do not fit each other throw std::invalid_argument.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "index.h"

namespace drafting {

using Integers = std::span<const std::int64_t>;

inline void require_fit(bool fits) {
    if (!fits) throw std::invalid_argument("the sizes of some drafts' arrays do not fit each other");
}

// The sum of lengths, none of which is negative.
inline std::size_t total_of(Integers lengths) {
    std::int64_t total = 0;
    for (const std::int64_t length : lengths) {
        require_fit(0 <= length && length <= std::numeric_limits<std::int64_t>::max() - total);
        total += length;
    }
    return static_cast<std::size_t>(total);
}

// The draft lengths that yield most tokens a second, their sum, and how many of these tokens are expected to be
// accepted.
//
// All running samples' drafts compete: tokens are taken in the order of the probability that they are accepted, each
// behind the tokens before it in its draft, up to the number D that maximizes
//
//     (running + expected accepted draft tokens) / seconds[D]
//
// (RLHFSpec, equation 2; each running sample yields one sure token). The paper stops at the first decline. Measured
// step times are staircases, on which a later stair may be better, so every D is tried: an addition and a division
// each.
//
// `acceptance`: each token's probability to be accepted if those before it are. `seconds`: of a step with 0, 1, ...
// draft tokens. `tried`: tokens of the longest draft that are taken if none is worth it. Tokens whose probabilities
// differ by less than 0.4 % are taken in the order of their samples.
inline std::tuple<std::vector<std::int64_t>, std::int64_t, double> choose(std::span<const float> acceptance,
                                                                          Integers lengths,
                                                                          std::span<const double> seconds,
                                                                          std::int64_t running, std::int64_t tried) {
    // Probabilities are sorted into bins by their exponent and this many bits behind it.
    constexpr int BITS = 8, SHIFT = 23 - BITS;
    // Less probable tokens are never worth it: the cheapest step on record verifies a token in over 1/1000 of its time.
    constexpr float SMALLEST = 0x1p-10f;
    constexpr int LOWEST = std::bit_cast<std::int32_t>(SMALLEST) >> SHIFT;
    constexpr int BINS = (std::bit_cast<std::int32_t>(1.0f) >> SHIFT) - LOWEST + 1;
    const auto bin_of = [](float path) {
        return std::min((std::bit_cast<std::int32_t>(path) >> SHIFT) - LOWEST, BINS - 1);
    };
    require_fit(!seconds.empty() && total_of(lengths) == acceptance.size());
    // The probability that a token and all before it are accepted; 0 if that is below SMALLEST.
    std::vector<float> paths(acceptance.size());
    std::vector<std::int64_t> count(BINS);
    std::vector<double> total(BINS);
    std::size_t begin = 0;
    for (const std::int64_t length : lengths) {
        float path = 1.0f;
        const std::size_t end = begin + static_cast<std::size_t>(length);
        for (std::size_t at = begin; at < end; ++at) {
            path *= acceptance[at];
            if (!(path >= SMALLEST)) break;
            paths[at] = path;
            ++count[bin_of(path)];
            total[bin_of(path)] += double{path};
        }
        begin = end;
    }

    const auto most = static_cast<std::int64_t>(seconds.size()) - 1;
    double best = static_cast<double>(running) / seconds[0], expected = 0.0, best_expected = 0.0;
    std::int64_t tokens = 0, best_tokens = 0;
    for (std::size_t bin = BINS; bin-- > 0 && tokens < most;) {
        if (!count[bin]) continue;
        const double mean = total[bin] / static_cast<double>(count[bin]);
        for (std::int64_t left = std::min(count[bin], most - tokens); left > 0; --left) {
            ++tokens;
            expected += mean;
            const double value = (static_cast<double>(running) + expected) / seconds[tokens];
            if (value > best) {
                best = value;
                best_tokens = tokens;
                best_expected = expected;
            }
        }
    }

    // Whole bins are taken down to the bin `cut`, of which only what is left is taken, in the order of the samples.
    std::vector<std::int64_t> chosen(lengths.size());
    std::int64_t left = best_tokens;
    int cut = BINS - 1;
    while (cut >= 0 && count[cut] <= left) left -= count[cut--];
    begin = 0;
    for (std::size_t draft = 0; draft < lengths.size(); ++draft) {
        const std::size_t end = begin + static_cast<std::size_t>(lengths[draft]);
        for (std::size_t at = begin; at < end && paths[at] > 0.0f; ++at) {
            const int bin = bin_of(paths[at]);
            if (bin < cut || (bin == cut && left-- <= 0)) break;
            ++chosen[draft];
        }
        begin = end;
    }
    if (!best_tokens && tried > 0 && !acceptance.empty()) {
        const auto longest =
            static_cast<std::size_t>(std::max_element(lengths.begin(), lengths.end()) - lengths.begin());
        best_tokens = chosen[longest] = std::min(tried, lengths[longest]);
        double path = 1.0;
        for (const float probability : acceptance.subspan(total_of(lengths.first(longest)), best_tokens))
            best_expected += path *= double{probability};
    }
    return {std::move(chosen), best_tokens, best_expected};
}

// The first `taken` tokens of each draft.
inline std::vector<Token> cut(std::span<const Token> tokens, Integers lengths, Integers taken) {
    require_fit(lengths.size() == taken.size() && total_of(lengths) == tokens.size());
    std::vector<Token> kept;
    for (std::size_t draft = 0; draft < lengths.size(); ++draft) require_fit(taken[draft] <= lengths[draft]);
    kept.reserve(total_of(taken));
    for (std::size_t draft = 0; draft < lengths.size(); ++draft) {
        kept.insert(kept.end(), tokens.begin(), tokens.begin() + taken[draft]);
        tokens = tokens.subspan(lengths[draft]);
    }
    return kept;
}

// Each draft token's cell in `table` [source, match class, recent class, confidence class], and its probability there.
// A class begins at each edge, and one before the first. Of each draft: its source, the tokens matched before it, its
// sample's recent acceptance rate in thousandths, and its length; of each token the confidence that it is right if
// those before it are.
inline std::tuple<std::vector<std::int32_t>, std::vector<float>> estimate(Integers sources, Integers matches,
                                                                          Integers recents, Integers lengths,
                                                                          std::span<const float> confidences,
                                                                          Integers match_edges, Integers recent_edges,
                                                                          std::span<const double> confidence_edges,
                                                                          std::span<const float> table) {
    const std::size_t count = lengths.size();
    require_fit(sources.size() == count && matches.size() == count && recents.size() == count &&
                total_of(lengths) == confidences.size());
    // Without a branch, because edges are few and branches would be unpredictable.
    const auto class_of = [](auto edges, auto value) {
        std::int64_t found = 0;
        for (const auto edge : edges) found += value >= edge;
        return found;
    };
    const auto classes = [](auto edges) { return static_cast<std::int64_t>(edges.size()) + 1; };
    const std::int64_t row = classes(confidence_edges), rows = classes(recent_edges) * row,
                       most = static_cast<std::int64_t>(table.size()) / (classes(match_edges) * rows);
    std::vector<std::int32_t> cells(confidences.size());
    std::vector<float> probabilities(confidences.size());
    std::size_t token = 0;
    for (std::size_t draft = 0; draft < count; ++draft) {
        require_fit(0 <= sources[draft] && sources[draft] < most);
        const std::int64_t first =
            sources[draft] * classes(match_edges) * rows + class_of(recent_edges, recents[draft]) * row;
        for (std::int64_t matched = matches[draft]; matched < matches[draft] + lengths[draft]; ++matched, ++token) {
            const std::int64_t cell =
                first + class_of(match_edges, matched) * rows + class_of(confidence_edges, double{confidences[token]});
            cells[token] = static_cast<std::int32_t>(cell);
            probabilities[token] = table[cell];
        }
    }
    return {std::move(cells), std::move(probabilities)};
}

// Count in `offered` and `accepted`, by the tokens' cells, what became of drafts; return the number of verified tokens.
// `lengths`: of the drafts whose tokens the cells are. Of each verified draft: its number among those (-1: nothing is
// learnt), and the tokens verified and accepted. Tokens verified behind a draft's end count nowhere.
inline std::int64_t learn(std::span<double> offered, std::span<double> accepted, std::span<const std::int32_t> cells,
                          Integers lengths, Integers numbers, Integers verified, Integers hits) {
    require_fit(offered.size() == accepted.size() && numbers.size() == verified.size() &&
                numbers.size() == hits.size() && total_of(lengths) == cells.size());
    const auto all = static_cast<std::int64_t>(offered.size());
    require_fit(std::all_of(cells.begin(), cells.end(), [&](std::int32_t cell) { return 0 <= cell && cell < all; }));
    std::vector<std::int64_t> begins(lengths.size());
    std::exclusive_scan(lengths.begin(), lengths.end(), begins.begin(), std::int64_t{0});
    std::int64_t learnt = 0;
    for (std::size_t draft = 0; draft < numbers.size(); ++draft) {
        const std::int64_t number = numbers[draft];
        if (number < 0 || number >= static_cast<std::int64_t>(lengths.size())) continue;
        const std::int64_t seen = std::min(verified[draft], lengths[number]);
        for (std::int64_t place = 0; place < seen && place <= hits[draft]; ++place) {
            const auto cell = static_cast<std::size_t>(cells[begins[number] + place]);
            offered[cell] += 1.0;
            accepted[cell] += place < hits[draft] ? 1.0 : 0.0;
        }
        learnt += seen;
    }
    return learnt;
}

// Make each row of `width` values the nearest non-decreasing one by weighted squares (pool adjacent violators).
inline void make_isotonic(std::span<const double> values, std::span<const double> weights, std::size_t width,
                          std::span<float> out) {
    require_fit(width > 0 && values.size() == weights.size() && values.size() == out.size() &&
                values.size() % width == 0);
    struct Pool {
        double mean, weight;
        std::size_t end;
    };
    std::vector<Pool> pools;
    for (std::size_t begin = 0; begin < values.size(); begin += width) {
        pools.clear();
        for (std::size_t at = begin; at < begin + width; ++at) {
            Pool last{values[at], weights[at], at + 1};
            for (; !pools.empty() && pools.back().mean > last.mean; pools.pop_back()) {
                const Pool& before = pools.back();
                const double both = before.weight + last.weight;
                last = {(before.mean * before.weight + last.mean * last.weight) / both, both, last.end};
            }
            pools.push_back(last);
        }
        std::size_t at = begin;
        for (const Pool& pool : pools)
            while (at < pool.end) out[at++] = static_cast<float>(pool.mean);
    }
}

}  // namespace drafting
