// A decode step: each sample gets a draft, and new tokens are entered into the tables, before it if they are few.
//
// A forward pass between two steps empties the caches, so memory takes most of a step: hundreds of samples, each with
// dozens of places far from each other. Samples are therefore handled in groups and passes: each pass prefetches for
// the whole group what the next pass reads. Without prefetching a step takes 1.3 to 2 times as long.
//
// Invariants: a pass that prefetches changes nothing; samples of a prompt are handled in the order of the step.
#include "drafter.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace drafting {

namespace {

// Tokens of a draft by votes, where nothing matches. In the first epoch of three recorded runs, two give 2 to 3 % more
// tokens a step than one, for a fifth more drafted ones; three give 1 % more than two, for another quarter.
constexpr Place LIKELY_TOKENS = 2;
// A draft from siblings or own text ends before the token from which on all of it is right with less than this.
constexpr double TEXT_STOP = 0.08;
// A draft that is right as a whole with a smaller probability is not worth proposing.
constexpr double NO_HOPE = 0.02;
// Samples of a group: enough that prefetching takes no longer than working, and few enough that the prefetched lines
// (about 20 of 64 bytes for each sample) stay in a core's first cache.
constexpr std::size_t DRAFTED_TOGETHER = 32;
constexpr Place MOST_WINDOW = Place{1} << 16;
// Drafts that a sample's recent acceptance rate averages over, roughly.
constexpr std::int32_t RECENT_SHARE = 4;

// Without figures, a draft's first token is accepted with this probability if it comes from history. From a text it is
// PRIOR_VOTED, and PRIOR_MATCHED more for each token of the match. That counts as so many drafts. Beyond MOST_COUNTED
// drafts, half are forgotten, because the policy changes.
constexpr double PRIOR_HISTORY = 0.9, PRIOR_VOTED = 0.3, PRIOR_MATCHED = 0.04;
constexpr double PRIOR_DRAFTS = 10.0, MOST_COUNTED = 200.0;
// What all prompts share drafts a first token from this probability on, and further tokens while all of the draft is
// right with SHARED_STOP. In replays a further token was right less often than a text's own tokens said: by this factor
// drafts are as long as in the best of the tried rules. A whole draft counts by the same factor less than other drafts.
constexpr double SHARED_FIRST = 0.05, SHARED_STOP = 0.11;
constexpr float SHARED_FAITH = 0.81f;
// More than sums of probabilities are off by rounding.
constexpr double ROUNDING = 1e-9;
// Of a step that wrote more tokens than this, they are entered into the tables during the next forward pass, for which
// nothing waits: 0.25 ms for 512 samples of 8 tokens each. Drafts then do not find what was just written. In replays of
// large steps that changes the tokens a step by 1 % at most, either way. If small steps did so, a real model's texts
// would lose 0.5 to 0.8 %. Entering this many takes 0.06 ms.
constexpr std::size_t ENTERED_BEFORE = 1024;
// Tokens that are entered into what all prompts share before a step's drafts (0.03 ms; as many as a few hundred samples
// write in a step), during its forward pass (a tenth of a millisecond), and of each sample: no draft is longer by
// default.
constexpr Place SHARED_BEFORE = 448, SHARED_MEANWHILE = 1024;
constexpr std::int32_t SHARED_A_SAMPLE = 33;
// Steps in which what all prompts share is tried, steps that it rests where it did not pay, and the accepted tokens a
// sample and step from which on it pays: it takes about a hundredth of a small model's step.
constexpr std::int64_t SHARED_TRIED = 64, SHARED_RESTS = 960;
constexpr double SHARED_PAYS = 0.01;

// Whether drafts of this source come from the prompt's index.
bool is_indexed(Source source) { return source == Source::HISTORY || source == Source::EARLIER; }

// Division that rounds down, as Python's.
std::int32_t floor_divide(std::int32_t value, std::int32_t by) { return value / by - (value % by < 0); }

}  // namespace

std::size_t Rates::class_of(Place matched) {
    return static_cast<std::size_t>(std::upper_bound(EDGES.begin(), EDGES.end(), matched) - EDGES.begin());
}

