// Keeping samples and their texts, the tables of where tokens occurred, and their memory (see texts.h).
#include "texts.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace drafting {

namespace {

// A siblings' table keeps a sample's row in 20 bits.
constexpr std::size_t MOST_SAMPLES = (std::size_t{1} << 20) - 1;

// Tokens that a text and its own table have room for at first (less if the text can never have as many). Both grow by
// GROWTH. A text grows before it is full, and only some texts grow in a step, because samples that began together would
// otherwise all grow in the same step.
constexpr Place FIRST_TOKENS = 4096, FIRST_TABLED = 1024, LEAST_TOKENS = 64, GROWTH = 4;
constexpr Place NEVER = std::numeric_limits<Place>::max();
// Slots for each token of an own table: half stay free, so few are taken over.
constexpr Place SLOTS_PER_TOKEN = 2;
// Samples that a step looks at for more memory, and tokens that a step enters again into own tables that grow (one
// table at least): some tens of microseconds.
constexpr std::size_t GROWN_A_STEP = 4;
constexpr Place ENTERED_AGAIN = 2048;

// Tokens of a sample whose slots are prefetched before they are entered.
constexpr std::int32_t MOST_PREFETCHED = 64;
// The length up to which a new match is measured. Longer matches are all certain enough.
constexpr Place LONGEST_MEASURED = 32;
// An entry of an own table: the number of tokens up to the entry's end (of texts beyond 4M tokens its low bits), and
// bits of the hash, so that other tokens' entries are seldom compared with the text.
constexpr int OWN_MARK_SHIFT = 22, OWN_MARK_BITS = 9;
constexpr std::int32_t OWN_POSITIONS = (1 << OWN_MARK_SHIFT) - 1;
// An entry of a siblings' table, from the lowest bit on: the number of tokens up to the entry's end; the sample's row,
// plus 1; and bits of the hash.
constexpr int ROW_SHIFT = 32, MARK_SHIFT = 52, MARK_BITS = 11;
constexpr std::int64_t POSITIONS = (std::int64_t{1} << ROW_SHIFT) - 1;
constexpr std::int64_t ROWS = (std::int64_t{1} << MARK_SHIFT) - (std::int64_t{1} << ROW_SHIFT);
// A bucket's entries are of different samples, so siblings are found beside the sample itself. With this many entries a
// bucket on average, a table is full: 16 bytes for each token of a response.
constexpr std::int64_t ENTRIES_PER_BUCKET = 2;
// Buckets of a prompt's first and largest table. A new table is zeroed within a step; 1 MB takes tens of microseconds.
constexpr std::size_t FIRST_BUCKETS = 4096, MOST_BUCKETS = 32768;

// Slots of a prompt's votes (64 KB), about as many as different tokens occur. A pair has at most MOST_VOTES, so recent
// text soon wins over older text: in replays of three recorded runs, 2 to 8 votes give 2 % more tokens a step in the
// first epoch than unbounded ones.
constexpr std::size_t VOTE_SLOTS = 4096;
constexpr std::int64_t MOST_VOTES = 4;
constexpr int TOKEN_BITS = 32;
// Multiplicative hashing (Knuth, volume 3, 6.4): 2**32 divided by the golden ratio.
constexpr std::uint32_t GOLDEN = 2654435769u;

// FNV-1a over the `shortest` tokens before `end`, with the final mix of MurmurHash3, because tables use the low bits.
std::uint64_t hash_before(std::span<const Token> text, Place end, Place shortest) {
    std::uint64_t value = 14695981039346656037u;
    for (Place back = 1; back <= shortest; ++back)
        value = (value ^ static_cast<std::uint64_t>(std::int64_t{text[end - back]})) * 1099511628211u;
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCDu;
    return value ^ value >> 33;
}

template <typename T>
Place slot_of(std::uint64_t hash, const Array<T>& table) {
    return static_cast<Place>(hash & (table.size() - 1));
}

Place vote_slot(Token token) {
    const std::uint32_t mixed = static_cast<std::uint32_t>(token) * GOLDEN;
    return (mixed ^ mixed >> 16) & (VOTE_SLOTS - 1);
}

// The bits of a hash that a siblings' entry keeps; its slot does not depend on them.
std::int64_t mark_of(std::uint64_t hash) { return static_cast<std::int64_t>(hash >> (64 - MARK_BITS)) << MARK_SHIFT; }

// How many tokens before `end` in one text equal those before `other_end` in the other, at most LONGEST_MEASURED.
Place equal_before(std::span<const Token> text, Place end, std::span<const Token> other, Place other_end) {
    const Place most = std::min({LONGEST_MEASURED, end, other_end});
    Place equal = 0;
    while (equal < most && text[end - 1 - equal] == other[other_end - 1 - equal]) ++equal;
    return equal;
}

// The entry of an own table that tokens with this hash end at `end`.
std::int32_t own_mark(std::uint64_t hash) {
    return static_cast<std::int32_t>(hash >> (64 - OWN_MARK_BITS)) << OWN_MARK_SHIFT;
}

void enter_own(Array<std::int32_t>& table, Place end, std::uint64_t hash) {
    table[slot_of(hash, table)] = own_mark(hash) + (static_cast<std::int32_t>(end) & OWN_POSITIONS);
}

// The match of the tokens before `end`, with one token more.
TextMatch follow(std::span<const Token> text, TextMatch match, Place end) {
    if (match.length && text[match.at] == text[end - 1]) return {match.at + 1, match.length + 1};
    return {};
}

// The match that the own table knows for the first `end` tokens, which it does not have yet. `hash`: of the last
// `shortest` of them.
TextMatch find_own(std::span<const Token> text, const Array<std::int32_t>& table, Place end, Place shortest,
                   std::uint64_t hash) {
    const std::int32_t earlier = table[slot_of(hash, table)] - own_mark(hash);
    if (earlier <= 0 || earlier > OWN_POSITIONS) return {};
    const Place equal = equal_before(text, earlier, text, end);
    if (equal < shortest) return {};
    return {earlier, static_cast<std::int32_t>(equal)};
}

// Enter into a bucket that the sample's tokens with this hash end at `end`: first, in place of the sample's last entry.
void enter_sibling(Bucket& bucket, std::int32_t row, Place end, std::uint64_t hash) {
    const std::int64_t owner = (std::int64_t{row} + 1) << ROW_SHIFT;
    const Bucket before = bucket;
    // Branch-free, because branches would be unpredictable. Entries move up to where the sample's last entry was.
    bool moves = true;
    for (std::size_t entry = 1; entry < bucket.size(); ++entry) {
        moves &= (before[entry - 1] & ROWS) != owner;
        bucket[entry] = moves ? before[entry - 1] : before[entry];
    }
    bucket[0] = owner | end | mark_of(hash);
}

// Majority vote (Boyer and Moore 1981): the slot's pair gains a vote when it occurs again, loses one when another pair
// of the slot occurs, and is replaced when it has none.
void vote(Vote& slot, Token token, Token next) {
    const std::int64_t pair = ((std::int64_t{token} << TOKEN_BITS) | next) + 1;
    // Branch-free, because branches would be unpredictable.
    const bool same = slot.pair == pair, replaced = !same & (slot.votes <= 0);
    slot.pair = replaced ? pair : slot.pair;
    slot.votes = replaced ? 1 : std::min<std::int64_t>(slot.votes + (same ? 1 : -1), MOST_VOTES);
}

// Room for `needed` tokens: `first` or that times a power of GROWTH, halved until it is less than twice `most`.
Place room_for(Place needed, Place first, Place most) {
    Place room = first;
    while (room < needed) room *= GROWTH;
    while (room >= 2 * most) room /= 2;
    return room;
}

bool is_crowded(const Prompt& prompt) {
    return prompt.entered > ENTRIES_PER_BUCKET * static_cast<std::int64_t>(prompt.tables[0].size());
}

}  // namespace

