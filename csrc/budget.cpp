#include "budget.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>

namespace drafting {

namespace {

// Probabilities are compared by the exponent and this many bits of their float: 0.4 %, less than anyone knows them.
constexpr int BITS = 8;
constexpr int SHIFT = 23 - BITS;
// Below this a draft token is not worth a look: the cheapest step on record gives a token in more than 1/1000 of
// itself.
constexpr float SMALLEST = 0x1p-10f;
constexpr int LOWEST = std::bit_cast<std::int32_t>(SMALLEST) >> SHIFT;
constexpr int BINS = (std::bit_cast<std::int32_t>(1.0f) >> SHIFT) - LOWEST + 1;

int bin_of(float path) { return std::min((std::bit_cast<std::int32_t>(path) >> SHIFT) - LOWEST, BINS - 1); }

void require(bool fits) {
    if (!fits) throw std::invalid_argument("the sizes of some drafts' arrays do not fit each other");
}

std::size_t total_of(std::span<const std::int64_t> lengths) {
    require(std::all_of(lengths.begin(), lengths.end(), [](std::int64_t length) { return length >= 0; }));
    return static_cast<std::size_t>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
}

// Take some tokens of the longest draft, although nothing is worth it.
void take_beginning(std::span<const float> acceptance, std::span<const std::int64_t> lengths, std::int64_t tried,
                    Chosen& chosen) {
    const auto longest = std::max_element(lengths.begin(), lengths.end());
    const auto number = static_cast<std::size_t>(longest - lengths.begin());
    auto at = total_of(lengths.first(number));
    chosen.lengths[number] = chosen.drafts = std::min(tried, *longest);
    double path = 1.0;
    for (std::int64_t taken = 0; taken < chosen.drafts; ++taken) {
        path *= double{acceptance[at++]};
        chosen.expected += path;
    }
}

std::int64_t class_of(std::span<const double> edges, double value) {
    return std::find_if(edges.begin(), edges.end(), [value](double edge) { return value < edge; }) - edges.begin();
}

}  // namespace

Chosen choose(std::span<const float> acceptance, std::span<const std::int64_t> lengths, std::span<const double> seconds,
              std::int64_t running, std::int64_t tried) {
    require(!seconds.empty() && total_of(lengths) == acceptance.size());
    // The probability that a token and all before it are accepted; 0 where that is not worth a look.
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

    Chosen chosen{std::vector<std::int64_t>(lengths.size()), 0, 0.0};
    const auto most = static_cast<std::int64_t>(seconds.size()) - 1;
    double best = static_cast<double>(running) / seconds[0], expected = 0.0;
    std::int64_t drafts = 0;
    for (std::size_t bin = BINS; bin-- > 0 && drafts < most;) {
        if (!count[bin]) continue;
        const double mean = total[bin] / static_cast<double>(count[bin]);
        for (std::int64_t left = std::min(count[bin], most - drafts); left > 0; --left) {
            ++drafts;
            expected += mean;
            const double value = (static_cast<double>(running) + expected) / seconds[drafts];
            if (value > best) {
                best = value;
                chosen.drafts = drafts;
                chosen.expected = expected;
            }
        }
    }

    // Bins above the one in which the cut lies are taken whole, of that one what is left, by sample and place.
    std::int64_t left = chosen.drafts;
    int cut = BINS - 1;
    while (cut >= 0 && count[cut] <= left) left -= count[cut--];
    begin = 0;
    for (std::size_t draft = 0; draft < lengths.size(); ++draft) {
        const std::size_t end = begin + static_cast<std::size_t>(lengths[draft]);
        for (std::size_t at = begin; at < end && paths[at] > 0.0f; ++at) {
            const int bin = bin_of(paths[at]);
            if (bin < cut || (bin == cut && left-- <= 0)) break;
            ++chosen.lengths[draft];
        }
        begin = end;
    }
    if (!chosen.drafts && tried > 0 && !acceptance.empty()) take_beginning(acceptance, lengths, tried, chosen);
    return chosen;
}

std::vector<Token> cut(std::span<const Token> tokens, std::span<const std::int64_t> lengths,
                       std::span<const std::int64_t> taken) {
    require(lengths.size() == taken.size() && total_of(lengths) == tokens.size());
    std::vector<Token> kept;
    kept.reserve(total_of(taken));
    for (std::size_t draft = 0; draft < lengths.size(); ++draft) {
        require(taken[draft] <= lengths[draft]);
        const auto own = tokens.first(lengths[draft]);
        kept.insert(kept.end(), own.begin(), own.begin() + taken[draft]);
        tokens = tokens.subspan(own.size());
    }
    return kept;
}

void find_cells(const Judged& drafts, const Edges& edges, std::size_t table_size, std::span<std::int32_t> cells) {
    const std::size_t count = drafts.lengths.size();
    require(drafts.sources.size() == count && drafts.matches.size() == count && drafts.recents.size() == count &&
            total_of(drafts.lengths) == drafts.confidences.size() && cells.size() == drafts.confidences.size());
    const auto matches = static_cast<std::int64_t>(edges.match.size()) + 1;
    const auto recents = static_cast<std::int64_t>(edges.recent.size()) + 1;
    const auto confidences = static_cast<std::int64_t>(edges.confidence.size()) + 1;
    const auto sources = static_cast<std::int64_t>(table_size / edges.cells());
    std::size_t at = 0;
    for (std::size_t draft = 0; draft < count; ++draft) {
        require(0 <= drafts.sources[draft] && drafts.sources[draft] < sources);
        const std::int64_t recent = class_of(edges.recent, static_cast<double>(drafts.recents[draft]));
        for (std::int64_t place = 0; place < drafts.lengths[draft]; ++place, ++at) {
            const std::int64_t match = class_of(edges.match, static_cast<double>(drafts.matches[draft] + place));
            const std::int64_t row = (drafts.sources[draft] * matches + match) * recents + recent;
            cells[at] = static_cast<std::int32_t>(row * confidences +
                                                  class_of(edges.confidence, double{drafts.confidences[at]}));
        }
    }
}

std::int64_t learn(std::span<double> offered, std::span<double> accepted, std::span<const std::int32_t> cells,
                   std::span<const std::int64_t> begins, std::span<const std::int64_t> numbers,
                   std::span<const std::int64_t> verified, std::span<const std::int64_t> hits) {
    require(offered.size() == accepted.size() && numbers.size() == verified.size() && numbers.size() == hits.size() &&
            !begins.empty() && begins.front() >= 0 && std::is_sorted(begins.begin(), begins.end()) &&
            static_cast<std::size_t>(begins.back()) <= cells.size());
    std::int64_t learnt = 0;
    for (std::size_t at = 0; at < numbers.size(); ++at) {
        const std::int64_t number = numbers[at];
        if (number < 0 || number + 1 >= static_cast<std::int64_t>(begins.size())) continue;
        const std::int64_t begin = begins[number];
        const std::int64_t seen = std::min(verified[at], begins[number + 1] - begin);
        for (std::int64_t place = 0; place < std::min(seen, hits[at] + 1); ++place) {
            const auto cell = static_cast<std::size_t>(cells[begin + place]);
            require(cell < offered.size());
            offered[cell] += 1.0;
            accepted[cell] += place < hits[at] ? 1.0 : 0.0;
        }
        learnt += seen;
    }
    return learnt;
}

void make_isotonic(std::span<const double> values, std::span<const double> weights, std::size_t width,
                   std::span<float> out) {
    require(width > 0 && values.size() == weights.size() && values.size() == out.size() && values.size() % width == 0);
    struct Pool {
        double mean, weight;
        std::size_t until;
    };
    std::vector<Pool> pools;
    for (std::size_t begin = 0; begin < values.size(); begin += width) {
        pools.clear();
        for (std::size_t place = begin; place < begin + width; ++place) {
            pools.push_back({values[place], weights[place], place + 1});
            while (pools.size() > 1 && pools[pools.size() - 2].mean > pools.back().mean) {
                const Pool last = pools.back();
                pools.pop_back();
                Pool& before = pools.back();
                const double both = before.weight + last.weight;
                before.mean = (before.mean * before.weight + last.mean * last.weight) / both;
                before.weight = both;
                before.until = last.until;
            }
        }
        std::size_t at = begin;
        for (const Pool& pool : pools)
            while (at < pool.until) out[at++] = static_cast<float>(pool.mean);
    }
}

}  // namespace drafting