void Rates::refresh() {
    for (std::size_t source = 0; source < SOURCES; ++source)
        for (Place matched = 0; matched <= EDGES.back(); ++matched) {
            const Count& count = counts_[source][class_of(matched)];
            const double prior =
                is_indexed(static_cast<Source>(source))
                    ? PRIOR_HISTORY
                    : std::min(PRIOR_HISTORY, PRIOR_VOTED + PRIOR_MATCHED * static_cast<double>(matched));
            rates_[source][matched] = (count.accepted + prior * PRIOR_DRAFTS) / (count.all + PRIOR_DRAFTS);
        }
}

void Rates::count(Source source, Place matched, bool accepted) {
    Count& count = counts_[static_cast<std::size_t>(source)][class_of(matched)];
    if (count.all >= MOST_COUNTED) count = {count.accepted / 2, count.all / 2};
    count.all += 1.0;
    count.accepted += accepted ? 1.0 : 0.0;
}

Drafter::Drafter(const Rules& rules)
    : rules_(rules),
      texts_(rules.text),
      shared_(rules.shared_tokens),
      learns_(rules.text.siblings || !shared_.empty()) {
    require(1 <= rules.text.shortest && rules.text.shortest <= rules.text.longest,
            "need 1 <= shortest <= longest match");
    require(rules.text.longest <= std::numeric_limits<std::int32_t>::max(), "need a longest match of 32 bits");
    require(1 <= rules.window_start && rules.window_start <= rules.window_max && rules.window_max <= MOST_WINDOW &&
                0 <= rules.window_step && rules.window_step <= MOST_WINDOW,
            "need 1 <= first window <= largest window <= 65536, and a step of 0 to 65536");
}

std::int64_t Drafter::start(const std::string& prompt, std::span<const Token> tokens, Place prompt_tokens,
                            Place most_tokens, Place window) {
    require(0 <= window && window <= rules_.window_max, "impossible window");
    require_tokens(tokens);
    const std::int64_t sample = texts_.start(prompt, prompt_tokens, most_tokens, window);
    const auto count = static_cast<std::int64_t>(tokens.size());
    try {
        texts_.append(std::span(&sample, 1), std::span(&count, 1), tokens);
    } catch (...) {
        texts_.finish(sample);
        throw;
    }
    return sample;
}

Drafts Drafter::draft(std::span<const std::int64_t> samples, bool whole) {
    order(samples);
    const std::size_t count = samples.size();
    const auto most = static_cast<std::size_t>(rules_.window_max);
    whole_ = whole;
    extend_confidence_ = whole ? NO_HOPE : rules_.extend_confidence;
    stop_confidence_ = whole ? NO_HOPE : rules_.stop_confidence;
    drafts_.lengths.assign(count, 0);
    drafts_.sources.assign(count, static_cast<std::int64_t>(Source::NONE));
    drafts_.matches.assign(count, 0);
    drafts_.recents.assign(count, FIRST_RECENT);
    if (tokens_.size() < count * most) {
        tokens_.resize(2 * count * most);
        probabilities_.resize(tokens_.size());
    }
    last_.assign(samples.begin(), samples.end());
    rates_.refresh();
    rest_or_try();
    if (sharing_) {
        could_gain_ += static_cast<std::int64_t>(batch_.size());
        enter_shared(samples, SHARED_BEFORE);
        best_shared_ = double{shared_.best()};
    }
    // How many tokens there are, samples decide together.
    if (!learns_ || texts_.appended() <= ENTERED_BEFORE) texts_.enter();
    const std::span<const BatchItem> batch = batch_;
    in_groups(batch, DRAFTED_TOGETHER, [this](auto group) { draft_group(group); });

    // The drafts without gaps.
    Drafts drafts = drafts_;
    const auto total = std::accumulate(drafts.lengths.begin(), drafts.lengths.end(), std::int64_t{0});
    drafts.tokens.reserve(total);
    drafts.probabilities.reserve(total);
    for (std::size_t number = 0; number < count; ++number) {
        const auto begin = static_cast<std::ptrdiff_t>(number * most), end = begin + drafts.lengths[number];
        drafts.tokens.insert(drafts.tokens.end(), tokens_.begin() + begin, tokens_.begin() + end);
        drafts.probabilities.insert(drafts.probabilities.end(), probabilities_.begin() + begin,
                                    probabilities_.begin() + end);
    }
    return drafts;
}

