// The best continuation of a match in a draft index (RhymeRL, sections 5.2 and 5.3).
//
// At each branch the child with the greatest (max(priority, 0), count, recency) is taken. A small node is looked at
// once: the numbers of tokens that neighbours share say where its children end and up to where none of them branches.
#include <algorithm>
#include <limits>

#include "bytes.h"
#include "index.h"

namespace drafting {

namespace {

// A step's confidence is (count + A) / (node's count + B) for the child that is followed: A < B, so that a node with
// one child is not certain, and one that was seen often is more certain than one seen once. From a recorded run of the
// embedded task: a node seen once went on as before 19 times of 20, one seen four times or more 99 times of 100.
constexpr double CONFIDENCE_A = 0.5;
constexpr double CONFIDENCE_B = 0.55;
// With fewer than SURE_MATCH tokens before it a node goes on as before less often (there: 75 to 95 of 100 with 4 to
// 11); with more than that, their number says nothing any more.
constexpr double SHORT_MATCH_FACTOR = 0.92;
// A node's sum of rewards that nobody has made yet: no sum is so small, because the format keeps bits to spare.
constexpr std::int64_t NOT_SUMMED = std::numeric_limits<std::int64_t>::min();
// What is known of a large node: nothing.
constexpr Place UNKNOWN = -1;

}  // namespace

Walked Index::walk(Node node, Place near, Place at, const WalkRules& rules, std::span<Token> out,
                   std::span<float> confidence) const {
    auto [low, high, depth] = node;
    const Place room = static_cast<Place>(out.size());
    Place found = 0;
    double sure = 1.0;
    Place known = least_shared(low, high);
    std::int64_t total = NOT_SUMMED;
    while (found < room) {
        const Place count = high - low;
        Place up_to = depth + room - found;
        if (count > 1) {
            up_to = depth <= known && known < MOST_SHARED ? known : common(low, high, depth, up_to);
            if (up_to == depth) {
                const Child best = best_child(low, high, depth, total);
                low = best.low;
                high = best.high;
                known = best.known;
                total = best.total;
                if (low == high) break;
                up_to = depth + 1;
            }
        }
        const double factor =
            (static_cast<double>(high - low) + CONFIDENCE_A) / (static_cast<double>(count) + CONFIDENCE_B);
        if (near < low || near >= high) {
            near = low;
            at = suffixes[near];
        }
        while (depth < up_to && found < room) {
            const Token token = tokens[at + depth];
            if (token < 0) return {found, at};
            sure *= factor;
            if (depth < SURE_MATCH) sure *= SHORT_MATCH_FACTOR;
            const float kept = static_cast<float>(sure);
            if (found && double{kept} < (found < rules.window ? rules.stop_confidence : rules.extend_confidence))
                return {found, at};
            out[found] = token;
            confidence[found] = kept;
            ++found;
            ++depth;
        }
    }
    return {found, at};
}

// Whether the node's numbers of shared tokens are looked at together.
bool Index::is_small(Place low, Place high) const { return high - low <= TOGETHER && low + TOGETHER <= size(); }

// How many first tokens all suffixes of the small node [low, high) share: MOST_SHARED or more; UNKNOWN: it is large.
// What the first suffix shares, it shares with one before the node.
Place Index::least_shared(Place low, Place high) const {
    return is_small(low, high) ? least_byte_behind(shared, low, high - low) : UNKNOWN;
}

// How many first tokens (at least `depth`, at most `most`) all suffixes of the node [low, high) have in common.
Place Index::common(Place low, Place high, Place depth, Place most) const {
    const Place first = suffixes[low], last = suffixes[high - 1];
    Place alike = depth;
    while (alike < most && tokens[first + alike] == tokens[last + alike]) ++alike;
    return alike;
}

// Empty: all suffixes of the node end here. `total`: the node's sum of rewards, or NOT_SUMMED.
Index::Child Index::best_child(Place low, Place high, Place depth, std::int64_t total) const {
    if (depth < MOST_SHARED && is_small(low, high)) {
        Child best = best_of_small(low, high, depth, total);
        // What ends here is a child of its own, of one suffix, and takes no part.
        if (best.high - best.low > 1 || token_at(best.low, depth) >= 0) {
            best.known = least_shared(best.low, best.high);
            return best;
        }
    }
    Place start = first_at_least(low, high, depth, 0);
    Child best{start, start, UNKNOWN, NOT_SUMMED};
    std::int64_t best_priority = -1;
    while (start < high) {
        const Place end = child_end(start, high, depth);
        const std::int64_t its = std::max<std::int64_t>(priority(start, end), 0);
        if (is_better(start, end, its, best, best_priority)) {
            best.low = start;
            best.high = end;
            best_priority = its;
        }
        start = end;
    }
    best.known = least_shared(best.low, best.high);
    return best;
}

// As `best_child` for a small node with branches at `depth`, but what ends here takes part. A child that most suffixes
// are in comes last: what the others sum up to is less work than its own sum.
Index::Child Index::best_of_small(Place low, Place high, Place depth, std::int64_t total) const {
    const Place count = high - low;
    // A bit for each suffix that begins a child.
    const std::uint64_t here = (std::uint64_t{1} << count) - 1;
    std::uint64_t starts =
        (~std::uint64_t{bytes_at_least(shared, low, static_cast<std::uint8_t>(depth + 1))} & here) | 1;
    Child best{low, low, UNKNOWN, 0};
    std::int64_t best_priority = -1, of_others = 0;
    Place most_start = low, most_end = low;
    while (starts) {
        const Place start = low + std::countr_zero(starts);
        starts &= starts - 1;
        const Place end = std::min(low + std::countr_zero(starts), high);
        if (2 * (end - start) > count) {
            most_start = start;
            most_end = end;
            continue;
        }
        const std::int64_t sum = sum_one_by_one(start, end);
        of_others += sum;
        const std::int64_t its = std::max<std::int64_t>(sum, 0);
        if (is_better(start, end, its, best, best_priority)) {
            best = {start, end, UNKNOWN, sum};
            best_priority = its;
        }
    }
    if (most_start < most_end) {
        const std::int64_t sum = total == NOT_SUMMED ? sum_one_by_one(most_start, most_end) : total - of_others;
        if (is_better(most_start, most_end, std::max<std::int64_t>(sum, 0), best, best_priority))
            best = {most_start, most_end, UNKNOWN, sum};
    }
    return best;
}

// Whether the child [start, end) goes before the best one so far.
bool Index::is_better(Place start, Place end, std::int64_t priority, const Child& best,
                      std::int64_t best_priority) const {
    if (priority != best_priority) return priority > best_priority;
    const Place gain = (end - start) - (best.high - best.low);
    if (gain) return gain > 0;
    // Rare enough that scanning the two intervals is cheaper than keeping range maxima for all of them.
    return latest(start, end) > latest(best.low, best.high);
}

// The furthest position of the suffixes [low, high).
Place Index::latest(Place low, Place high) const {
    Place found = 0;
    for (Place place = low; place < high; ++place) found = std::max<Place>(found, suffixes[place]);
    return found;
}

// The sum of the rewards of the suffixes [low, high).
std::int64_t Index::priority(Place low, Place high) const {
    if (high - low <= SUM_EVERY) return sum_one_by_one(low, high);
    const Place first = (low + SUM_EVERY - 1) / SUM_EVERY, last = high / SUM_EVERY;
    return sum_one_by_one(low, first * SUM_EVERY) + (sums[last] - sums[first]) + sum_one_by_one(last * SUM_EVERY, high);
}

// `priority`, of few suffixes.
std::int64_t Index::sum_one_by_one(Place low, Place high) const {
    std::int64_t total = 0;
    for (Place place = low; place < high; ++place) total += rewards[grades[place]];
    return total;
}

}  // namespace drafting