void Texts::install(const std::string& key, Index index) {
    Prompt& prompt = prompts[prompt_of(key)];
    prompt.index = std::move(index);
    for (const std::int32_t row : prompt.rows) samples[row].cursor.reset(rules.longest);
}

void Texts::forget(const std::string& key) {
    const auto known = by_key_.find(key);
    if (known == by_key_.end()) return;
    prompts[known->second].index = Index();
    drop_if_unused(prompts[known->second]);
}

std::int32_t Texts::start(const std::string& key, Place prompt_tokens, Place most_tokens, Place window) {
    constexpr Place most = std::numeric_limits<std::int32_t>::max();
    require(0 <= prompt_tokens && prompt_tokens <= most && 0 <= most_tokens, "a text has 0 tokens or more");
    if (free_samples_.empty()) {
        require(samples.size() < MOST_SAMPLES, "an engine has too many samples at once");
        free_samples_.push_back(static_cast<std::int32_t>(samples.size()));
        samples.emplace_back();
    }
    Sample fresh;
    fresh.row = free_samples_.back();
    fresh.prompt = prompt_of(key);
    fresh.prompt_tokens = static_cast<std::int32_t>(prompt_tokens);
    fresh.shared = fresh.prompt_tokens;
    fresh.limit = std::min(most_tokens, most);
    fresh.window = static_cast<std::int32_t>(window);
    fresh.recent = FIRST_RECENT;
    fresh.running = true;
    grow(fresh, prompt_tokens);
    free_samples_.pop_back();
    Prompt& prompt = prompts[fresh.prompt];
    prompt.rows.push_back(fresh.row);
    ++prompt.running;
    const std::int32_t row = fresh.row;
    samples[row] = std::move(fresh);
    return row;
}