// Order the step's samples by prompt.
void Drafter::order(std::span<const std::int64_t> samples) {
    for (const std::int64_t sample : samples)
        if (sample != NO_SAMPLE) texts_.running(sample);
    batch_.clear();
    for (std::size_t number = 0; number < samples.size(); ++number) {
        if (samples[number] == NO_SAMPLE) continue;
        const Sample& sample = texts_.samples[samples[number]];
        batch_.push_back({sample.prompt, sample.row, static_cast<std::int32_t>(number)});
    }
    const auto by_prompt = [](const BatchItem& left, const BatchItem& right) { return left.prompt < right.prompt; };
    std::stable_sort(batch_.begin(), batch_.end(), by_prompt);
}

void Drafter::draft_group(std::span<const BatchItem> group) {
    for (int pass = 0; pass < 3; ++pass) {
        for (const BatchItem& item : group) {
            Sample& sample = texts_.samples[item.row];
            sample.cursor.prefetch_pass(pass, texts_.prompts[item.prompt].index, sample.written, rules_.text.longest);
            if (pass == 0) prefetch(sample.text, sample.written - 1);
            if (pass == 0) prefetch(sample.text, sample.own.at);
            if (pass == 1) texts_.hash_end(sample);
            if (pass == 2 && rules_.text.siblings) texts_.prefetch_siblings(sample);
            if (pass == 2 && sharing_) shared_.hash(sample.known(), fewest_of(sample));
        }
    }
    std::array<OneDraft, DRAFTED_TOGETHER> drafts;
    for (std::size_t at = 0; at < group.size(); ++at) {
        Sample& sample = texts_.samples[group[at].row];
        const Place room = room_of(sample);
        if (room > 0)
            drafts[at] = draft_one(sample, room, whole_ ? room : std::min<Place>(sample.window, room),
                                   place_in(tokens_, group[at], room), place_in(probabilities_, group[at], room));
    }
    for (std::size_t at = 0; at < group.size(); ++at) {
        const BatchItem& item = group[at];
        OneDraft& draft = drafts[at];
        if (sharing_) draft_shared(item, draft);
        Sample& sample = texts_.samples[item.row];
        sample.number = item.number;
        sample.source = draft.source;
        sample.matched = static_cast<std::int32_t>(draft.matched);
        drafts_.lengths[item.number] = draft.size;
        drafts_.sources[item.number] = static_cast<std::int64_t>(draft.source);
        drafts_.matches[item.number] = draft.matched;
        drafts_.recents[item.number] = sample.recent;
    }
}

// Draft from the source of which most tokens are expected to be right. `out` has room for `room` tokens; of history,
// `window` of them need no confidence.
Drafter::OneDraft Drafter::draft_one(Sample& sample, Place room, Place window, std::span<Token> out,
                                     std::span<float> probabilities) {
    const Prompt& prompt = texts_.prompts[sample.prompt];
    const TextRules& text = rules_.text;
    const Place most = extend_confidence_ < 1.0 ? room : window;
    OneDraft draft;
    double best = 0.0;
    // Draft up to `size` tokens behind a match, if more of them are expected to be right than of the draft so far.
    const auto consider = [&](Source source, Place matched, Place size) {
        double path = 1.0, sum = 0.0;
        Place count = 0;
        for (; count < size; ++count, sum += path) {
            path *= rates_.rate(source, matched + count);
            if (count && path < std::min(TEXT_STOP, stop_confidence_)) break;
        }
        if (sum <= best) return;
        best = sum;
        draft = {source, count, matched};
    };
    texts_.follow_own(sample);
    if (text.siblings) {
        if (const Place matched = texts_.follow_sibling(sample); matched)
            consider(Source::SIBLINGS, matched, std::min(most, texts_.behind_sibling(sample)));
    }
    if (sample.own.length) consider(Source::OWN, sample.own.length, most);
    // Behind a match longer than history's, the text is certain enough, and a search would take longer than all else.
    if (draft.matched <= text.longest) {
        const OneDraft history = draft_history(sample, window, out.first(most), probabilities);
        if (history.size && expected(history, probabilities) >= best) return history;
    }
    if (draft.source == Source::NONE && text.siblings && sample.written) {
        consider(Source::SIBLINGS, 0, std::min(most, LIKELY_TOKENS));
        const Place size = std::exchange(draft.size, 0);
        Token token = texts_.likely_next(prompt, sample.known().back());
        for (; token >= 0 && draft.size < size; token = texts_.likely_next(prompt, token)) out[draft.size++] = token;
        if (!draft.size) return {};
    } else if (draft.source == Source::SIBLINGS) {
        texts_.copy_sibling(sample, out.first(draft.size));
    } else if (draft.source == Source::OWN) {
        texts_.copy_own(sample, out.first(draft.size));
    }
    for (Place place = 0; place < draft.size; ++place)
        probabilities[place] = static_cast<float>(rates_.rate(draft.source, draft.matched + place));
    return draft;
}

