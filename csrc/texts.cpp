#include "texts.h"

#include <algorithm>
#include <limits>

namespace drafting {

namespace {

// Tokens that a sample's text has room for at first, at most (what it can come to, if that is less), and the table of
// its own text; both get GROWTH times as much when they are full. Memory that grows is written again, so it grows
// seldom, and before it must, of some samples a step: those that began together would else grow in the same step.
constexpr Place FIRST_TOKENS = 4096;
constexpr Place FIRST_TABLED = 1024;
constexpr Place GROWTH = 4;
constexpr Place LEAST_TOKENS = 64;
constexpr Place NEVER_ENOUGH = std::numeric_limits<Place>::max();
// Share of a text's room that is full when it should grow.
constexpr double FULL = 0.75;
// Tokens between texts beside their room: with a power of two, the tokens of texts that are as long as each other would
// all be in the same few sets of a cache.
constexpr Place APART = 16;
// Slots in the table of a sample's own text for each token there is room for: half are free, so few are taken over.
constexpr Place SLOTS_PER_TOKEN = 2;

// How far back a new match is measured. Longer ones are all the same: certain enough.
constexpr Place LONGEST_MEASURED = 32;
// An entry of a sample's own table: the number of its tokens up to the entry's end (of those past 4M tokens the low
// bits), and a mark of the hash, so that most entries of other tokens are known without reading the text.
constexpr int OWN_MARK_SHIFT = 22, OWN_MARK_BITS = 9;
constexpr std::int32_t OWN_PLACES = (1 << OWN_MARK_SHIFT) - 1;
// An entry of the siblings' table, from the lowest bit on: the number of the sample's tokens up to the entry's end; the
// sample's row + 1; and a mark.
constexpr int ROW_SHIFT = 32, MARK_SHIFT = 52, MARK_BITS = 11;
constexpr std::int64_t POSITIONS = (std::int64_t{1} << ROW_SHIFT) - 1;
constexpr std::int64_t ROWS = (std::int64_t{1} << MARK_SHIFT) - (std::int64_t{1} << ROW_SHIFT);
constexpr std::int64_t MARKS = ((std::int64_t{1} << MARK_BITS) - 1) << MARK_SHIFT;
// Entries of a bucket are of different samples: so there are others than the asking sample's own, to take the longest
// match of. When a table is full there are twice as many as were entered: 16 bytes for each token of a response.
constexpr std::int64_t ENTRIES_PER_BUCKET = 2;
// Buckets of a prompt's first table, and at most. A new one is zeroed within a step, and 1.3 MB take some tens of
// microseconds.
constexpr std::size_t FIRST_BUCKETS = 4096, MOST_BUCKETS = 32768;

// Slots of a prompt's votes (64 KB): its samples write that many different tokens, or not many more. A pair has no more
// votes than these, so that what is said lately soon takes over from what was said long. By replay of three recorded
// runs, in the first epoch 2 to 8 give 2 % more tokens a step than any number does, for 1 % fewer drafted ones.
constexpr std::size_t VOTE_SLOTS = 4096;
constexpr std::int64_t MOST_VOTES = 4;
constexpr int TOKEN_BITS = 32;
constexpr std::int64_t TOKEN_MASK = (std::int64_t{1} << TOKEN_BITS) - 1;
// Multiplicative hashing (Knuth, volume 3, 6.4): 2**32 divided by the golden ratio.
constexpr std::uint32_t GOLDEN = 2654435769u;

// FNV-1a over the `shortest` tokens before `end`, mixed as MurmurHash3 ends: tables use the low bits.
std::uint64_t hash_before(std::span<const Token> text, Place end, Place shortest) {
    std::uint64_t value = 14695981039346656037u;
    for (Place back = 1; back <= shortest; ++back)
        value = (value ^ static_cast<std::uint64_t>(std::int64_t{text[end - back]})) * 1099511628211u;
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCDu;
    return value ^ value >> 33;
}

template <typename T>
std::size_t slot_of(std::uint64_t hash, const Array<T>& table) {
    return static_cast<std::size_t>(hash) & (table.size() - 1);
}

std::size_t vote_slot(Token token) {
    const std::uint32_t mixed = static_cast<std::uint32_t>(token) * GOLDEN;
    return (mixed ^ mixed >> 16) & (VOTE_SLOTS - 1);
}

// What an entry of the siblings' table keeps of a hash: bits that say nothing of its bucket.
std::int64_t mark_of(std::uint64_t hash) { return static_cast<std::int64_t>(hash >> (64 - MARK_BITS)) << MARK_SHIFT; }

// Enter the token before `place` into the sample's own table. `hash`: of the `shortest` tokens before `place`, if there
// are so many.
void enter_own(std::span<const Token> text, const Array<std::int32_t>& table, Place place, Place shortest,
               std::uint64_t hash, std::int32_t& source, std::int32_t& length) {
    const Place at = place - 1;
    if (length && text[source] == text[at]) {
        ++source;
        ++length;
    } else {
        length = 0;
    }
    if (place < shortest) return;
    std::int32_t& slot = table[slot_of(hash, table)];
    const auto mark = static_cast<std::int32_t>(hash >> (64 - OWN_MARK_BITS)) << OWN_MARK_SHIFT;
    if (!length) {
        const Place earlier = Place{slot} - mark;
        if (0 < earlier && earlier <= OWN_PLACES) {
            while (length < LONGEST_MEASURED && length < earlier && text[earlier - 1 - length] == text[at - length])
                ++length;
            if (length < shortest) length = 0;
            source = static_cast<std::int32_t>(earlier);
        }
    }
    slot = mark + (static_cast<std::int32_t>(place) & OWN_PLACES);
}

// Enter into a bucket that tokens with this hash end before `place`. The newest first; of one sample only the newest.
void enter_sibling(Bucket& bucket, std::int32_t row, Place place, std::uint64_t hash) {
    const std::int64_t whose = (std::int64_t{row} + 1) << ROW_SHIFT;
    const Bucket before = bucket;
    // Without branches, as `vote`: whether what is newer than this sample's own last entry has to make room for it.
    bool others = (before[0] & ROWS) != whose;
    bucket[1] = others ? before[0] : before[1];
    others &= (before[1] & ROWS) != whose;
    bucket[2] = others ? before[1] : before[2];
    others &= (before[2] & ROWS) != whose;
    bucket[3] = others ? before[2] : before[3];
    bucket[0] = whose | place | mark_of(hash);
}

// A majority vote (Boyer and Moore 1981): a pair of tokens that comes again gets a vote, any other pair of the slot
// takes one away, and a pair without votes is replaced. So a slot holds the pair that was the majority of those seen in
// it lately, in constant time and room.
void vote(Vote& slot, Token token, Token then) {
    const std::int64_t pair = ((std::int64_t{token} << TOKEN_BITS) | then) + 1;
    // Without branches: which of the three it is, nobody can guess.
    const bool same = slot.pair == pair, taken = !same & (slot.votes <= 0);
    slot.pair = taken ? pair : slot.pair;
    slot.votes = taken ? 1 : std::min<std::int64_t>(slot.votes + (same ? 1 : -1), MOST_VOTES);
}

// The row of an entry's sample; -1 where there is nothing, other tokens (they have another mark), or the sample itself.
std::int64_t row_of(std::int64_t entry, std::int64_t mark, std::int32_t row) {
    const std::int64_t found = ((entry & ROWS) >> ROW_SHIFT) - 1;
    return (entry & MARKS) != mark || found == row ? -1 : found;
}

// Room for `needed` tokens, in steps of GROWTH from `first` on: a power of two, less than twice `most`.
Place room_for(Place needed, Place first, Place most) {
    Place room = first;
    while (room < needed) room *= GROWTH;
    while (room >= 2 * most) room /= 2;
    return room;
}

// Tokens that a sample's text has room for.
Place room_of(const Sample& sample) { return std::max<Place>(static_cast<Place>(sample.text.size()) - APART, 0); }

}  // namespace

bool has_room(const Sample& sample, Place tokens) { return tokens <= room_of(sample); }

void grow(Slabs& slabs, Sample& sample, Place needed, const TextRules& rules) {
    const Place most = std::max({LEAST_TOKENS, needed, Place{sample.limit}});
    Place capacity = room_of(sample);
    if (static_cast<double>(needed) > FULL * static_cast<double>(capacity) && capacity < most) {
        capacity = room_for(std::max(needed, capacity + 1), FIRST_TOKENS, most);
        Array<Token> text(slabs, capacity + APART);
        std::copy_n(sample.text.all().begin(), sample.written, text.all().begin());
        sample.text = std::move(text);
    }
    Place tabled = most;
    if (rules.own_output) {
        tabled = static_cast<Place>(sample.own_table.size()) / SLOTS_PER_TOKEN;
        if (needed > tabled && tabled < most) {
            tabled = room_for(needed, FIRST_TABLED, most);
            Array<std::int32_t> table(slabs, tabled * SLOTS_PER_TOKEN);
            std::int32_t source = 0, length = 0;
            for (Place place = 1; place <= sample.count; ++place) {
                const auto hash = place >= rules.shortest ? hash_before(sample.known(), place, rules.shortest) : 0;
                enter_own(sample.known(), table, place, rules.shortest, hash, source, length);
            }
            sample.own_table = std::move(table);
        }
    }
    sample.enough = std::min(tabled < most ? tabled : NEVER_ENOUGH,
                             capacity < most ? static_cast<Place>(FULL * static_cast<double>(capacity)) : NEVER_ENOUGH);
}

void begin_tables(Slabs& slabs, Prompt& prompt) {
    prompt.tables[0] = Array<Bucket>(slabs, FIRST_BUCKETS);
    prompt.votes = Array<Vote>(slabs, VOTE_SLOTS);
    prompt.entered = 0;
}

void add_table(Slabs& slabs, Prompt& prompt) {
    Array<Bucket> table(slabs, std::min(GROWTH * prompt.tables[0].size(), MOST_BUCKETS));
    // The oldest is dropped. What was entered is never entered again.
    std::move_backward(prompt.tables.begin(), prompt.tables.end() - 1, prompt.tables.end());
    prompt.tables[0] = std::move(table);
    prompt.entered = 0;
}

bool is_crowded(const Prompt& prompt) {
    return prompt.entered > ENTRIES_PER_BUCKET * static_cast<std::int64_t>(prompt.tables[0].size());
}

void fetch_places(const Prompt& prompt, const Sample& sample, const TextRules& rules, Hashes& hashes) {
    const auto text = sample.text.all().first(sample.written);
    for (Place place = sample.count + 1; place <= sample.written; ++place) {
        if (place >= rules.shortest) {
            if (hashes.kept == hashes.values.size()) break;
            const std::uint64_t hash = hash_before(text, place, rules.shortest);
            hashes.values[hashes.kept++] = hash;
            if (rules.own_output) prefetch(sample.own_table.all(), static_cast<Place>(slot_of(hash, sample.own_table)));
            if (rules.siblings) prefetch(prompt.tables[0].all(), static_cast<Place>(slot_of(hash, prompt.tables[0])));
        }
        if (rules.siblings) prefetch(prompt.votes.all(), static_cast<Place>(vote_slot(text[place - 1])));
    }
}

void enter(Prompt& prompt, Sample& sample, std::int32_t row, const TextRules& rules, Hashes& hashes) {
    const Place before = sample.count, count = sample.written;
    const auto text = sample.text.all().first(count);
    // What precedes the response's first token is entered; the rest of the prompt is the same in all.
    const Place start = std::max(before + 1, Place{sample.prompt_tokens});
    std::int32_t source = sample.own_at, length = sample.own_length;
    for (Place place = before + 1; place <= count; ++place) {
        std::uint64_t hash = 0;
        if (place >= rules.shortest) {
            hash = hashes.used < hashes.kept ? hashes.values[hashes.used++] : hash_before(text, place, rules.shortest);
            sample.hash = hash;
        }
        if (rules.own_output) enter_own(text, sample.own_table, place, rules.shortest, hash, source, length);
        if (rules.siblings && place >= start) {
            if (place >= rules.shortest)
                enter_sibling(prompt.tables[0][slot_of(hash, prompt.tables[0])], row, place, hash);
            if (place > 1) vote(prompt.votes[vote_slot(text[place - 2])], text[place - 2], text[place - 1]);
        }
    }
    sample.own_at = source;
    sample.own_length = length;
    sample.count = static_cast<std::int32_t>(count);
    if (rules.siblings) prompt.entered += std::max<Place>(0, count + 1 - std::max(start, rules.shortest));
}

Place follow_sibling(std::span<const Sample> samples, Sample& sample, std::int32_t row, const Prompt& prompt,
                     const TextRules& rules) {
    const auto text = sample.known();
    const Place count = sample.count;
    Place length = sample.sibling_length, at = sample.sibling_at;
    bool ahead = false;
    if (length) {
        const auto theirs = samples[sample.sibling].known();
        for (Place place = sample.followed; place < count; ++place) {
            if (at < static_cast<Place>(theirs.size()) && theirs[at] == text[place]) {
                ++at;
                ++length;
            } else {
                length = 0;
                break;
            }
        }
        ahead = length > 0 && at < static_cast<Place>(theirs.size());
    }
    if ((length < rules.longest || !ahead) && count >= rules.shortest) {
        const std::int64_t mark = mark_of(sample.hash);
        for (const Array<Bucket>& table : prompt.tables) {
            if (!table.size()) break;
            for (const std::int64_t entry : table[slot_of(sample.hash, table)]) {
                const std::int64_t found = row_of(entry, mark, row);
                const Place place = entry & POSITIONS;
                if (found < 0) continue;
                const auto theirs = samples[found].known();
                if (place >= static_cast<Place>(theirs.size())) continue;
                Place matched = 0;
                const Place most = std::min({LONGEST_MEASURED, place, count});
                while (matched < most && theirs[place - 1 - matched] == text[count - 1 - matched]) ++matched;
                if (matched >= rules.shortest && (matched > length || !ahead)) {
                    sample.sibling = static_cast<std::int32_t>(found);
                    at = place;
                    length = matched;
                    ahead = true;
                }
            }
        }
    }
    sample.sibling_at = static_cast<std::int32_t>(at);
    sample.sibling_length = static_cast<std::int32_t>(length);
    sample.followed = static_cast<std::int32_t>(count);
    return ahead ? length : 0;
}

void foresee_buckets(const Sample& sample, const Prompt& prompt) {
    for (const Array<Bucket>& table : prompt.tables) {
        if (!table.size()) break;
        prefetch(table.all(), static_cast<Place>(slot_of(sample.hash, table)));
    }
}

void foresee_siblings(std::span<const Sample> samples, const Sample& sample, std::int32_t row, const Prompt& prompt,
                      const TextRules& rules) {
    if (sample.sibling_length) prefetch(samples[sample.sibling].text.all(), sample.sibling_at);
    if (sample.sibling_length < rules.longest && sample.count >= rules.shortest) {
        const std::int64_t mark = mark_of(sample.hash);
        for (const Array<Bucket>& table : prompt.tables) {
            if (!table.size()) break;
            for (const std::int64_t entry : table[slot_of(sample.hash, table)]) {
                const std::int64_t found = row_of(entry, mark, row);
                if (found >= 0) prefetch(samples[found].text.all(), (entry & POSITIONS) - 1);
            }
        }
    }
}

Place copy_sibling(std::span<const Sample> samples, const Sample& sample, std::span<Token> out) {
    const auto theirs = samples[sample.sibling].known();
    const auto after = theirs.subspan(sample.sibling_at);
    const std::size_t size = std::min(out.size(), after.size());
    std::copy_n(after.begin(), size, out.begin());
    return static_cast<Place>(size);
}

void copy_own(const Sample& sample, std::span<Token> out) {
    const auto repeated = sample.known().subspan(sample.own_at);
    for (std::size_t place = 0; place < out.size(); ++place) out[place] = repeated[place % repeated.size()];
}

Token likely_next(const Prompt& prompt, Token token) {
    const std::int64_t pair = prompt.votes[vote_slot(token)].pair - 1;
    return pair < 0 || pair >> TOKEN_BITS != token ? -1 : static_cast<Token>(pair & TOKEN_MASK);
}

}  // namespace drafting