void Texts::append(std::span<const std::int64_t> numbers, std::span<const std::int64_t> counts,
                   std::span<const Token> tokens) {
    require(numbers.size() == counts.size(), "need a count for each sample");
    prefetch_samples(numbers);
    // Everything that can fail comes before the first change.
    require_tokens(tokens);
    const auto count = static_cast<std::int64_t>(tokens.size());
    std::int64_t total = 0;
    for (std::size_t at = 0; at < numbers.size(); ++at) {
        if (numbers[at] != NO_SAMPLE) {
            const Sample& sample = running(numbers[at]);
            prefetch(sample.text, sample.written);
            require(sample.written + count <= std::numeric_limits<std::int32_t>::max(), "a text is too long");
        }
        require(counts[at] >= 0 && counts[at] <= count - total, "need as many tokens as counts say");
        total += counts[at];
    }
    require(total == count, "need as many tokens as counts say");
    appended_.reserve(appended_.size() + numbers.size());
    for (std::size_t at = 0; at < numbers.size(); ++at) {
        if (numbers[at] == NO_SAMPLE || !counts[at]) continue;
        Sample& sample = samples[numbers[at]];
        const Place written = sample.written + counts[at];
        // Beside siblings memory grows where a step has time for it (`grow_some`). Alone a sample finds what it would
        // find without the others.
        if (written > static_cast<Place>(sample.text.size()) || (!rules.siblings && written > sample.enough))
            grow(sample, written);
    }
    for (std::size_t at = 0; at < numbers.size(); ++at) {
        const auto added = tokens.first(counts[at]);
        tokens = tokens.subspan(added.size());
        if (numbers[at] == NO_SAMPLE || added.empty()) continue;
        Sample& sample = samples[numbers[at]];
        // One that is named twice has room for its first part only.
        const Place written = sample.written + counts[at];
        if (written > static_cast<Place>(sample.text.size())) grow(sample, written);
        std::copy(added.begin(), added.end(), sample.text.begin() + sample.written);
        if (sample.entered == sample.written) appended_.push_back(sample.row);
        appended_tokens_ += added.size();
        sample.written = static_cast<std::int32_t>(written);
    }
}

