// The longest match in a draft index (RhymeRL, section 5.2), by a search or by a sample's cursor.
//
// A node of the tree is an interval [low, high) of the sorted suffixes. Where the interval is small, its ends and its
// children's are read from the numbers of tokens that neighbours share, which lie side by side; where it is large, they
// are searched for.
#include <algorithm>

#include "bytes.h"
#include "index.h"

namespace drafting {

namespace {

// Neighbours that are looked at one by one before their node's end is searched for.
constexpr Place LOOKED_AT = 64;
// New tokens that are followed one by one; those of more are searched for. A draft and one more are at most 65.
constexpr Place MOST_FOLLOWED = 65;
// Bytes of a cache line, and lines of history's text behind a cursor that are fetched: new tokens and a draft are at
// most five, mostly less.
constexpr Place LINE = 64;
constexpr Place FORESEEN_LINES = 4;

}  // namespace

Node Index::longest_match(std::span<const Token> text, Place longest, Place shortest) const {
    const Place count = static_cast<Place>(text.size());
    Place usable = 0;
    while (usable < count && usable < longest && text[count - 1 - usable] >= 0) ++usable;
    if (usable < shortest) return {};
    // Whatever follows a longer match follows its end too: so the longest is found by bisection. The first guess is the
    // longest there can be, because most samples go on as they did before. Where that fails, what occurs of it says
    // where the sample left the history: the next guess begins right behind, and where it fits it is mostly the
    // longest. Where it fails too, the shortest comes next, because then often none fits.
    Node best;
    Place length = usable, low_end = shortest, high_end = usable;
    while (low_end <= high_end) {
        const Matched found = match(text, length);
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

// The node of the last `length` of `text`; empty where they do not occur.
Index::Matched Index::match(std::span<const Token> text, Place length) const {
    const auto asked = text.last(length);
    Place low = 0, high = size();
    // How many tokens the suffixes around [low, high) share with the text: all between them share the fewer.
    Place before = 0, behind = 0;
    while (low < high) {
        const Place middle = (low + high) >> 1;
        const Place at = suffixes[middle];
        Place alike = std::min(before, behind);
        // No token of `text` is a separator: a suffix that is shorter differs at its own at the latest.
        while (alike < length && tokens[at + alike] == asked[alike]) ++alike;
        if (alike < length && tokens[at + alike] < asked[alike]) {
            low = middle + 1;
            before = alike;
        } else {
            high = middle;
            behind = alike;
        }
    }
    if (behind < length) return {{low, low, length}, std::max(before, behind)};
    return {{low, node_end(low, length), length}, length};
}

Place Index::node_end(Place place, Place depth) const {
    Place end = place + 1;
    const Place count = size();
    if (depth <= MOST_SHARED) {
        const Place near = std::min(count, end + LOOKED_AT);
        while (end + TOGETHER <= near) {
            const int alike = std::countr_one(bytes_at_least(shared, end, static_cast<std::uint8_t>(depth)));
            if (alike < TOGETHER) return end + alike;
            end += TOGETHER;
        }
        while (end < near && shared[end] >= depth) ++end;
        if (end < near || end == count) return end;
    }
    // Doubling steps, then bisection.
    const Place model = suffixes[place];
    Place last = end - 1, step = 1;
    while (last + step < count && same(model, last + step, depth)) {
        last += step;
        step *= 2;
    }
    Place first = last + 1;
    last = std::min(last + step, count);
    while (first < last) {
        const Place middle = (first + last) >> 1;
        if (same(model, middle, depth))
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

Place Index::node_begin(Place place, Place depth) const {
    Place begin = place;
    if (depth <= MOST_SHARED) {
        const Place near = std::max<Place>(0, begin - LOOKED_AT);
        while (begin - TOGETHER >= near) {
            // The byte of `begin` itself is the highest.
            const int alike =
                std::countl_one(bytes_at_least(shared, begin - TOGETHER + 1, static_cast<std::uint8_t>(depth)));
            if (alike < TOGETHER) return begin - alike;
            begin -= TOGETHER;
        }
        while (begin > near && shared[begin] >= depth) --begin;
        if (begin > near || begin == 0) return begin;
    }
    const Place model = suffixes[place];
    Place step = 1;
    while (begin - step >= 0 && same(model, begin - step, depth)) {
        begin -= step;
        step *= 2;
    }
    Place first = std::max<Place>(0, begin - step + 1), last = begin;
    while (first < last) {
        const Place middle = (first + last) >> 1;
        if (same(model, middle, depth))
            last = middle;
        else
            first = middle + 1;
    }
    return first;
}

// Whether the suffix at `place` begins with the `depth` tokens from position `model` on.
bool Index::same(Place model, Place place, Place depth) const {
    const Place at = suffixes[place];
    for (Place behind = 0; behind < depth; ++behind)
        if (tokens[at + behind] != tokens[model + behind]) return false;
    return true;
}

Node Index::child_of(const Node& node, Token token) const {
    const Place low = first_at_least(node.low, node.high, node.length, token);
    if (low == node.high || token_at(low, node.length) != token) return {low, low, node.length + 1};
    return {low, child_end(low, node.high, node.length), node.length + 1};
}

// The first place in [low, high) whose token at `depth` is at least `token`; `high` if there is none.
Place Index::first_at_least(Place low, Place high, Place depth, Token token) const {
    if (low < high && token_at(low, depth) >= token) return low;
    while (low < high) {
        const Place middle = (low + high) >> 1;
        if (token_at(middle, depth) < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// The end of the child that begins at `low`, of a node that ends at `high`.
Place Index::child_end(Place low, Place high, Place depth) const {
    const Place near = std::min(high, low + LOOKED_AT);
    if (depth < MOST_SHARED) {
        Place end = low + 1;
        while (end + TOGETHER <= near) {
            const int alike = std::countr_one(bytes_at_least(shared, end, static_cast<std::uint8_t>(depth + 1)));
            if (alike < TOGETHER) return end + alike;
            end += TOGETHER;
        }
        while (end < near && shared[end] > depth) ++end;
        if (end < near || end == high) return end;
        low = end - 1;
    }
    // Doubling steps, then bisection.
    const Token token = token_at(low, depth);
    Place step = 1;
    while (low + step < high && token_at(low + step, depth) == token) {
        low += step;
        step *= 2;
    }
    Place first = low + 1, last = std::min(low + step, high);
    while (first < last) {
        const Place middle = (first + last) >> 1;
        if (token_at(middle, depth) == token)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

Cursor::Found Cursor::follow(const Index& index, std::span<const Token> text, Place longest, Place least) {
    auto [length, at, bound] = followed(index, text, longest, least);
    Found found;
    if (length) {
        found.near = index.places[at - length];
        found.node = index.node_around(found.near, length);
        if (index.tokens[at] < 0 && !index.goes_on(found.node.high, length)) {
            length = 0;
            bound = found.node.length - 1;
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
    seen_ = static_cast<std::int32_t>(text.size());
    return length < least ? Found{} : found;
}

Cursor::Followed Cursor::followed(const Index& index, std::span<const Token> text, Place longest, Place least) const {
    const Place count = static_cast<Place>(text.size());
    Place length = length_, at = at_;
    Place bound = std::min(longest, Place{bound_} + count - seen_);
    if (!length || longest == 1 || count - seen_ > MOST_FOLLOWED) return {0, 0, bound};
    for (Place number = seen_; number < count; ++number) {
        const Token token = text[number];
        if (token < 0) return {0, 0, bound};
        const Place most = std::min(longest, length + 1);
        if (token == index.tokens[at]) {
            ++at;
        } else {
            // It may be another branch of the same node: those before position `at`, and `token`.
            const Node node = index.child_of(index.node_around(index.places[at - (most - 1)], most - 1), token);
            if (node.empty()) {
                bound = std::min(longest, most - 1 + count - 1 - number);
                return number == count - 1 ? shorter(index, at, bound, least, token) : Followed{0, 0, bound};
            }
            at = index.suffixes[node.low] + most;
        }
        length = most;
    }
    return {length, at, length};
}

// As `followed`, where the text ends with the tokens before `at` and another `token`, that are at most `bound`. What
// follows a longer match follows its end too: so the longest is found by bisection, from the least on, because often
// there is none.
Cursor::Followed Cursor::shorter(const Index& index, Place at, Place bound, Place least, Token token) {
    if (bound < least || least == 1) return {0, 0, bound};
    Place best = 0, best_at = 0, length = least, low_end = least, high_end = bound;
    while (low_end <= high_end) {
        const Node node = index.child_of(index.node_around(index.places[at - (length - 1)], length - 1), token);
        if (!node.empty() && index.goes_on(node.high, length)) {
            best = length;
            best_at = index.suffixes[node.high - 1] + length;
            low_end = length + 1;
        } else if (length == least) {
            return {0, 0, least - 1};
        } else {
            high_end = length - 1;
        }
        length = (low_end + high_end + 1) >> 1;
    }
    return {best, best_at, best};
}

void Cursor::foresee_text(const Index& index, Place count, Place longest) const {
    if (!length_) return;
    const Place fresh = count - seen_, bound = std::min(longest, bound_ + fresh);
    for (Place line = 0; line < FORESEEN_LINES; ++line)
        prefetch(index.tokens, at_ + line * LINE / Place{sizeof(Token)});
    prefetch(index.places, at_ + fresh - bound);
}

void Cursor::foresee_node(const Index& index, Place count, Place longest) const {
    if (!length_) return;
    const Place fresh = count - seen_, start = at_ + fresh - std::min(longest, bound_ + fresh);
    if (start < index.size()) {
        const Place place = index.places[start];
        // Neighbours are looked at in both directions.
        prefetch(index.shared, place - TOGETHER + 1);
        prefetch(index.shared, place + TOGETHER);
        prefetch(index.suffixes, place);
    }
}

void Cursor::foresee_branch(const Index& index, Place count, Place longest) const {
    if (!length_) return;
    const Place fresh = count - seen_, bound = std::min(longest, bound_ + fresh), start = at_ + fresh - bound;
    if (start < index.size()) {
        Place place = index.places[start];
        const Place near = std::max<Place>(0, place - LINE / Place{sizeof(Token)});
        while (place > near && index.shared[place] >= bound) --place;
        prefetch(index.grades, place);
        const Place text = index.suffixes[place] + bound;
        prefetch(index.tokens, text);
        prefetch(index.tokens, text + LINE / Place{sizeof(Token)});
    }
}

}  // namespace drafting
