// All drafting of one engine: arrays in, arrays out.
//
// Four sources: the draft index of the prompt's last rollouts, in this run (HISTORY) or in earlier ones alone
// (EARLIER); the siblings, which are the other samples of the same
// prompt on this engine, running or finished; the sample's own text; and what all prompts share. A sample drafts from
// the source of which most tokens are expected to be right, by rates that are learnt from verified drafts. Where
// nothing matches, the siblings' votes give a draft of a token or two.
//
// Invariants: one caller at a time. Numbers of samples that do not run
// throw std::out_of_range, arrays that do not fit each other throw std::invalid_argument.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "index.h"
#include "shared.h"
#include "texts.h"

namespace drafting {

// Settings of `--histospec`.
struct Rules {
    TextRules text;
    Place window_start, window_step, window_max;
    double extend_confidence, stop_confidence;
    // Tokens of all prompts that are remembered; 0: none.
    Place shared_tokens;
};

// The drafts of a step, in the order of its samples. `tokens` and `probabilities` (of a token, if those before it are
// right) are one draft behind the other; the other arrays have an element for each draft: its length and source, the
// tokens matched before it, and its sample's recent acceptance rate in thousandths.
struct Drafts {
    std::vector<std::int64_t> lengths, sources, matches, recents;
    std::vector<Token> tokens;
    std::vector<float> probabilities;
};

// Where verified drafts came from: each draft's source, each draft's number in the last step (-1 if an earlier step
// drafted it), and the accepted tokens by source.
struct Attribution {
    std::vector<std::int64_t> sources, numbers, accepted;
};

// How often a token of a draft was accepted if those before it were, by the draft's source and the tokens that match
// before the token: those before the draft, and the draft's own. Of history and what all prompts share it is the first
// tokens' rate.
class Rates {
public:
    // As of the last `refresh`.
    double rate(Source source, Place matched) const {
        return rates_[static_cast<std::size_t>(source)][std::min(matched, EDGES.back())];
    }
    void count(Source source, Place matched, bool accepted);
    void refresh();

private:
    struct Count {
        double accepted = 0.0, all = 0.0;
    };
    // Lower edges of the classes after the first.
    static constexpr std::array<Place, 9> EDGES{1, 2, 3, 4, 6, 8, 12, 16, 24};
    static std::size_t class_of(Place matched);

    std::array<std::array<Count, EDGES.size() + 1>, SOURCES> counts_{};
    // By source and match, because a step asks thousands of times; all longer matches are as the last one.
    std::array<std::array<double, EDGES.back() + 1>, SOURCES> rates_{};
};

class Drafter {
public:
    explicit Drafter(const Rules& rules);

    // Draft for the prompt's samples from `index` too, in place of an earlier one; or no longer from any.
    void install(const std::string& prompt, Index index) { texts_.install(prompt, std::move(index)); }
    void forget(const std::string& prompt) { texts_.forget(prompt); }

    // Start a sample with the text `tokens`, the first `prompt_tokens` of which are its prompt; return its number. The
    // text has at most `most_tokens` in the end; the first draft has at most `window`.
    std::int64_t start(const std::string& prompt, std::span<const Token> tokens, Place prompt_tokens, Place most_tokens,
                       Place window);
    // Append new tokens to the samples' texts, one sample's behind the other's.
    void append(std::span<const std::int64_t> samples, std::span<const std::int64_t> counts,
                std::span<const Token> tokens) {
        texts_.append(samples, counts, tokens);
    }
    // Draft for each of these samples. A draft has at most as many tokens as the largest window, and leaves room for
    // one more token in its sample's text. Up to the sample's window a draft from history ends below the stop
    // confidence (but not before its first token), beyond the window below the extend confidence. `whole`: drafts are
    // as long as there is room and any hope, because a planner cuts them.
    Drafts draft(std::span<const std::int64_t> samples, bool whole);
    // Do what can wait until the step's forward pass: enter what the samples have written into the tables and into what
    // all prompts share, as far as the step itself has not, and give more memory to some of them. Each step needs it.
    void computing();
    // Record the verification of each sample's last draft: tokens verified (at least one), and how many of them were
    // accepted. Throws std::invalid_argument, and records nothing, for impossible numbers.
    Attribution verified(std::span<const std::int64_t> samples, std::span<const std::int64_t> verified,
                         std::span<const std::int64_t> accepted);
    // The tokens that the sample's next draft may have for sure.
    Place window(std::int64_t sample) { return texts_.running(sample).window; }
    // End a sample. Its text stays for its siblings until the last of them has finished.
    void finish(std::int64_t sample);

    // Bytes of all texts and tables, without indexes, which are mapped.
    std::size_t memory_bytes() const { return texts_.memory_bytes() + shared_.memory_bytes(); }

private:
    // A sample of the step, and its number in the step.
    struct BatchItem {
        std::int32_t prompt, row, number;
    };
    struct OneDraft {
        Source source = Source::NONE;
        Place size = 0;
        Place matched = 0;
    };
    void order(std::span<const std::int64_t> samples);
    void draft_group(std::span<const BatchItem> group);
    OneDraft draft_one(Sample& sample, Place room, Place window, std::span<Token> out, std::span<float> probabilities);
    OneDraft draft_history(Sample& sample, Place window, std::span<Token> out, std::span<float> probabilities);
    double expected(const OneDraft& draft, std::span<const float> probabilities) const;
    // The most tokens of the sample's next draft; none at the end of its text.
    Place room_of(const Sample& sample) const {
        return std::min<Place>(rules_.window_max, sample.limit - sample.written - 1);
    }
    // The place of a sample's draft among those of the step.
    template <typename Value>
    std::span<Value> place_in(std::vector<Value>& step, const BatchItem& item, Place room) const {
        return std::span(step).subspan(static_cast<std::size_t>(rules_.window_max * item.number), room);
    }
    // The fewest tokens of a context that the sample's next guess needs to look for at first.
    static Place fewest_of(const Sample& sample) { return sample.source == Source::SHARED ? sample.matched : 0; }
    void draft_shared(const BatchItem& item, OneDraft& draft);
    void enter_shared(std::span<const std::int64_t> samples, Place left);
    void rest_or_try();

    Rules rules_;
    Texts texts_;
    Shared shared_;
    // Whether a sample's drafts may depend on the others. A sample that must not draft from them does not learn from
    // them either, and its tokens are always entered before its draft.
    bool learns_;
    Rates rates_;
    // Whether what all prompts share is drafted from in this step, its best probability then, the steps until that is
    // decided again, and since then the samples that it could draft for and its accepted tokens.
    bool sharing_ = false;
    double best_shared_ = 0.0;
    std::int64_t steps_left_ = 0, could_gain_ = 0, gained_ = 0;

    // The step under way: its rules, its samples ordered by prompt, and the drafts with gaps.
    bool whole_ = false;
    double extend_confidence_ = 1.0, stop_confidence_ = 0.0;
    std::vector<BatchItem> batch_;
    std::vector<Token> tokens_;
    std::vector<float> probabilities_;
    Drafts drafts_;
    std::vector<Token> guessed_;
    std::vector<float> likely_;
    // The samples of the last step, by their numbers in it.
    std::vector<std::int64_t> last_;
};

}  // namespace drafting
