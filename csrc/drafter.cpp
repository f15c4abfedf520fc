// A decode step: what is new is entered into the tables, then each sample is drafted for.
//
// A step is divided into parts, each all samples of some prompts. Prompts share nothing, so what is drafted is the same
// whichever thread does a part. Between two steps a forward pass empties the caches, and then it is memory that takes
// the time: hundreds of samples, and for each some dozens of places far from each other. So samples are worked on in
// groups, in passes: each pass fetches for all of a group what the next one reads, so that the places of many samples
// come at the same time.
//
// Invariants: a pass that fetches changes nothing, and what it guesses wrong costs time only; samples of a prompt are
// worked on in the order of the step.
#include "drafter.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "threads.h"

namespace drafting {

namespace {

// Text without counts (a sibling's, one's own) goes on as before with this probability, token by token, where the match
// is as long as SURE_MATCH: as a node seen once does in history. Shorter ones say too little for more than the window.
constexpr float SURE_TOKEN = 0.975f;
const double LOG_SURE_TOKEN = std::log(0.975);
// What mostly followed a sample's last token, where nothing else is known: in the first epoch of a recorded run of the
// embedded task three of ten were right.
constexpr float LIKELY_TOKEN = 0.25f;
// Such tokens in a draft. By replay of three recorded runs, in the first epoch two give 2 to 3 % more tokens a step
// than one for a fifth more drafted ones; three give 1 % more than two, for another quarter.
constexpr Place LIKELY_TOKENS = 2;
// A draft that is right as a whole with a smaller probability is not worth proposing to anyone.
constexpr double NO_HOPE = 0.02;
// Samples that are worked on together: so many that fetching takes no longer than working, and so few that what was
// fetched is still in a core's first cache (about 30 and 20 lines of 64 bytes each).
constexpr std::size_t ENTERED_TOGETHER = 16, DRAFTED_TOGETHER = 32;
// Samples ahead whose first line is fetched while they are put in order.
constexpr std::size_t AHEAD = 16;
// Of those whose memory should grow, a step looks at so many, and enters again into grown tables of own text so many
// tokens (a table at least): some tens of microseconds.
constexpr std::size_t GROWN_A_STEP = 4;
constexpr Place ENTERED_AGAIN = 2048;
// A sample's recent acceptance begins with this, and the last RECENT_SHARE drafts or so count.
constexpr std::int32_t FIRST_RECENT = 500, RECENT_SHARE = 4;
// The siblings' table keeps a sample's number in 20 bits.
constexpr std::size_t MOST_SAMPLES = (std::size_t{1} << 20) - 1;

// Division that rounds down, as Python's.
std::int32_t divided(std::int32_t value, std::int32_t by) { return value / by - (value % by < 0); }

void require(bool fits, const char* problem) {
    if (!fits) throw std::invalid_argument(problem);
}

}  // namespace

Drafter::Drafter(const Rules& rules, int helpers) : rules_(rules) {
    require(1 <= rules.text.shortest && rules.text.shortest <= rules.text.longest,
            "need 1 <= shortest <= longest match");
    require(1 <= rules.window_start && rules.window_start <= rules.window_max && rules.window_step >= 0,
            "need 1 <= first window <= largest window");
    threads_ = std::make_unique<StepThreads>(std::max(helpers, 0), [this](std::size_t part) { do_part(part); });
}

Drafter::~Drafter() = default;

std::size_t Drafter::running(std::int64_t sample) const {
    const auto row = static_cast<std::size_t>(sample);
    if (sample < 0 || row >= samples_.size() || !samples_[row].running)
        throw std::out_of_range("sample " + std::to_string(sample) + " has not started, or has finished");
    return row;
}

std::int32_t Drafter::prompt_of(const std::string& key) {
    const auto known = by_key_.find(key);
    if (known != by_key_.end()) return known->second;
    if (free_prompts_.empty()) {
        free_prompts_.push_back(static_cast<std::int32_t>(prompts_.size()));
        prompts_.emplace_back();
        samples_of_.emplace_back();
        key_of_.emplace_back();
    }
    const std::int32_t number = free_prompts_.back();
    const auto at = static_cast<std::size_t>(number);
    if (rules_.text.siblings) begin_tables(slabs_, prompts_[at]);
    by_key_.emplace(key, number);
    key_of_[at] = key;
    free_prompts_.pop_back();
    return number;
}

void Drafter::install(const std::string& key, Index index) {
    const auto at = static_cast<std::size_t>(prompt_of(key));
    prompts_[at].index = std::move(index);
    for (const std::int32_t row : samples_of_[at]) samples_[row].cursor.lose(rules_.text.longest);
}

void Drafter::forget(const std::string& key) {
    const auto known = by_key_.find(key);
    if (known != by_key_.end()) {
        prompts_[known->second].index = Index();
        drop_if_unused(key);
    }
}

std::int64_t Drafter::start(const std::string& key, std::span<const Token> tokens, Place prompt_tokens,
                            Place most_tokens, Place window) {
    require(prompt_tokens >= 0 && prompt_tokens <= std::numeric_limits<std::int32_t>::max(), "impossible prompt");
    require(0 <= window && window <= rules_.window_max, "impossible window");
    if (free_samples_.empty()) {
        require(samples_.size() < MOST_SAMPLES, "an engine has too many samples at once");
        free_samples_.push_back(static_cast<std::int32_t>(samples_.size()));
        samples_.emplace_back();
    }
    const std::int32_t prompt = prompt_of(key);
    const std::int32_t row = free_samples_.back();
    Sample fresh;
    fresh.prompt = prompt;
    fresh.prompt_tokens = static_cast<std::int32_t>(prompt_tokens);
    fresh.limit = most_tokens;
    fresh.window = static_cast<std::int32_t>(window);
    fresh.recent = FIRST_RECENT;
    fresh.running = true;
    grow(slabs_, fresh, prompt_tokens, rules_.text);
    samples_[row] = std::move(fresh);
    free_samples_.pop_back();
    samples_of_[prompt].push_back(row);
    ++prompts_[prompt].running;
    const std::int64_t sample = row, count = static_cast<std::int64_t>(tokens.size());
    append(std::span(&sample, 1), std::span(&count, 1), tokens);
    return row;
}

void Drafter::append(std::span<const std::int64_t> samples, std::span<const std::int64_t> counts,
                     std::span<const Token> tokens) {
    require(samples.size() == counts.size(), "need a count for each sample");
    std::int64_t total = 0;
    for (std::size_t at = 0; at < samples.size(); ++at) {
        if (samples[at] != NO_SAMPLE) running(samples[at]);
        require(counts[at] >= 0 && counts[at] <= static_cast<std::int64_t>(tokens.size()), "impossible count");
        total += counts[at];
    }
    require(total == static_cast<std::int64_t>(tokens.size()), "need as many tokens as counts say");
    for (std::size_t at = 0; at < samples.size(); ++at) {
        const auto count = static_cast<std::size_t>(counts[at]);
        if (at + AHEAD < samples.size() && samples[at + AHEAD] != NO_SAMPLE)
            prefetch(std::span(samples_), samples[at + AHEAD]);
        if (at + AHEAD / 2 < samples.size() && samples[at + AHEAD / 2] != NO_SAMPLE) {
            const Sample& later = samples_[samples[at + AHEAD / 2]];
            prefetch(later.text.all(), later.written);
        }
        if (samples[at] != NO_SAMPLE && count) {
            Sample& sample = samples_[samples[at]];
            const Place written = sample.written + static_cast<Place>(count);
            require(written <= std::numeric_limits<std::int32_t>::max(), "a text is too long");
            if (!has_room(sample, written)) grow(slabs_, sample, written, rules_.text);
            std::copy_n(tokens.begin(), count, sample.text.all().begin() + sample.written);
            sample.written = static_cast<std::int32_t>(written);
        }
        tokens = tokens.subspan(count);
    }
}

Drafts Drafter::draft(std::span<const std::int64_t> samples, bool whole) {
    for (const std::int64_t sample : samples)
        if (sample != NO_SAMPLE) running(sample);
    const std::size_t count = samples.size();
    const auto most = static_cast<std::size_t>(rules_.window_max);
    reach_ = whole ? Reach{true, NO_HOPE, NO_HOPE} : Reach{false, rules_.extend_confidence, rules_.stop_confidence};
    found_.lengths.assign(count, 0);
    found_.sources.assign(count, static_cast<std::int64_t>(Source::NONE));
    found_.matches.assign(count, 0);
    found_.recents.assign(count, FIRST_RECENT);
    grows_.assign(count, 0);
    if (out_.size() < count * most) {
        out_.resize(2 * count * most);
        probabilities_.resize(out_.size());
    }
    last_.assign(samples.begin(), samples.end());
    divide(samples);
    threads_->run(begins_.size() - 1, asked_.size() >= LEAST_HELPED);
    grow_some();

    // Without gaps.
    Drafts drafts = found_;
    std::size_t total = 0;
    for (const std::int64_t length : drafts.lengths) total += static_cast<std::size_t>(length);
    drafts.tokens.reserve(total);
    drafts.probabilities.reserve(total);
    for (std::size_t number = 0; number < count; ++number) {
        const auto begin = static_cast<std::ptrdiff_t>(number * most), end = begin + drafts.lengths[number];
        drafts.tokens.insert(drafts.tokens.end(), out_.begin() + begin, out_.begin() + end);
        drafts.probabilities.insert(drafts.probabilities.end(), probabilities_.begin() + begin,
                                    probabilities_.begin() + end);
    }
    return drafts;
}

// Put the samples of a step in order of their prompts, and those in parts of PART samples or more.
void Drafter::divide(std::span<const std::int64_t> samples) {
    std::vector<std::int32_t> seen;
    std::size_t asked = 0;
    for (std::size_t number = 0; number < samples.size(); ++number) {
        if (number + AHEAD < samples.size() && samples[number + AHEAD] != NO_SAMPLE)
            prefetch(std::span(samples_), samples[number + AHEAD]);
        if (samples[number] == NO_SAMPLE) continue;
        ++asked;
        const std::int32_t prompt = samples_[samples[number]].prompt;
        if (!prompts_[prompt].here++) seen.push_back(prompt);
    }
    begins_.assign(1, 0);
    std::size_t begin = 0;
    for (const std::int32_t prompt : seen) {
        // From here on: where the next sample of the prompt goes.
        begin += static_cast<std::size_t>(std::exchange(prompts_[prompt].here, static_cast<std::int32_t>(begin)));
        if (begin - begins_.back() >= PART || prompt == seen.back()) begins_.push_back(begin);
    }
    asked_.resize(asked);
    for (std::size_t number = 0; number < samples.size(); ++number) {
        if (samples[number] != NO_SAMPLE) {
            const auto row = static_cast<std::int32_t>(samples[number]);
            Prompt& prompt = prompts_[samples_[static_cast<std::size_t>(row)].prompt];
            asked_[prompt.here++] = {row, static_cast<std::int32_t>(number)};
        }
    }
    for (const std::int32_t prompt : seen) prompts_[prompt].here = 0;
}

void Drafter::do_part(std::size_t part) {
    const auto asked = std::span<const Asked>(asked_).subspan(begins_[part], begins_[part + 1] - begins_[part]);
    enter_all(asked);
    draft_all(asked);
}

// Enter into the tables what the samples have written since they were drafted for last.
void Drafter::enter_all(std::span<const Asked> part) {
    for (std::size_t first = 0; first < part.size(); first += ENTERED_TOGETHER) {
        const auto group = part.subspan(first, std::min(ENTERED_TOGETHER, part.size() - first));
        Hashes hashes;
        for (const Asked& asked : group) {
            const Sample& sample = samples_[asked.row];
            prefetch(sample.text.all(), sample.count);
            prefetch(sample.text.all(), sample.own_at);
        }
        for (const Asked& asked : group) {
            const Sample& sample = samples_[asked.row];
            fetch_places(prompts_[sample.prompt], sample, rules_.text, hashes);
        }
        for (const Asked& asked : group) {
            Sample& sample = samples_[asked.row];
            Prompt& prompt = prompts_[sample.prompt];
            enter(prompt, sample, asked.row, rules_.text, hashes);
            grows_[asked.number] = sample.count > sample.enough || (rules_.text.siblings && is_crowded(prompt));
        }
    }
}

void Drafter::draft_all(std::span<const Asked> part) {
    const TextRules& text = rules_.text;
    const std::span<const Sample> samples(samples_);
    for (std::size_t first = 0; first < part.size(); first += DRAFTED_TOGETHER) {
        const auto group = part.subspan(first, std::min(DRAFTED_TOGETHER, part.size() - first));
        for (const Asked& asked : group) {
            const Sample& sample = samples[asked.row];
            const Prompt& prompt = prompts_[sample.prompt];
            sample.cursor.foresee_text(prompt.index, sample.count, text.longest);
            prefetch(sample.text.all(), sample.own_at);
            if (text.siblings) foresee_buckets(sample, prompt);
        }
        for (const Asked& asked : group) {
            const Sample& sample = samples[asked.row];
            const Prompt& prompt = prompts_[sample.prompt];
            if (text.siblings) foresee_siblings(samples, sample, asked.row, prompt, text);
            sample.cursor.foresee_node(prompt.index, sample.count, text.longest);
        }
        for (const Asked& asked : group) {
            const Sample& sample = samples[asked.row];
            sample.cursor.foresee_branch(prompts_[sample.prompt].index, sample.count, text.longest);
        }
        for (const Asked& asked : group) {
            Sample& sample = samples_[asked.row];
            const auto number = static_cast<std::size_t>(asked.number);
            const auto begin = static_cast<std::size_t>(rules_.window_max) * number;
            const Place room = std::min<Place>(rules_.window_max, sample.limit - sample.count - 1);
            Drafted drafted;
            if (room > 0) {
                const auto size = static_cast<std::size_t>(room);
                drafted =
                    draft_one(asked.row, room, reach_.whole ? room : std::min<Place>(sample.window, room),
                              std::span(out_).subspan(begin, size), std::span(probabilities_).subspan(begin, size));
            }
            sample.number = asked.number;
            sample.source = drafted.source;
            found_.lengths[number] = drafted.size;
            found_.sources[number] = static_cast<std::int64_t>(drafted.source);
            found_.matches[number] = drafted.matched;
            found_.recents[number] = sample.recent;
        }
    }
}

Drafter::Drafted Drafter::draft_one(std::int32_t row, Place room, Place window, std::span<Token> out,
                                    std::span<float> probabilities) {
    Sample& sample = samples_[row];
    const Prompt& prompt = prompts_[sample.prompt];
    const TextRules& text = rules_.text;
    const bool extends = reach_.extend_confidence < 1.0;
    Drafted drafted;
    if (text.siblings) drafted.matched = follow_sibling(samples_, sample, row, prompt, text);
    drafted.source = drafted.matched ? Source::SIBLINGS : Source::NONE;
    if (sample.own_length > drafted.matched) {
        drafted.matched = sample.own_length;
        drafted.source = Source::OWN;
    }
    // History is asked only where it could match as much: then it wins, because rewards chose its branches.
    if (drafted.matched <= text.longest && !prompt.index.empty()) {
        const auto [node, near] =
            sample.cursor.follow(prompt.index, sample.known(), text.longest, std::max(text.shortest, drafted.matched));
        if (node.length) {
            const WalkRules rules{window, reach_.stop_confidence, reach_.extend_confidence};
            const Walked walked = prompt.index.walk(node, near, sample.cursor.at() - node.length, rules,
                                                    out.first(extends ? room : window), probabilities);
            if (walked.found) {
                sample.cursor.move_to(walked.at);
                // Of the draft as a whole, up to each token: from now on, of the token behind those before it.
                float before = 1.0f;
                for (float& sure : probabilities.first(walked.found)) {
                    const float whole = sure;
                    sure = whole / before;
                    before = whole;
                }
                return {Source::HISTORY, walked.found, node.length};
            }
        }
    }
    if (drafted.source != Source::NONE) {
        drafted.size = window;
        if (drafted.matched >= SURE_MATCH && extends) {
            const auto sure = static_cast<Place>(std::log(reach_.extend_confidence) / LOG_SURE_TOKEN);
            drafted.size = std::max(window, std::min(room, sure));
        }
        const auto asked = out.first(drafted.size);
        if (drafted.source == Source::SIBLINGS)
            drafted.size = copy_sibling(samples_, sample, asked);
        else
            copy_own(sample, asked);
        std::fill_n(probabilities.begin(), drafted.size, SURE_TOKEN);
        return drafted;
    }
    if (text.siblings && window > 0 && sample.count) {
        Token token = likely_next(prompt, sample.known().back());
        while (token >= 0 && drafted.size < std::min(window, LIKELY_TOKENS)) {
            out[drafted.size] = token;
            probabilities[drafted.size] = LIKELY_TOKEN;
            ++drafted.size;
            token = likely_next(prompt, token);
        }
        if (drafted.size) drafted.source = Source::SIBLINGS;
    }
    return drafted;
}

// Give some of the samples that should have it more memory: for their texts and tables, and for one prompt's.
void Drafter::grow_some() {
    std::array<std::int32_t, GROWN_A_STEP> rows;
    std::size_t growing = 0;
    for (std::size_t number = 0; number < grows_.size(); ++number)
        if (grows_[number]) rows[growing++ % rows.size()] = static_cast<std::int32_t>(last_[number]);
    Place again = 0;
    std::int32_t crowded = -1;
    for (const std::int32_t row : std::span(rows).first(std::min(growing, rows.size()))) {
        Sample& sample = samples_[row];
        const Place tokens = sample.count;
        if (tokens > sample.enough && (!again || again + tokens <= ENTERED_AGAIN)) {
            grow(slabs_, sample, tokens + 1, rules_.text);
            again += tokens;
        }
        if (rules_.text.siblings && is_crowded(prompts_[sample.prompt])) crowded = sample.prompt;
    }
    if (crowded >= 0) add_table(slabs_, prompts_[crowded]);
}

Came Drafter::verified(std::span<const std::int64_t> samples, std::span<const std::int64_t> verified,
                       std::span<const std::int64_t> accepted) {
    require(samples.size() == verified.size() && samples.size() == accepted.size(), "need two counts for each sample");
    for (std::size_t draft = 0; draft < samples.size(); ++draft) {
        if (samples[draft] != NO_SAMPLE) running(samples[draft]);
        require(verified[draft] >= 1 && accepted[draft] >= 0 && accepted[draft] <= verified[draft] &&
                    verified[draft] <= std::numeric_limits<std::int32_t>::max() / 1000,
                "need 0 <= accepted <= verified and 1 <= verified");
    }
    Came came;
    came.accepted.resize(SOURCES);
    for (std::size_t draft = 0; draft < samples.size(); ++draft) {
        Source source = Source::NONE;
        std::int64_t number = -1;
        if (samples[draft] != NO_SAMPLE) {
            Sample& sample = samples_[running(samples[draft])];
            const auto of = static_cast<std::int32_t>(verified[draft]),
                       hits = static_cast<std::int32_t>(accepted[draft]);
            // A congestion window (RhymeRL, section 5.4): rhyme_openrlhf/speculation/window.py.
            sample.window = static_cast<std::int32_t>(
                hits == of ? std::min(sample.window + rules_.window_step, rules_.window_max) : rules_.window_start);
            sample.recent += divided(1000 * hits / of - sample.recent, RECENT_SHARE);
            source = sample.source;
            // A sample that was left out of a step verifies its draft later, when others have been drafted for.
            const auto at = static_cast<std::size_t>(sample.number);
            number = at < last_.size() && last_[at] == samples[draft] ? sample.number : -1;
        }
        came.sources.push_back(static_cast<std::int64_t>(source));
        came.numbers.push_back(number);
        came.accepted[static_cast<std::size_t>(source)] += accepted[draft];
    }
    return came;
}

Place Drafter::window(std::int64_t sample) const { return samples_[running(sample)].window; }

void Drafter::finish(std::int64_t number) {
    Sample& sample = samples_[running(number)];
    const auto at = static_cast<std::size_t>(sample.prompt);
    sample.running = false;
    --prompts_[at].running;
    if (!rules_.text.siblings) {
        std::erase(samples_of_[at], static_cast<std::int32_t>(number));
        sample = Sample();
        free_samples_.push_back(static_cast<std::int32_t>(number));
    }
    // By value: the prompt's own key may go with it.
    drop_if_unused(std::string(key_of_[at]));
}

// Drop what the prompt's samples wrote, if none of them runs any more, and the prompt too, if it has no index.
void Drafter::drop_if_unused(const std::string& key) {
    const std::int32_t number = by_key_.at(key);
    const auto at = static_cast<std::size_t>(number);
    Prompt& prompt = prompts_[at];
    if (prompt.running) return;
    for (const std::int32_t row : samples_of_[at]) {
        samples_[row] = Sample();
        free_samples_.push_back(row);
    }
    samples_of_[at].clear();
    // Entries of numbers that other samples will have must not be found.
    prompt.tables = {};
    prompt.votes = {};
    prompt.entered = 0;
    if (prompt.index.empty()) {
        by_key_.erase(key);
        free_prompts_.push_back(number);
    } else if (rules_.text.siblings) {
        begin_tables(slabs_, prompt);
    }
}

}  // namespace drafting