// Draft from the prompt's index into `out`, whose first `window` tokens need no confidence.
Drafter::OneDraft Drafter::draft_history(Sample& sample, Place window, std::span<Token> out,
                                         std::span<float> probabilities) {
    const Index& index = texts_.prompts[sample.prompt].index;
    if (index.empty()) return {};
    const auto [node, near] = sample.cursor.follow(index, sample.known(), rules_.text.longest, rules_.text.shortest);
    if (node.empty()) return {};
    const StopRule rule{window, stop_confidence_, extend_confidence_};
    const auto [size, at, earlier] = index.walk(node, near, sample.cursor.at() - node.length, rule, out, probabilities);
    if (!size) return {};
    sample.cursor.move_to(at);
    // From the probabilities of the draft up to each token to those of each token.
    float before = 1.0f;
    for (float& probability : probabilities.first(size)) probability /= std::exchange(before, probability);
    return {earlier ? Source::EARLIER : Source::HISTORY, size, node.length};
}

// How many tokens of a draft are expected to be right. Of the first one, the rate says more than its own probability.
double Drafter::expected(const OneDraft& draft, std::span<const float> probabilities) const {
    double path = draft.size ? rates_.rate(draft.source, draft.matched) : 0.0, sum = path;
    for (Place place = 1; place < draft.size; ++place) sum += path *= double{probabilities[place]};
    return sum;
}

// Draft from what all prompts share, if more of it is expected to be right than of the sample's own draft. It is not
// asked where that cannot be.
void Drafter::draft_shared(const BatchItem& item, OneDraft& draft) {
    const Sample& sample = texts_.samples[item.row];
    const Place room = room_of(sample);
    if (room <= 0) return;
    const auto out = place_in(tokens_, item, room);
    const auto probabilities = place_in(probabilities_, item, room);
    const double own_expected = expected(draft, probabilities) / SHARED_FAITH;
    // All of a draft that begins with probability `path` is expected to have at most `path` * `most_expected` right.
    const double most_expected = 1.0 / (1.0 - best_shared_ * double{SHARED_FAITH}) + ROUNDING;
    if (best_shared_ * most_expected <= own_expected) return;
    // The sample's last tokens, and behind them the draft.
    const auto end = sample.known().last(std::min<std::size_t>(sample.known().size(), Shared::LONGEST));
    guessed_.assign(end.begin(), end.end());
    likely_.clear();
    // What followed a context was entered with that context and one token more. So a sample that goes on as it was
    // guessed has a context of as many tokens, or more.
    Place fewest = fewest_of(sample), matched = 0;
    double path = 1.0, sum = 0.0;
    for (Place size = 0;; ++size) {
        Shared::Guess guess = shared_.guess(shared_.hash(guessed_, fewest));
        if (guess.token < 0 && fewest) guess = shared_.guess(shared_.hash(guessed_));
        if (!size) {
            const bool known = guess.token >= 0 && (guess.matched > 1 || !draft.size);
            if (!known || double{guess.probability} <= SHARED_FIRST) return;
            matched = guess.matched;
        } else {
            guess.probability *= SHARED_FAITH;
        }
        path *= double{guess.probability};
        if (guess.token < 0 || size == room || (size && path < (whole_ ? NO_HOPE : SHARED_STOP))) break;
        if (sum + path * most_expected <= own_expected) return;
        sum += path;
        likely_.push_back(guess.probability);
        guessed_.push_back(guess.token);
        fewest = guess.matched;
    }
    if (sum <= own_expected) return;
    std::copy(guessed_.begin() + static_cast<std::ptrdiff_t>(end.size()), guessed_.end(), out.begin());
    std::copy(likely_.begin(), likely_.end(), probabilities.begin());
    draft = {Source::SHARED, static_cast<Place>(likely_.size()), matched};
}

// Decide whether to draft from what all prompts share, by what that gained in the last steps.
void Drafter::rest_or_try() {
    if (shared_.empty() || steps_left_-- > 0) return;
    sharing_ = !sharing_ || static_cast<double>(gained_) >= SHARED_PAYS * static_cast<double>(could_gain_);
    steps_left_ = sharing_ ? SHARED_TRIED : SHARED_RESTS;
    could_gain_ = gained_ = 0;
}