void Texts::finish(std::int64_t number) {
    Sample& sample = running(number);
    Prompt& prompt = prompts[sample.prompt];
    sample.running = false;
    --prompt.running;
    if (!rules.siblings) {
        std::erase(prompt.rows, sample.row);
        free_samples_.push_back(sample.row);
        sample = Sample();
    }
    drop_if_unused(prompt);
}

void Texts::prefetch_samples(std::span<const std::int64_t> numbers) const {
    for (const std::int64_t number : numbers) prefetch(samples, number);
}

Sample& Texts::running(std::int64_t number) {
    if (number < 0 || number >= static_cast<std::int64_t>(samples.size()) || !samples[number].running)
        throw std::out_of_range("sample " + std::to_string(number) + " has not started, or has finished");
    return samples[number];
}

std::int32_t Texts::prompt_of(const std::string& key) {
    const auto known = by_key_.find(key);
    if (known != by_key_.end()) return known->second;
    if (free_prompts_.empty()) {
        free_prompts_.push_back(static_cast<std::int32_t>(prompts.size()));
        prompts.emplace_back();
    }
    const std::int32_t number = free_prompts_.back();
    prompts[number].key = key;
    begin_tables(prompts[number]);
    by_key_.emplace(key, number);
    free_prompts_.pop_back();
    return number;
}

// Drop the prompt's texts and tables if none of its samples runs, and the prompt too if it has no index.
void Texts::drop_if_unused(Prompt& prompt) {
    if (prompt.running) return;
    for (const std::int32_t row : prompt.rows) {
        samples[row] = Sample();
        free_samples_.push_back(row);
    }
    prompt.rows.clear();
    // Entries of rows that other samples will have must not be found.
    prompt.tables = {};
    prompt.votes = Array<Vote>();
    if (!prompt.index.empty()) {
        begin_tables(prompt);
        return;
    }
    const auto known = by_key_.find(prompt.key);
    free_prompts_.push_back(known->second);
    by_key_.erase(known);
}

void Texts::begin_tables(Prompt& prompt) {
    if (!rules.siblings) return;
    prompt.tables[0] = make_array<Bucket>(slabs_, FIRST_BUCKETS);
    prompt.votes = make_array<Vote>(slabs_, VOTE_SLOTS);
    prompt.entered = 0;
}

// Add a larger table, and drop the oldest of TABLES. Entries of the other tables stay there.
void Texts::add_table(Prompt& prompt) {
    auto table = make_array<Bucket>(slabs_, std::min(GROWTH * prompt.tables[0].size(), MOST_BUCKETS));
    std::move_backward(prompt.tables.begin(), prompt.tables.end() - 1, prompt.tables.end());
    prompt.tables[0] = std::move(table);
    prompt.entered = 0;
}

// Make room for `needed` tokens, and more, in the sample's text and own table.
void Texts::grow(Sample& sample, Place needed) {
    const Place most = std::max({LEAST_TOKENS, needed, Place{sample.limit}});
    auto room = static_cast<Place>(sample.text.size());
    if (4 * needed > 3 * room && room < most) {
        room = room_for(std::max(needed, room + 1), FIRST_TOKENS, most);
        auto text = make_array<Token>(slabs_, room);
        std::copy_n(sample.text.begin(), sample.written, text.begin());
        sample.text = std::move(text);
    }
    Place tabled = most;
    if (rules.own_output) {
        tabled = static_cast<Place>(sample.own_table.size()) / SLOTS_PER_TOKEN;
        if (needed > tabled && tabled < most) {
            tabled = room_for(needed, FIRST_TABLED, most);
            auto table = make_array<std::int32_t>(slabs_, tabled * SLOTS_PER_TOKEN);
            for (Place end = rules.shortest; end <= sample.entered; ++end)
                enter_own(table, end, hash_before(sample.known(), end, rules.shortest));
            sample.own_table = std::move(table);
        }
    }
    sample.enough = std::min(tabled < most ? tabled : NEVER, room < most ? 3 * room / 4 : NEVER);
}

