"""All drafting of one decode step in one compiled call.

Three sources, in order of trust where they match as many of a sample's last tokens: the draft index of its prompt's
last rollout; its siblings, the other samples of the same prompt on this engine, running or finished; its own text.
Siblings and own text are found through hash tables of where the same `shortest` tokens ended before, and a match is
then followed from step to step, so that it may be any number of tokens long. Where nothing matches, siblings still
say what mostly followed the last token (`likely_next.py`): a draft of one token. Rows of two int64 tables hold
everything (columns below; arrays by address): one row a sample, one a prompt.

Invariants: a token costs the same however many there are; a table slot that other tokens took over loses a match and
never gives a wrong one, because every match is compared with the texts; a sibling's draft ends where the sibling is.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.lookup import SURE_MATCH, draft_from
from rhyme_openrlhf.speculation.acceptance import next_recent
from rhyme_openrlhf.speculation.addresses import int32s_at, int64s_at
from rhyme_openrlhf.speculation.likely_next import SLOT, likely_next, vote_next
from rhyme_openrlhf.speculation.window import next_window

# CRC-32 of the modules above whose compiled functions are called here. Numba's cache notices a change of this file
# only, so a change of theirs has to change this one too (tests/speculation/test_draft_step.py says the number).
CALLED_SOURCES = 469315911

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

# A sample: its text, how many tokens it has, and room for how many; the most it can come to have; tokens of its
# prompt; the table of its own text; the sample's prompt; where the match in its own text goes on, and its length; up to
# where the sibling was followed; that sibling, where the match in it goes on, and its length; its window; how its last
# drafts fared (acceptance.py); the source of the last one, and its place among those of its step.
(
    TEXT, COUNT, CAPACITY, LIMIT, PROMPT, OWN_TABLE, OWN_SLOTS, OWN_AT, OWN_LENGTH, FOLLOWED, SIBLING, SIBLING_AT,
    SIBLING_LENGTH, WINDOW, RECENT, SOURCE, NUMBER, PROMPT_TOKENS,
) = range(18)  # fmt: skip
SAMPLE_COLUMNS = 24  # three cache lines
# A prompt: the arrays of its draft index and its tokens; the siblings' table, and what was entered into it.
INDEX_TOKENS, INDEX_SUFFIXES, INDEX_SUMS, INDEX_COUNT, TABLE, TABLE_BUCKETS, TABLE_ENTERED = range(7)
PROMPT_COLUMNS = 8

# Sources as the call returns them.
NO_SOURCE, FROM_HISTORY, FROM_SIBLINGS, FROM_OWN = range(4)
COUNT_OF_SOURCES = 4
# What the call says of each draft, by row of its result.
LENGTHS, SOURCES, MATCHES, RECENTS = range(4)
DRAFT_ROWS = 4

# Text without counts (a sibling's, one's own) goes on as before with this probability, token by token, where the match
# is as long as SURE_MATCH: as a node seen once does in history. Shorter ones say too little for more than the window.
SURE_TOKEN = 0.975
# What mostly followed a sample's last token, where nothing else is known: in the first epoch of a recorded run of the
# embedded task three of ten were right.
LIKELY_TOKEN = 0.25

# How far back a new match is measured. Longer ones are all the same: certain enough.
LONGEST_MEASURED = 32
# An entry of the siblings' table: the sample's row + 1, and the number of its tokens up to the entry's end.
ROW_SHIFT = 32
POSITION_MASK = (1 << ROW_SHIFT) - 1
# Entries of a bucket, of different samples: so there are others than the asking sample's own, to take the longest match
# of. There are two to four times as many as were entered: 16 to 32 bytes for each token of a response.
BUCKET = 4
ENTRIES_PER_BUCKET = 2
# Behind its buckets, a siblings' table has slots of what mostly followed a token: one for so many buckets, because a
# text has fewer different tokens than tokens.
BUCKETS_PER_SLOT = 2


def table_size(buckets: int) -> int:
    """int64 in the siblings' table of a prompt that has so many buckets (a power of two)."""
    return BUCKET * buckets + SLOT * (buckets // BUCKETS_PER_SLOT)


@njit(cache=True, nogil=True)
def _hash(text: Int32s, end: int, shortest: int) -> np.uint64:
    """FNV-1a over the `shortest` tokens before `end`, mixed as MurmurHash3 ends: tables use the low bits."""
    value = np.uint64(14695981039346656037)
    for back in range(1, shortest + 1):
        value = (value ^ np.uint64(text[end - back])) * np.uint64(1099511628211)
    value = (value ^ (value >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return value ^ (value >> np.uint64(33))


@njit(cache=True, nogil=True)
def follow_own(
    text: Int32s, table: Int32s, start: int, end: int, shortest: int, source: int, length: int
) -> tuple[int, int]:
    """Enter the tokens from `start` to `end`; returns where the text after the match begins, and the match's length."""
    mask = np.uint64(table.size - 1)
    for at in range(start, end):
        if length and text[source] == text[at]:
            source += 1
            length += 1
        else:
            length = 0
        if at + 1 < shortest:
            continue
        place = np.int64(_hash(text, at + 1, shortest) & mask)
        earlier = int(table[place])
        if not length and earlier:
            while length < LONGEST_MEASURED and length < earlier and text[earlier - 1 - length] == text[at - length]:
                length += 1
            if length < shortest:
                length = 0
            source = earlier
        table[place] = at + 1
    return source, length


@njit(cache=True, nogil=True)
def enter_siblings(prompt: Int64s, text: Int32s, row: int, start: int, end: int, shortest: int) -> None:
    """Enter into the prompt's table where the tokens before each place from `start` to `end` occurred last."""
    table = int64s_at(prompt[TABLE], BUCKET * prompt[TABLE_BUCKETS])
    mask = np.uint64(prompt[TABLE_BUCKETS] - 1)
    first = max(start, shortest)
    for place in range(first, end + 1):
        bucket = BUCKET * np.int64(_hash(text, place, shortest) & mask)
        # The newest first; of one sample only the newest.
        last = bucket
        while last < bucket + BUCKET - 1 and (table[last] >> ROW_SHIFT) != row + 1:
            last += 1
        for at in range(last, bucket, -1):
            table[at] = table[at - 1]
        table[bucket] = ((row + 1) << ROW_SHIFT) | place
    vote_next(_next_table(prompt), text, max(1, start - 1), end)
    prompt[TABLE_ENTERED] += max(0, end + 1 - first)


@njit(cache=True, nogil=True)
def _next_table(prompt: Int64s) -> Int64s:
    """The slots behind the buckets of the prompt's table."""
    buckets = prompt[TABLE_BUCKETS]
    return int64s_at(prompt[TABLE] + 8 * BUCKET * buckets, SLOT * (buckets // BUCKETS_PER_SLOT))


@njit(cache=True, nogil=True)
def _follow_sibling(samples: Int64s, row: int, text: Int32s, longest: int, shortest: int, prompt: Int64s) -> int:
    """Follow the sibling that matched, or find one that matches more; returns how many tokens match, 0 if none goes on.

    A match of `longest` tokens is followed without looking for another.
    """
    sample = samples[row]
    count = text.size
    length = sample[SIBLING_LENGTH]
    at = sample[SIBLING_AT]
    ahead = False
    if length:
        other = samples[sample[SIBLING]]
        theirs = int32s_at(other[TEXT], other[COUNT])
        for place in range(sample[FOLLOWED], count):
            if at < theirs.size and theirs[at] == text[place]:
                at += 1
                length += 1
            else:
                length = 0
                break
        ahead = length > 0 and at < theirs.size
    if (length < longest or not ahead) and count >= shortest:
        table = int64s_at(prompt[TABLE], BUCKET * prompt[TABLE_BUCKETS])
        bucket = BUCKET * np.int64(_hash(text, count, shortest) & np.uint64(prompt[TABLE_BUCKETS] - 1))
        for entry in table[bucket : bucket + BUCKET]:
            found = (entry >> ROW_SHIFT) - 1
            place = entry & POSITION_MASK
            if entry == 0 or found == row or place >= samples[found, COUNT]:
                continue
            theirs = int32s_at(samples[found, TEXT], samples[found, COUNT])
            matched = 0
            most = min(LONGEST_MEASURED, place, count)
            while matched < most and theirs[place - 1 - matched] == text[count - 1 - matched]:
                matched += 1
            if matched >= shortest and (matched > length or not ahead):
                sample[SIBLING], at, length, ahead = found, place, matched, True
    sample[SIBLING_AT], sample[SIBLING_LENGTH], sample[FOLLOWED] = at, length, count
    return length if ahead else 0


@njit(cache=True, nogil=True)
def is_crowded(prompt: Int64s) -> bool:
    """Whether so much was entered into the prompt's table that entries are often taken over."""
    return prompt[TABLE_ENTERED] > ENTRIES_PER_BUCKET * prompt[TABLE_BUCKETS]


@njit(cache=True, nogil=True)
def append(
    samples: Int64s, prompts: Int64s, given: Int64s, asked: int, first: int, shortest: int, siblings: bool
) -> tuple[int, bool]:
    """Add to each of some samples its new tokens, from number `first` of the `asked` on.

    `given`: rows of the samples, where each one's part of the new tokens ends, and the new tokens. Returns the first
    number whose text has no room for its part (`asked`: all had), and whether a prompt's table has become crowded.
    """
    new = given[2 * asked :]
    crowded = False
    for number in range(first, asked):
        row = given[number]
        sample = samples[row]
        before = sample[COUNT]
        begin = given[asked + number - 1] if number else 0
        count = before + given[asked + number] - begin
        if count > sample[CAPACITY]:
            return number, crowded
        text = int32s_at(sample[TEXT], count)
        for at in range(before, count):
            text[at] = new[begin + at - before]
        sample[COUNT] = count
        if sample[OWN_SLOTS]:
            table = int32s_at(sample[OWN_TABLE], sample[OWN_SLOTS])
            sample[OWN_AT], sample[OWN_LENGTH] = follow_own(
                text, table, before, count, shortest, sample[OWN_AT], sample[OWN_LENGTH]
            )
        if siblings:
            # What precedes the response's first token is entered; the rest of the prompt is the same in all siblings.
            start = max(before + 1, sample[PROMPT_TOKENS])
            prompt = prompts[sample[PROMPT]]
            enter_siblings(prompt, text, row, start, count, shortest)
            crowded |= is_crowded(prompt)
    return asked, crowded


@njit(cache=True, nogil=True)
def append_and_draft(
    samples: Int64s,
    prompts: Int64s,
    given: Int64s,
    asked: int,
    first: int,
    longest: int,
    shortest: int,
    siblings: bool,
    most: int,
    whole: bool,
    extend_confidence: float,
    stop_confidence: float,
    out: Int32s,
    confidences: Float32s,
    found: Int64s,
) -> tuple[int, int]:
    """`append`, then `draft_step` for the same samples, unless a text or a table has to grow before.

    Returns the number at which to go on when it has (`asked`: only tables have to), and the tokens drafted; -1 tokens:
    something has to grow.
    """
    number, crowded = append(samples, prompts, given, asked, first, shortest, siblings)
    if crowded or number < asked:
        return number, -1
    return number, draft_step(
        samples, prompts, given[:asked], longest, shortest, siblings, most, whole, extend_confidence, stop_confidence,
        out, confidences, found,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def draft_step(
    samples: Int64s,
    prompts: Int64s,
    rows: Int64s,
    longest: int,
    shortest: int,
    siblings: bool,
    most: int,
    whole: bool,
    extend_confidence: float,
    stop_confidence: float,
    out: Int32s,
    confidences: Float32s,
    found: Int64s,
) -> int:
    """Draft for each of `rows`: into `out`, one after the other without gaps; returns how many tokens that are.

    A draft has at most `most` tokens, and leaves room for one more below the sample's limit. Up to the sample's window
    (`whole`: as far as there is room) it ends where its confidence falls below `stop_confidence` (but not before its
    first token), and beyond that where it falls below `extend_confidence`. Confidence is the estimated probability that
    the draft is right as a whole. `found[LENGTHS]`: tokens drafted for each row; `found[SOURCES]`: from where;
    `found[MATCHES]`: how many tokens matched; `found[RECENTS]`: the sample's recent acceptance. `confidences`: of each
    token of `out` the estimated probability that it is right if those before it are.
    """
    filled = 0
    confidence = np.empty(most, dtype=np.float32)
    for number in range(rows.size):
        row = rows[number]
        sample = samples[row]
        room = min(most, sample[LIMIT] - sample[COUNT] - 1)
        window = room if whole else min(sample[WINDOW], room)
        sample[NUMBER] = number
        sample[SOURCE] = NO_SOURCE
        found[LENGTHS, number] = 0
        found[SOURCES, number] = NO_SOURCE
        found[MATCHES, number] = 0
        found[RECENTS, number] = sample[RECENT]
        if room <= 0:
            continue
        text = int32s_at(sample[TEXT], sample[COUNT])
        prompt = prompts[sample[PROMPT]]
        matched = 0
        if siblings:
            matched = _follow_sibling(samples, row, text, longest, shortest, prompt)
        source = FROM_SIBLINGS if matched else NO_SOURCE
        if sample[OWN_LENGTH] > matched:
            matched, source = sample[OWN_LENGTH], FROM_OWN
        size = 0
        # History is asked only where it could match as much: then it wins, because rewards chose its branches.
        if matched <= longest and prompt[INDEX_COUNT]:
            size, indexed = draft_from(
                int32s_at(prompt[INDEX_TOKENS], prompt[INDEX_COUNT]),
                int32s_at(prompt[INDEX_SUFFIXES], prompt[INDEX_COUNT]),
                int64s_at(prompt[INDEX_SUMS], prompt[INDEX_COUNT] + 1),
                text,
                longest,
                max(shortest, matched),
                out[filled : filled + (room if extend_confidence < 1 else window)],
                confidence,
            )
        if size:
            source = FROM_HISTORY
            matched = indexed
            kept = 1
            while kept < size and confidence[kept] >= (stop_confidence if kept < window else extend_confidence):
                kept += 1
            size = kept
            sure = np.float32(1)
            for place in range(size):
                confidences[filled + place] = confidence[place] / sure
                sure = confidence[place]
        elif source != NO_SOURCE:
            size = window
            if matched >= SURE_MATCH and extend_confidence < 1:
                size = max(window, min(room, np.int64(np.log(extend_confidence) / np.log(SURE_TOKEN))))
            if source == FROM_SIBLINGS:
                size = _copy_sibling(samples, sample, out[filled : filled + size])
            else:
                _copy_own(sample, text, out[filled : filled + size])
            confidences[filled : filled + size] = SURE_TOKEN
        elif siblings and window > 0 and text.size:
            token = likely_next(_next_table(prompt), text[text.size - 1])
            if token >= 0:
                out[filled], confidences[filled] = token, LIKELY_TOKEN
                size, source = 1, FROM_SIBLINGS
        sample[SOURCE] = source
        found[LENGTHS, number] = size
        found[SOURCES, number] = source
        found[MATCHES, number] = matched
        filled += size
    return filled


@njit(cache=True, nogil=True)
def note_verified(
    samples: Int64s, judged: Int64s, drafts: int, drafted: Int64s, start: int, step: int, most: int, came: Int64s
) -> bool:
    """What became of some drafts: `judged` has their samples' rows, tokens verified (at least one) and accepted.

    False, and nothing is noted, where these numbers cannot be. Windows follow (window.py: `start`, `step`, `most`), and
    how each sample's drafts fared lately (acceptance.py). `drafted`: the rows of the last step that was drafted for.
    `came` becomes each draft's source, then its place in that step (-1: it is of another one), then by source the
    accepted tokens.
    """
    for draft in range(drafts):
        verified, accepted = judged[drafts + draft], judged[2 * drafts + draft]
        if judged[draft] < 0 or not 0 <= accepted <= verified or not verified:
            return False
    by_source = came[2 * drafts :]
    by_source[:] = 0
    for draft in range(drafts):
        row = judged[draft]
        sample = samples[row]
        verified, accepted = judged[drafts + draft], judged[2 * drafts + draft]
        sample[WINDOW] = next_window(sample[WINDOW], verified, accepted, start, step, most)
        sample[RECENT] = next_recent(sample[RECENT], verified, accepted)
        by_source[sample[SOURCE]] += accepted
        came[draft] = sample[SOURCE]
        number = sample[NUMBER]
        # A sample that was left out of a step verifies its draft later, when others have been drafted for.
        came[drafts + draft] = number if number < drafted.size and drafted[number] == row else -1
    return True


@njit(cache=True, nogil=True)
def _copy_sibling(samples: Int64s, sample: Int64s, out: Int32s) -> int:
    """What the sibling wrote after the match; returns how many tokens those are."""
    theirs = int32s_at(samples[sample[SIBLING], TEXT], samples[sample[SIBLING], COUNT])
    start = sample[SIBLING_AT]
    size = min(out.size, theirs.size - start)
    out[:size] = theirs[start : start + size]
    return size


@njit(cache=True, nogil=True)
def _copy_own(sample: Int64s, text: Int32s, out: Int32s) -> None:
    """What the sample wrote after the match; where that reaches the end of its text, what follows repeats."""
    start = sample[OWN_AT]
    period = text.size - start
    for place in range(out.size):
        out[place] = text[start + place % period]
