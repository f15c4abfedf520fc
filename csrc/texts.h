// What the samples of one engine have written so far, and the tables by which a step finds where it occurred before.
//
// Siblings and own text are found through hash tables of where the same `shortest` tokens ended before, and a match is
// then followed from step to step, so that it may be any number of tokens long. Where nothing matches, a table of votes
// says what mostly followed a token.
//
// Invariants: a token costs the same however many there are; a table slot that other tokens took over loses a match and
// never gives a wrong one, because every match is compared with the texts; a sibling's draft ends where the sibling is;
// nothing is shared between prompts, so two threads may work on the samples of two prompts at once.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "index.h"
#include "memory.h"

namespace drafting {

// Where a draft came from, as Python's code numbers it (rhyme_openrlhf/speculation/drafter.py).
enum class Source : std::int64_t { NONE, HISTORY, SIBLINGS, OWN };
inline constexpr std::size_t SOURCES = 4;

// Settings of `--histospec`, as far as they concern texts.
struct TextRules {
    // Tokens of a match: at most in history, and at least anywhere.
    Place longest;
    Place shortest;
    bool siblings;
    bool own_output;
};

// One sample of an engine, running or finished.
struct Sample {
    Array<Token> text;
    // Where the last `shortest` tokens ended before in the sample's own text, by their hash.
    Array<std::int32_t> own_table;
    // Tokens of `text` that are known, and of those the first ones that the tables know too.
    std::int32_t written = 0;
    std::int32_t count = 0;
    // The most tokens it can come to have, and those of its prompt.
    std::int64_t limit = 0;
    std::int32_t prompt_tokens = 0;
    std::int32_t prompt = 0;
    // Where the match in its own text goes on, and its length (0: none).
    std::int32_t own_at = 0;
    std::int32_t own_length = 0;
    // The sibling that matches, where the match in it goes on, its length (0: none), and up to where it was followed.
    std::int32_t sibling = 0;
    std::int32_t sibling_at = 0;
    std::int32_t sibling_length = 0;
    std::int32_t followed = 0;
    // The hash of its last `shortest` tokens.
    std::uint64_t hash = 0;
    // Tokens past which its memory should grow.
    std::int64_t enough = 0;
    Cursor cursor;
    // Tokens of its next draft, and how its last drafts fared, in thousandths.
    std::int32_t window = 0;
    std::int32_t recent = 0;
    // Of its last draft: the source, and its place among those of its step.
    Source source = Source::NONE;
    std::int32_t number = 0;
    bool running = false;

    std::span<const Token> known() const { return text.all().first(count); }
};

// What mostly followed one token: a pair of tokens and its votes.
struct Vote {
    // The pair + 1 (0: none yet): the first token in the upper half, the one that followed in the lower.
    std::int64_t pair;
    std::int64_t votes;
};

// Places where the same tokens ended in different samples, the newest first.
using Bucket = std::array<std::int64_t, 4>;

// One prompt: its index, and the tables that its samples share.
struct Prompt {
    // The newest first; empty ones are not there.
    static constexpr std::size_t TABLES = 4;

    Index index;
    std::array<Array<Bucket>, TABLES> tables;
    // What was entered into the newest table.
    std::int64_t entered = 0;
    Array<Vote> votes;
    // Samples that run, and while a step is divided those of it or where the next one of it goes.
    std::int32_t running = 0;
    std::int32_t here = 0;
};

// Hashes of new tokens, kept from the pass that fetches their places to the one that enters them.
struct Hashes {
    std::array<std::uint64_t, 1024> values;
    std::size_t kept = 0;
    std::size_t used = 0;
};

// Whether the sample's text has room for so many tokens.
bool has_room(const Sample& sample, Place tokens);

// Make room for `needed` tokens, and more, in the sample's text and in the table of its own text.
void grow(Slabs& slabs, Sample& sample, Place needed, const TextRules& rules);

// Give the prompt the tables that its samples begin with, or a larger one beside those that it has.
void begin_tables(Slabs& slabs, Prompt& prompt);
void add_table(Slabs& slabs, Prompt& prompt);

// Whether so much was entered into the prompt's newest table that entries are often taken over.
bool is_crowded(const Prompt& prompt);

// Fetch the places in the tables of what a sample has written since it was entered last, and keep the hashes.
void fetch_places(const Prompt& prompt, const Sample& sample, const TextRules& rules, Hashes& hashes);

// Enter what the sample `row` has written since into its own table and its prompt's.
void enter(Prompt& prompt, Sample& sample, std::int32_t row, const TextRules& rules, Hashes& hashes);

// Follow the sibling that matched, or find one that matches more; returns how many tokens match, 0 if none goes on. A
// match of `longest` tokens is followed without looking for another.
Place follow_sibling(std::span<const Sample> samples, Sample& sample, std::int32_t row, const Prompt& prompt,
                     const TextRules& rules);

// Fetch, in this order and with other work in between, what `follow_sibling` will read.
void foresee_buckets(const Sample& sample, const Prompt& prompt);
void foresee_siblings(std::span<const Sample> samples, const Sample& sample, std::int32_t row, const Prompt& prompt,
                      const TextRules& rules);

// What the sibling wrote after the match; returns how many tokens those are.
Place copy_sibling(std::span<const Sample> samples, const Sample& sample, std::span<Token> out);

// What the sample wrote after the match; where that reaches the end of its text, what follows repeats.
void copy_own(const Sample& sample, std::span<Token> out);

// The token that mostly followed `token` in what the prompt's samples wrote; -1 where that is not known.
Token likely_next(const Prompt& prompt, Token token);

}  // namespace drafting