void Texts::grow_some(std::span<const std::int64_t> numbers) {
    if (!rules.siblings) return;
    std::array<std::int64_t, GROWN_A_STEP> chosen;
    std::size_t crowded = 0;
    for (const std::int64_t number : numbers)
        if (number != NO_SAMPLE && samples[number].running && samples[number].crowded)
            chosen[crowded++ % GROWN_A_STEP] = number;
    Place entered = 0;
    Prompt* full = nullptr;
    for (const std::int64_t number : std::span(chosen).first(std::min(crowded, GROWN_A_STEP))) {
        Sample& sample = samples[number];
        if (sample.entered > sample.enough && (!entered || entered + sample.entered <= ENTERED_AGAIN)) {
            grow(sample, sample.entered + 1);
            entered += sample.entered;
        }
        if (rules.siblings && is_crowded(prompts[sample.prompt])) full = &prompts[sample.prompt];
    }
    if (full != nullptr) add_table(*full);
}

void Texts::enter() {
    in_groups(std::span<const std::int32_t>(appended_), ENTERED_TOGETHER, [this](auto group) {
        for (const std::int32_t row : group) prefetch(samples[row].text, samples[row].entered);
        for (const std::int32_t row : group) prefetch_slots(samples[row]);
        for (const std::int32_t row : group) enter(samples[row]);
    });
    appended_.clear();
    appended_tokens_ = 0;
}

void Texts::prefetch_slots(const Sample& sample) const {
    const Prompt& prompt = prompts[sample.prompt];
    const Place last = std::min(sample.written, sample.entered + MOST_PREFETCHED);
    for (Place end = sample.entered + 1; end <= last; ++end) {
        if (end >= rules.shortest) {
            const std::uint64_t hash = hash_before(sample.known(), end, rules.shortest);
            if (rules.own_output) prefetch(sample.own_table, slot_of(hash, sample.own_table));
            if (rules.siblings) prefetch(prompt.tables[0], slot_of(hash, prompt.tables[0]));
        }
        if (rules.siblings) prefetch(prompt.votes, vote_slot(sample.text[end - 1]));
    }
}

// Whether the row's sample has just begun, or has ended, does not matter: what it has not entered is its own.
void Texts::enter(Sample& sample) {
    Prompt& prompt = prompts[sample.prompt];
    const auto text = sample.known();
    // Siblings share the prompt, so only its last token is entered into their table. Each of them votes for its pairs.
    const Place first = std::max(sample.entered + 1, sample.prompt_tokens);
    // Copies, because the compiler cannot know that writing to the tables leaves these as they are.
    const auto [longest, shortest, siblings, own_output] = rules;
    const Place written = sample.written;
    TextMatch own = sample.own;
    for (Place end = sample.entered + 1; end <= written; ++end) {
        const bool follows = own_output && end > sample.own_followed;
        if (follows) own = follow(text, own, end);
        if (end >= shortest) {
            const std::uint64_t hash = hash_before(text, end, shortest);
            if (follows && !own.length) own = find_own(text, sample.own_table, end, shortest, hash);
            if (own_output) enter_own(sample.own_table, end, hash);
            if (siblings && end >= first) {
                enter_sibling(prompt.tables[0][slot_of(hash, prompt.tables[0])], sample.row, end, hash);
                ++prompt.entered;
            }
        }
        if (siblings && end > 1) vote(prompt.votes[vote_slot(text[end - 2])], text[end - 2], text[end - 1]);
    }
    sample.own = own;
    sample.own_followed = sample.entered = sample.written;
    sample.crowded = sample.entered > sample.enough || (rules.siblings && is_crowded(prompt));
}