void Drafter::computing() {
    texts_.enter();
    if (sharing_) enter_shared(last_, SHARED_MEANWHILE);
    texts_.grow_some(last_);
}

// Enter at most `left` tokens that the samples have written, beginning at another sample each time.
void Drafter::enter_shared(std::span<const std::int64_t> samples, Place left) {
    std::array<Shared::Hashes, ENTERED_TOGETHER> hashes;
    std::array<Token, ENTERED_TOGETHER> tokens;
    std::size_t waiting = 0;
    const auto enter_waiting = [&] {
        for (std::size_t at = 0; at < waiting; ++at) shared_.enter(hashes[at], tokens[at]);
        waiting = 0;
    };
    const std::size_t first =
        samples.empty() ? 0 : static_cast<std::size_t>(steps_left_) * DRAFTED_TOGETHER % samples.size();
    for (std::size_t number = 0; number < samples.size() && left; ++number) {
        const std::int64_t named = samples[(first + number) % samples.size()];
        // A sample of the last step may have ended since.
        if (named == NO_SAMPLE || !texts_.samples[named].running) continue;
        Sample& sample = texts_.samples[named];
        const auto text = std::span<const Token>(sample.text).first(sample.written);
        sample.shared = std::max(sample.shared, sample.written - SHARED_A_SAMPLE);
        for (; sample.shared < sample.written && left; ++sample.shared, --left) {
            hashes[waiting] = shared_.hash(text.first(sample.shared));
            tokens[waiting++] = text[sample.shared];
            if (waiting == ENTERED_TOGETHER) enter_waiting();
        }
    }
    enter_waiting();
}

void Drafter::finish(std::int64_t sample) {
    texts_.running(sample);
    if (sharing_) enter_shared(std::span(&sample, 1), SHARED_MEANWHILE);
    texts_.finish(sample);
}

Attribution Drafter::verified(std::span<const std::int64_t> samples, std::span<const std::int64_t> verified,
                              std::span<const std::int64_t> accepted) {
    require(samples.size() == verified.size() && samples.size() == accepted.size(), "need two counts for each sample");
    texts_.prefetch_samples(samples);
    for (std::size_t draft = 0; draft < samples.size(); ++draft) {
        if (samples[draft] != NO_SAMPLE) texts_.running(samples[draft]);
        require(verified[draft] >= 1 && accepted[draft] >= 0 && accepted[draft] <= verified[draft] &&
                    verified[draft] <= std::numeric_limits<std::int32_t>::max() / 1000,
                "need 0 <= accepted <= verified and 1 <= verified");
    }
    Attribution found{{}, {}, std::vector<std::int64_t>(SOURCES)};
    for (std::size_t draft = 0; draft < samples.size(); ++draft) {
        Source source = Source::NONE;
        std::int64_t number = -1;
        if (samples[draft] != NO_SAMPLE) {
            Sample& sample = texts_.samples[samples[draft]];
            const auto tokens = static_cast<std::int32_t>(verified[draft]);
            const auto hits = static_cast<std::int32_t>(accepted[draft]);
            // A congestion window (RhymeRL, section 5.4): rhyme_openrlhf/drafting/budget.py.
            sample.window = static_cast<std::int32_t>(
                hits == tokens ? std::min(sample.window + rules_.window_step, rules_.window_max) : rules_.window_start);
            sample.recent += floor_divide(1000 * hits / tokens - sample.recent, RECENT_SHARE);
            source = sample.source;
            // History and what all prompts share have probabilities of their own for further tokens.
            const bool first = is_indexed(source) || source == Source::SHARED;
            for (std::int32_t place = 0; learns_ && place < (first ? 1 : std::min(tokens, hits + 1)); ++place)
                rates_.count(source, sample.matched + place, place < hits);
            if (source == Source::SHARED) gained_ += hits;
            // A sample that was left out of a step may verify its draft after the next step's drafts were made.
            const auto at = static_cast<std::size_t>(sample.number);
            if (at < last_.size() && last_[at] == samples[draft]) number = sample.number;
        }
        found.sources.push_back(static_cast<std::int64_t>(source));
        found.numbers.push_back(number);
        found.accepted[static_cast<std::size_t>(source)] += accepted[draft];
    }
    return found;
}

}  // namespace drafting
