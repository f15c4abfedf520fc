// The samples and prompts of one engine: the samples' texts, and tables of where tokens occurred in them.
//
// A sample's own text and its siblings' texts (the other samples of its prompt) are searched through hash tables of
// where the same `shortest` tokens ended before. A match is then followed from step to step, so it may be of any
// length. Where nothing matches, a table of votes names the token that usually followed the last one.
//
// Invariants: a new token costs the same however many tokens there are. A slot that other tokens took over loses a
// match and never gives a wrong one, because every match is compared with the texts; so does a token that is not
// entered yet. A draft from a sibling ends where the sibling's text ends.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "index.h"
#include "memory.h"

namespace drafting {

// Where a draft came from; rhyme_openrlhf/drafting/drafter.py has the same numbers.
enum class Source : std::int32_t { NONE, HISTORY, SIBLINGS, OWN, SHARED, EARLIER };
inline constexpr std::size_t SOURCES = 6;
// Samples whose tokens are entered together: enough that prefetching takes no longer than working, and few enough that
// the prefetched lines (about 30 of 64 bytes for each) stay in a core's first cache.
inline constexpr std::size_t ENTERED_TOGETHER = 16;

// A sample's number if the sample never drafts.
inline constexpr std::int64_t NO_SAMPLE = -1;

// A sample's recent acceptance rate before its first draft, in thousandths.
inline constexpr std::int32_t FIRST_RECENT = 500;

inline void require_tokens(std::span<const Token> tokens) {
    require(std::all_of(tokens.begin(), tokens.end(), [](Token token) { return token >= 0; }),
            "a token of a text is from 0 to 2147483647");
}

// Settings of `--histospec` about texts.
struct TextRules {
    // The most tokens that are matched in history, and the fewest that are matched anywhere.
    Place longest, shortest;
    bool siblings, own_output;
};

// A match in a text: the position behind it, and its length (0: none).
struct TextMatch {
    std::int32_t at = 0;
    std::int32_t length = 0;
};

// One sample, running or finished. What verifying and appending read is on its first cache line.
struct alignas(64) Sample {
    // Its first `written` tokens are the sample's text; the tables know the first `entered` of them.
    Array<Token> text;
    std::int32_t written = 0;
    std::int32_t entered = 0;
    // Tokens that the next draft may have for sure, and the recent acceptance rate in thousandths.
    std::int32_t window = 0;
    std::int32_t recent = 0;
    // The source of the last draft, the tokens matched before it, and the draft's number in its step.
    Source source = Source::NONE;
    std::int32_t matched = 0;
    std::int32_t number = 0;
    bool running = false;
    // At the last step text or table wanted more memory.
    bool crowded = false;

    // Where `shortest` tokens ended before in the sample's own text, by their hash.
    Array<std::int32_t> own_table;
    TextMatch own;
    // The row of the sibling that matches, and the match in the sibling's text.
    std::int32_t sibling = 0;
    TextMatch sibling_match;
    // How many own tokens the two matches take in.
    std::int32_t own_followed = 0, sibling_followed = 0;
    // Hash of the last `shortest` tokens, as of the last `hash_end`.
    std::uint64_t hash = 0;
    Cursor cursor;

    std::int32_t row = 0;
    std::int32_t prompt = 0;
    std::int32_t prompt_tokens = 0;
    // The most tokens that the text can have.
    std::int64_t limit = 0;
    // More memory is wanted beyond this many tokens.
    std::int64_t enough = 0;
    // The tokens that were entered into what all prompts share, or left out of it.
    std::int32_t shared = 0;

    std::span<const Token> known() const { return std::span(text).first(written); }
};

// A pair of tokens, and the votes for it.
struct Vote {
    // 0 (none yet), or the first token (upper half) and the token that followed (lower half), plus 1.
    std::int64_t pair;
    std::int64_t votes;
};

// Places where the same tokens ended in different samples, the newest first.
using Bucket = std::array<std::int64_t, 4>;

struct Prompt {
    static constexpr std::size_t TABLES = 4;

