// All drafting of one engine: arrays in, arrays out.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "index.h"
#include "memory.h"
#include "texts.h"

namespace drafting {

// Settings of `--histospec`.
struct Rules {
    TextRules text;
    Place window_start, window_step, window_max;
    double extend_confidence, stop_confidence;
};

// The drafts of one step, in the order of its samples: tokens of each, and for each token the estimated probability
// that it is right if those before it are; and of each draft its source, tokens matched before it, and how its sample's
// drafts fared lately, in thousandths.
struct Drafts {
    std::vector<std::int64_t> lengths, sources, matches, recents;
    std::vector<Token> tokens;
    std::vector<float> probabilities;
};

// Where verified drafts came from: of each its source, and its number in the last step that was drafted for (-1: it is
// of another one); and the accepted tokens by source.
struct Came {
    std::vector<std::int64_t> sources, numbers, accepted;
};

class StepThreads;

// Samples are numbers that `start` gives; NO_SAMPLE stands for one that never drafts. One caller at a time.
//
// Three sources, in order of trust where they match as many of a sample's last tokens: the draft index of its prompt's
// last rollouts; its siblings, the other samples of the same prompt on this engine, running or finished; its own text.
// Where nothing matches, siblings still say what mostly followed the last token: a draft of a token or two.
//
// Every call throws std::out_of_range for a sample that has not started or has finished, and std::invalid_argument for
// arrays that do not fit each other.
class Drafter {
public:
    static constexpr std::int64_t NO_SAMPLE = -1;

    // `helpers`: threads that help with large steps.
    Drafter(const Rules& rules, int helpers);
    ~Drafter();

    // Draft for the samples of a prompt from `index` too, in place of an earlier one.
    void install(const std::string& prompt, Index index);
    // Drop the prompt's index, if there is one; its samples go on without it.
    void forget(const std::string& prompt);

    // A sample begins, whose text is `tokens`; the first `prompt_tokens` of them are its prompt. It never has more than
    // `most_tokens`, and its first draft at most `window`.
    std::int64_t start(const std::string& prompt, std::span<const Token> tokens, Place prompt_tokens, Place most_tokens,
                       Place window);
    // Each sample has written so many more `tokens`, one sample's after the other's. They are entered into the tables
    // when the sample is drafted for next.
    void append(std::span<const std::int64_t> samples, std::span<const std::int64_t> counts,
                std::span<const Token> tokens);
    // Draft for each of these samples. A draft has at most the largest window of the settings, and leaves room for one
    // more token below what the sample can come to. Up to the sample's window it ends where its confidence falls below
    // the stop confidence (but not before its first token), and beyond that where it falls below the extend confidence.
    // `whole`: as far as there is room and any hope, because somebody else cuts the drafts.
    Drafts draft(std::span<const std::int64_t> samples, bool whole);
    // Of each sample's last draft so many tokens were verified (at least one), and the first of them accepted. Throws
    // std::invalid_argument, and notes nothing, where these numbers cannot be.
    Came verified(std::span<const std::int64_t> samples, std::span<const std::int64_t> verified,
                  std::span<const std::int64_t> accepted);
    // Tokens that the sample's next draft may have inside its window.
    Place window(std::int64_t sample) const;
    // The sample gets no more text or drafts. It stays, for its siblings, until the last of them has finished.
    void finish(std::int64_t sample);

    // Bytes of all texts and tables; indexes are somebody else's.
    std::size_t memory_bytes() const { return slabs_.taken(); }
    // How many samples have parts of a step's work at least, and how many a step has before helpers are woken.
    static constexpr std::size_t PART = 32;
    static constexpr std::size_t LEAST_HELPED = 128;

private:
    friend class StepThreads;

    // Of one sample in a step: which it is, and its number in the step.
    struct Asked {
        std::int32_t row;
        std::int32_t number;
    };
    // How far drafts of a step go.
    struct Reach {
        bool whole;
        double extend_confidence, stop_confidence;
    };
    struct Drafted {
        Source source = Source::NONE;
        Place size = 0;
        Place matched = 0;
    };

    // Where the sample is in `samples_`. Throws std::out_of_range unless it runs.
    std::size_t running(std::int64_t sample) const;
    std::int32_t prompt_of(const std::string& key);
    void drop_if_unused(const std::string& key);
    void divide(std::span<const std::int64_t> samples);
    void do_part(std::size_t part);
    void enter_all(std::span<const Asked> part);
    void draft_all(std::span<const Asked> part);
    Drafted draft_one(std::int32_t row, Place room, Place window, std::span<Token> out, std::span<float> probabilities);
    void grow_some();

    Rules rules_;
    // Before what lives in them, so that they are freed last.
    Slabs slabs_;
    std::vector<Sample> samples_;
    std::vector<std::int32_t> free_samples_;
    std::vector<Prompt> prompts_;
    std::vector<std::int32_t> free_prompts_;
    std::unordered_map<std::string, std::int32_t> by_key_;
    std::vector<std::vector<std::int32_t>> samples_of_;
    std::vector<std::string> key_of_;

    // The step under way: its samples in order of their prompts, where each part of them begins, drafts with gaps, and
    // which samples' memory should grow.
    Reach reach_{};
    std::vector<Asked> asked_;
    std::vector<std::size_t> begins_;
    std::vector<Token> out_;
    std::vector<float> probabilities_;
    Drafts found_;
    std::vector<std::uint8_t> grows_;
    // The samples of the last step, by their numbers.
    std::vector<std::int64_t> last_;

    std::unique_ptr<StepThreads> threads_;
};

}  // namespace drafting
