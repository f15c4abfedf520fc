// Lookups in a draft index: the longest match (RhymeRL, section 5.2), a sample's cursor, and the best continuation
// (sections 5.2 and 5.3).
//
// At each branch the child with the greatest (max(sum of rewards, 0), count, recency) is taken. Ends of nodes are first
// looked for among LOOKED_AT neighbours, by the numbers of tokens that neighbours share, which lie side by side; ends
// further away are found by bisection.
#include <algorithm>

#include "index.h"

namespace drafting {

namespace {

// Neighbours that are compared one after the other before an end is searched for.
constexpr Place LOOKED_AT = 64;
// Of a node of many suffixes, as many are looked at: a draft costs the same however many responses there are.
constexpr Place MOST_LOOKED_AT = 1024;
// New tokens that a cursor follows one after the other. A sample whose other sources matched for long has more, and
// then a search is cheaper.
constexpr Place MOST_FOLLOWED = 65;
// Tokens on a cache line, and lines of history behind a cursor that are prefetched: new tokens and a draft seldom take
// more.
constexpr Place LINE_TOKENS = 64 / sizeof(Token);
constexpr Place PREFETCHED_LINES = 4;
// The confidence of a step is (child's count + A) / (node's count + B) with A < B: a node with one child is not
// certain, and a node seen often is more certain than a node seen once. In a recorded run of the embedded task a node
// seen once continued as before 19 times of 20, a node seen four times or more 99 times of 100.
constexpr double CONFIDENCE_A = 0.5;
constexpr double CONFIDENCE_B = 0.55;
// Factor for each step behind fewer than SURE_MATCH tokens: there 75 to 95 of 100 continued as before with 4 to 11
// tokens; more tokens than SURE_MATCH change nothing.
constexpr double SHORT_MATCH_FACTOR = 0.92;

// The first place in [low, high) for which `before` is false; `before` is true up to there and false behind.
template <typename Before>
Place bisect(Place low, Place high, Before before) {
    while (low < high) {
        const Place middle = (low + high) >> 1;
        if (before(middle))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

}  // namespace

Node Index::longest_match(std::span<const Token> text, Place longest, Place shortest) const {
    const Place count = static_cast<Place>(text.size());
    Place usable = 0;
    while (usable < count && usable < longest && text[count - 1 - usable] >= 0) ++usable;
    if (usable < shortest) return {};
    // Every continuation of a match also continues each suffix of that match, so the longest match can be found by
    // bisection. The first guess is the greatest length, because most samples continue as before. If that fails, the
    // number of tokens that occur says where the sample left the history: the next guess begins right behind. If that
    // fails too, the shortest length comes next, because then there is often no match.
    Node best;
    Place length = usable, low_end = shortest, high_end = usable;
    while (low_end <= high_end) {
        const Match found = match(text.last(length));
        Place guess = 0;
        if (!found.node.empty() && goes_on(found.node.high, length)) {
            if (!best.length) guess = length + 1;
            best = found.node;
            low_end = length + 1;
        } else if (length == shortest) {
            return {};
        } else {
            high_end = length - 1;
            if (!best.length) guess = length == usable ? std::max(shortest, length - found.occurs - 1) : shortest;
        }
        length = guess ? std::min(guess, high_end) : (low_end + high_end + 1) >> 1;
    }
    return best;
}

// The node of `text`; empty where the text does not occur.
Index::Match Index::match(std::span<const Token> text) const {
    const Place length = static_cast<Place>(text.size());
    // Tokens that the suffixes around the bisected interval share with the text: all between share the fewer of both.
    Place below = 0, above = 0;
    const Place low = bisect(0, size(), [&](Place middle) {
        const Place begin = suffixes[middle];
        Place alike = std::min(below, above);
        // The text has no separators, so a suffix that is shorter than the text differs at its separator.
        while (alike < length && at(begin + alike) == text[alike]) ++alike;
        const bool less = alike < length && at(begin + alike) < text[alike];
        (less ? below : above) = alike;
        return less;
    });
    if (above < length) return {{low, low, length}, std::max(below, above)};
    return {{low, run_end(low, size(), 0, length), length}, length};
}

// Whether the suffix at `place` has the tokens [known, depth) of the suffix at position `model`.
bool Index::same(Place model, Place place, Place known, Place depth) const {
    while (known < depth && token_at(place, known) == at(model + known)) ++known;
    return known == depth;
}

// The end of the suffixes that share `depth` tokens with the one at `place`. Those up to `high` share `known` tokens.
Place Index::run_end(Place place, Place high, Place known, Place depth) const {
    Place end = place + 1;
    if (depth <= MOST_SHARED) {
        const Place near = std::min(high, end + LOOKED_AT);
        while (end < near && shared[end] >= depth) ++end;
        if (end < near || end == high) return end;
    }
    const Place model = suffixes[place];
    return bisect(end, high, [&](Place middle) { return same(model, middle, known, depth); });
}

// The first of the suffixes that share `depth` tokens with the one at `place`.
Place Index::run_begin(Place place, Place depth) const {
    Place begin = place;
    if (depth <= MOST_SHARED) {
        const Place near = std::max<Place>(0, begin - LOOKED_AT);
        while (begin > near && shared[begin] >= depth) --begin;
        if (begin > near || begin == 0) return begin;
    }
    const Place model = suffixes[place];
    return bisect(0, begin, [&](Place middle) { return !same(model, middle, 0, depth); });
}

// The node of the suffixes that share `depth` tokens with the one at `place`.
Node Index::node_around(Place place, Place depth) const {
    return {run_begin(place, depth), run_end(place, size(), 0, depth), depth};
}

// The child of `node` that `token` leads to; empty if there is none.
Node Index::child_of(const Node& node, Token token) const {
    const Place low = first_at_least(node, token);
    const bool found = low < node.high && token_at(low, node.length) == token;
    return {low, found ? run_end(low, node.high, node.length, node.length + 1) : low, node.length + 1};
}

// The first suffix of the node whose next token is at least `token`; the node's end if there is none.
Place Index::first_at_least(const Node& node, Token token) const {
    if (token_at(node.low, node.length) >= token) return node.low;
    return bisect(node.low + 1, node.high, [&](Place middle) { return token_at(middle, node.length) < token; });
}

Cursor::Found Cursor::follow(const Index& index, std::span<const Token> text, Place longest, Place least) {
    const Place count = static_cast<Place>(text.size());
    Place length = length_, at = at_, bound = std::min(longest, Place{bound_} + count - seen_);
    if (count - seen_ > MOST_FOLLOWED) length = 0;
    for (Place number = seen_; length && number < count; ++number) {
        const Token token = text[number];
        // A placeholder matches nothing.
        if (token < 0) {
            length = 0;
            break;
        }
        const Place grown = std::min(longest, length + 1);
        if (token == index.at(at)) {
            ++at;
        } else {
            // Perhaps another branch of the same node: the tokens before position `at`, and `token`.
            const Node node = index.child_of(index.node_around(index.place_of(at - (grown - 1)), grown - 1), token);
            if (node.empty()) {
                bound = std::min(longest, grown - 1 + count - 1 - number);
                length = 0;
                break;
            }
            at = index.suffixes[node.low] + grown;
        }
        length = grown;
    }
    Found found;
    if (length) {
        bound = length;
        found.near = index.place_of(at - length);
        found.node = index.node_around(found.near, length);
        if (index.at(at) < 0 && !index.goes_on(found.node.high, length)) {
            bound = length - 1;
            length = 0;
        }
    }
    if (!length && bound >= least) {
        found.node = index.longest_match(text, bound, least);
        length = found.node.length;
        found.near = found.node.low;
        bound = length ? length : least - 1;
        if (length) at = index.suffixes[found.near] + length;
    }
    at_ = static_cast<std::int32_t>(at);
    length_ = static_cast<std::int32_t>(length);
    bound_ = static_cast<std::int32_t>(bound);
    seen_ = static_cast<std::int32_t>(count);
    return length < least ? Found{} : found;
}

void Cursor::prefetch_pass(int pass, const Index& index, Place count, Place longest) const {
    if (!length_) return;
    // The longest possible match, and the position where that match begins.
    const Place bound = std::min(longest, Place{bound_} + count - seen_), start = at_ + count - seen_ - bound;
    if (pass == 0) {
        for (Place line = 0; line < PREFETCHED_LINES; ++line) prefetch(index.tokens, at_ + line * LINE_TOKENS);
        prefetch(index.places, start);
    } else if (start < index.size()) {
        Place place = index.places[start];
        if (pass == 1) {
            prefetch(index.shared, place);
            prefetch(index.suffixes, place);
        } else {
            const Place near = std::max<Place>(0, place - LINE_TOKENS);
            while (place > near && index.shared[place] >= bound) --place;
            prefetch(index.grades, place);
            prefetch(index.tokens, index.suffixes[place] + bound);
            prefetch(index.tokens, index.suffixes[place] + bound + LINE_TOKENS);
        }
    }
}

Continuation Index::walk(Node node, Place near, Place at, const StopRule& rule, std::span<Token> out,
                         std::span<float> confidence) const {
    const Place room = static_cast<Place>(out.size());
    Place size = 0;
    double certainty = 1.0;
    while (size < room) {
        const auto count = static_cast<double>(node.count());
        // Up to here all suffixes of the node are equal.
        Place until = node.length + room - size;
        if (node.count() > 1) until = common(node, until);
        if (until == node.length) {
            const Node best = best_child(node);
            if (best.empty()) break;
            node.low = best.low;
            node.high = best.high;
            ++until;
        }
        const double factor = (static_cast<double>(node.count()) + CONFIDENCE_A) / (count + CONFIDENCE_B);
        if (near < node.low || near >= node.high) {
            near = node.low;
            at = suffixes[near];
        }
        for (; node.length < until && size < room; ++node.length, ++size) {
            const Token token = this->at(at + node.length);
            if (token < 0) return continuation(size, at, node);
            certainty *= factor;
            if (node.length < SURE_MATCH) certainty *= SHORT_MATCH_FACTOR;
            const auto kept = static_cast<float>(certainty);
            if (size && double{kept} < (size < rule.window ? rule.stop_confidence : rule.extend_confidence))
                return continuation(size, at, node);
            out[size] = token;
            confidence[size] = kept;
        }
    }
    return continuation(size, at, node);
}

// The continuation that ends in `node`.
Continuation Index::continuation(Place size, Place at, const Node& node) const {
    const auto first = suffixes.begin() + node.low;
    const auto last = suffixes.begin() + std::min(node.high, node.low + MOST_LOOKED_AT);
    const bool earlier = own_begin && std::all_of(first, last, [&](std::int32_t its) { return its < own_begin; });
    return {size, at, earlier};
}

// How many first tokens (at least the node's length, at most `most`) all suffixes of the node have in common.
Place Index::common(const Node& node, Place most) const {
    if (node.count() <= LOOKED_AT) {
        std::uint8_t least = MOST_SHARED;
        for (Place place = node.low + 1; place < node.high; ++place) least = std::min(least, shared[place]);
        if (least < MOST_SHARED) return std::min<Place>(least, most);
    }
    const Place first = suffixes[node.low], last = suffixes[node.high - 1];
    Place alike = node.length;
    while (alike < most && at(first + alike) == at(last + alike)) ++alike;
    return alike;
}

// The best child of the node; empty if all of its suffixes end here. Those that end sort first, and are as many as
// responses end alike, so they are left out by a search. A node of many suffixes is stepped through, and then a child
// with fewer of them than a step may be missed; a draft would end before it all the same.
Node Index::best_child(const Node& node) const {
    const Place start = first_at_least(node, 0), step = node.count() / MOST_LOOKED_AT;
    Node best{start, start, node.length + 1};
    std::int64_t best_priority = -1;
    for (Place at = start, high; at < node.high; at = std::max(high, at + step)) {
        const Place low = step > 1 ? std::min(at, first_at_least(node, token_at(at, node.length))) : at;
        high = run_end(low, node.high, node.length, node.length + 1);
        const std::int64_t its = std::max<std::int64_t>(priority(low, high), 0);
        // Ties are rare, so both intervals are scanned for the latest suffix.
        if (its > best_priority || (its == best_priority &&
                                    (high - low > best.count() || (high - low == best.count() &&
                                                                   latest(low, high) > latest(best.low, best.high))))) {
            best.low = low;
            best.high = high;
            best_priority = its;
        }
    }
    return best;
}

// The sum of the rewards of the suffixes [low, high). Unsigned, because a damaged index may have any rewards.
std::int64_t Index::priority(Place low, Place high) const {
    std::uint64_t total = 0;
    const auto add = [&](Place end) {
        for (; low < end; ++low) total += static_cast<std::uint64_t>(rewards[grades[low]]);
    };
    if (high - low > SUM_EVERY) {
        const Place first = (low + SUM_EVERY - 1) / SUM_EVERY, last = high / SUM_EVERY;
        add(first * SUM_EVERY);
        total += static_cast<std::uint64_t>(sums[last]) - static_cast<std::uint64_t>(sums[first]);
        low = last * SUM_EVERY;
    }
    add(high);
    return static_cast<std::int64_t>(total);
}

// The greatest position of the suffixes [low, high), of the first ones if they are many.
Place Index::latest(Place low, Place high) const {
    return *std::max_element(suffixes.begin() + low, suffixes.begin() + std::min(high, low + MOST_LOOKED_AT));
}

}  // namespace drafting