    std::string key;
    Index index;
    // Rows of all samples whose texts are kept, and how many of them run.
    std::vector<std::int32_t> rows;
    std::int32_t running = 0;
    // The tables of the samples' texts, the newest first, and the number of entries in the newest.
    std::array<Array<Bucket>, TABLES> tables;
    std::int64_t entered = 0;
    Array<Vote> votes;
};

// All samples and prompts. A sample's number is its row in `samples`. Numbers of samples that do not run throw
// std::out_of_range; impossible arguments throw std::invalid_argument, and then nothing changes.
class Texts {
    // First, because the vectors below live in the slabs: so the slabs are freed last.
    Slabs slabs_;

public:
    explicit Texts(const TextRules& text_rules) : rules(text_rules) {}

    // Install or replace the prompt's index, or drop it.
    void install(const std::string& key, Index index);
    void forget(const std::string& key);

    // Start a sample of at most `most_tokens` tokens, the first `prompt_tokens` of which are its prompt; return its
    // number.
    std::int32_t start(const std::string& key, Place prompt_tokens, Place most_tokens, Place window);
    // Append new tokens to each sample's text, one sample's tokens behind the other's.
    void append(std::span<const std::int64_t> numbers, std::span<const std::int64_t> counts,
                std::span<const Token> tokens);
    // Finish a sample. Its text stays for its siblings until the last of them has finished.
    void finish(std::int64_t number);

    // The sample of that number. Throws std::out_of_range unless the sample runs.
    Sample& running(std::int64_t number);
    // Prefetch what appending to the samples and verifying their drafts reads of them.
    void prefetch_samples(std::span<const std::int64_t> numbers) const;

    // Enter what was appended since the last call into the samples' own tables and their prompts'; and how many tokens
    // that are.
    void enter();
    std::size_t appended() const { return appended_tokens_; }
    // Give more memory to some of the samples that are `crowded`, so that it never takes long.
    void grow_some(std::span<const std::int64_t> numbers);

    // Hash the sample's last tokens, and prefetch what the tables have of them.
    void hash_end(Sample& sample) const;
    // Prefetch the siblings' texts that `follow_sibling` will read.
    void prefetch_siblings(const Sample& sample) const;
    // Follow the match in the sample's own text, or find one. Where all tokens are entered, entering has done it.
    void follow_own(Sample& sample) const;
    // Follow the sibling that matched, or find one that matches more; return the length of the match, 0 if no token
    // follows. A match of `longest` tokens is followed without a search.
    Place follow_sibling(Sample& sample) const;
    // How many tokens the sibling wrote behind the match; copy the first of them.
    Place behind_sibling(const Sample& sample) const;
    void copy_sibling(const Sample& sample, std::span<Token> out) const;
    // Copy what the sample wrote behind the match in its own text, repeated as often as `out` needs.
    void copy_own(const Sample& sample, std::span<Token> out) const;
    // The token that usually followed `token` in the texts of the prompt's samples; -1 if unknown.
    Token likely_next(const Prompt& prompt, Token token) const;

    std::size_t memory_bytes() const { return slabs_.taken(); }

    const TextRules rules;
    std::vector<Sample> samples;
    std::vector<Prompt> prompts;

private:
    std::int32_t prompt_of(const std::string& key);
    void drop_if_unused(Prompt& prompt);
    void begin_tables(Prompt& prompt);
    void add_table(Prompt& prompt);
    void grow(Sample& sample, Place needed);
    void prefetch_slots(const Sample& sample) const;
    void enter(Sample& sample);
    template <typename Visit>
    void visit_candidates(const Sample& sample, Visit visit) const;

    std::vector<std::int32_t> free_samples_;
    std::vector<std::int32_t> free_prompts_;
    std::unordered_map<std::string, std::int32_t> by_key_;
    // Rows of samples with tokens that are not entered yet, and how many tokens these are.
    std::vector<std::int32_t> appended_;
    std::size_t appended_tokens_ = 0;
};

}  // namespace drafting