// Call `visit(row, position)` for each entry of another sample that has the sample's hash.
template <typename Visit>
void Texts::visit_candidates(const Sample& sample, Visit visit) const {
    const std::int64_t mark = mark_of(sample.hash);
    for (const Array<Bucket>& table : prompts[sample.prompt].tables) {
        if (table.empty()) break;
        for (const std::int64_t entry : table[slot_of(sample.hash, table)]) {
            const std::int64_t row = ((entry & ROWS) >> ROW_SHIFT) - 1;
            if (row >= 0 && row != sample.row && (entry & ~ROWS & ~POSITIONS) == mark) visit(row, entry & POSITIONS);
        }
    }
}

void Texts::hash_end(Sample& sample) const {
    if (sample.written < rules.shortest) return;
    sample.hash = hash_before(sample.known(), sample.written, rules.shortest);
    if (rules.own_output) prefetch(sample.own_table, slot_of(sample.hash, sample.own_table));
    if (!rules.siblings) return;
    for (const Array<Bucket>& table : prompts[sample.prompt].tables)
        if (!table.empty()) prefetch(table, slot_of(sample.hash, table));
}

void Texts::prefetch_siblings(const Sample& sample) const {
    if (sample.sibling_match.length) prefetch(samples[sample.sibling].text, sample.sibling_match.at);
    if (sample.sibling_match.length < rules.longest && sample.written >= rules.shortest)
        visit_candidates(sample, [&](Place row, Place end) { prefetch(samples[row].text, end - 1); });
}

void Texts::follow_own(Sample& sample) const {
    if (!rules.own_output || sample.entered == sample.written) return;
    const auto text = sample.known();
    for (Place end = sample.own_followed + 1; end <= sample.written; ++end) sample.own = follow(text, sample.own, end);
    if (!sample.own.length && sample.written >= rules.shortest)
        sample.own = find_own(text, sample.own_table, sample.written, rules.shortest, sample.hash);
    sample.own_followed = sample.written;
}

Place Texts::follow_sibling(Sample& sample) const {
    const auto text = sample.known();
    const Place written = sample.written;
    Place length = sample.sibling_match.length, at = sample.sibling_match.at;
    bool goes_on = false;
    if (length) {
        const auto theirs = samples[sample.sibling].known();
        const Place size = static_cast<Place>(theirs.size());
        for (Place place = sample.sibling_followed; length && place < written; ++place, ++at)
            length = at < size && theirs[at] == text[place] ? length + 1 : 0;
        goes_on = length && at < size;
    }
    if ((length < rules.longest || !goes_on) && written >= rules.shortest) {
        visit_candidates(sample, [&](Place row, Place end) {
            const auto theirs = samples[row].known();
            if (end >= static_cast<Place>(theirs.size())) return;
            const Place equal = equal_before(theirs, end, text, written);
            if (equal < rules.shortest || (goes_on && equal <= length)) return;
            sample.sibling = static_cast<std::int32_t>(row);
            at = end;
            length = equal;
            goes_on = true;
        });
    }
    sample.sibling_match = {static_cast<std::int32_t>(at), static_cast<std::int32_t>(length)};
    sample.sibling_followed = sample.written;
    return goes_on ? length : 0;
}

Place Texts::behind_sibling(const Sample& sample) const {
    return samples[sample.sibling].written - sample.sibling_match.at;
}

void Texts::copy_sibling(const Sample& sample, std::span<Token> out) const {
    std::copy_n(samples[sample.sibling].text.begin() + sample.sibling_match.at, out.size(), out.begin());
}

void Texts::copy_own(const Sample& sample, std::span<Token> out) const {
    const auto repeated = sample.known().subspan(sample.own.at);
    for (std::size_t place = 0; place < out.size(); ++place) out[place] = repeated[place % repeated.size()];
}

Token Texts::likely_next(const Prompt& prompt, Token token) const {
    const std::int64_t pair = prompt.votes[vote_slot(token)].pair - 1;
    return pair < 0 || pair >> TOKEN_BITS != token ? -1 : static_cast<Token>(pair);
}

}  // namespace drafting
