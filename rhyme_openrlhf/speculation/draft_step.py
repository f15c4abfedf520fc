"""Drafting for some samples of one decode step, compiled.

Three sources, in order of trust where they match as many of a sample's last tokens: the draft index of its prompt's
last rollout (`history/cursor.py`); its siblings, the other samples of the same prompt on this engine, running or
finished; its own text (`text_tables.py`). Where nothing matches, siblings still say what mostly followed the last token
(`likely_next.py`): a draft of a token or two. Rows of two int64 tables hold everything (`rows.py`).

Between two steps a forward pass empties the caches, and then it is memory that takes the time: hundreds of samples, and
for each some dozens of places far from each other. So samples are worked on in groups, in passes: each pass fetches
for all of a group what the next one reads, so that the places of many samples come at the same time.

Invariant: a pass that fetches changes nothing, and what it guesses wrong costs time only.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import int32s_at, prefetch
from rhyme_openrlhf.history.cursor import AT, WORD, follow, foresee_branch, foresee_node, foresee_text, move_to
from rhyme_openrlhf.history.lookup import TOKEN_COUNT
from rhyme_openrlhf.history.walk import SURE_MATCH, walk
from rhyme_openrlhf.speculation.acceptance import next_recent
from rhyme_openrlhf.speculation.likely_next import SLOTS, likely_next
from rhyme_openrlhf.speculation.rows import (
    COUNT,
    CURSOR,
    FROM_HISTORY,
    FROM_OWN,
    FROM_SIBLINGS,
    INDEX,
    LENGTHS,
    LIMIT,
    MATCHES,
    NO_SOURCE,
    NUMBER,
    OWN_AT,
    OWN_LENGTH,
    PROMPT,
    RECENT,
    RECENTS,
    SOURCE,
    SOURCES,
    TABLE,
    TEXT,
    VOTES,
    WINDOW,
)
from rhyme_openrlhf.speculation.text_tables import (
    copy_own,
    copy_sibling,
    follow_sibling,
    foresee_buckets,
    foresee_siblings,
)
from rhyme_openrlhf.speculation.window import next_window

# CRC-32 of the modules above whose compiled functions are called here. Numba's cache notices a change of this file
# only, so a change of theirs has to change this one too (tests/speculation/test_draft_step.py says the number).
CALLED_SOURCES = 3968627885

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

# Text without counts (a sibling's, one's own) goes on as before with this probability, token by token, where the match
# is as long as SURE_MATCH: as a node seen once does in history. Shorter ones say too little for more than the window.
SURE_TOKEN = 0.975
# What mostly followed a sample's last token, where nothing else is known: in the first epoch of a recorded run of the
# embedded task three of ten were right.
LIKELY_TOKEN = 0.25
# Such tokens in a draft. By replay of three recorded runs, in the first epoch two give 2 to 3 % more tokens a step than
# one for a fifth more drafted ones; three give 1 % more than two, for another quarter.
LIKELY_TOKENS = 2
# Samples that are worked on together: so many that fetching takes no longer than working, and so few that what was
# fetched is still in a core's first cache (about 20 lines of 64 bytes each).
GROUP = 32


@njit(cache=True, nogil=True)
def draft_step(
    samples: Int64s,
    prompts: Int64s,
    rows: Int64s,
    numbers: Int64s,
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
) -> None:
    """Draft for each of `rows`, which has a number in the step: into `out`, from `most` times its number on.

    A draft has at most `most` tokens, and leaves room for one more below the sample's limit. Up to the sample's window
    (`whole`: as far as there is room) it ends where its confidence falls below `stop_confidence` (but not before its
    first token), and beyond that where it falls below `extend_confidence`. Confidence is the estimated probability that
    the draft is right as a whole. `found[LENGTHS]`: tokens drafted, by number; `found[SOURCES]`: from where;
    `found[MATCHES]`: how many tokens matched; `found[RECENTS]`: the sample's recent acceptance. `confidences`: of each
    token of `out` the estimated probability that it is right if those before it are.
    """
    confidence = np.empty(most, dtype=np.float32)
    for first in range(0, rows.size, GROUP):
        last = min(rows.size, first + GROUP)
        for place in range(first, last):
            sample = samples[rows[place]]
            foresee_text(prompts[sample[PROMPT], INDEX:TABLE], sample[CURSOR:], sample[COUNT], longest)
            prefetch(sample[TEXT] + WORD * sample[OWN_AT])
            if siblings:
                foresee_buckets(sample, prompts[sample[PROMPT]])
        for place in range(first, last):
            sample = samples[rows[place]]
            if siblings:
                foresee_siblings(samples, rows[place], longest, shortest, prompts[sample[PROMPT]])
            foresee_node(prompts[sample[PROMPT], INDEX:TABLE], sample[CURSOR:], sample[COUNT], longest)
        for place in range(first, last):
            sample = samples[rows[place]]
            foresee_branch(prompts[sample[PROMPT], INDEX:TABLE], sample[CURSOR:], sample[COUNT], longest)
        for place in range(first, last):
            sample = samples[rows[place]]
            number = numbers[place]
            sample[NUMBER] = number
            begin = most * number
            room = min(most, sample[LIMIT] - sample[COUNT] - 1)
            source, size, matched = NO_SOURCE, 0, 0
            if room > 0:
                source, size, matched = _draft(
                    samples, prompts, rows[place], longest, shortest, siblings,
                    room, room if whole else min(sample[WINDOW], room), extend_confidence, stop_confidence,
                    out[begin : begin + room], confidences[begin : begin + room], confidence,
                )  # fmt: skip
            sample[SOURCE] = source
            found[LENGTHS, number] = size
            found[SOURCES, number] = source
            found[MATCHES, number] = matched
            found[RECENTS, number] = sample[RECENT]


@njit(cache=True, nogil=True)
def _draft(
    samples: Int64s,
    prompts: Int64s,
    row: int,
    longest: int,
    shortest: int,
    siblings: bool,
    room: int,
    window: int,
    extend_confidence: float,
    stop_confidence: float,
    out: Int32s,
    confidences: Float32s,
    confidence: Float32s,
) -> tuple[int, int, int]:
    """A draft for one sample, at the beginning of `out`: its source, its length, and how many tokens matched."""
    sample = samples[row]
    text = int32s_at(sample[TEXT], sample[COUNT])
    prompt = prompts[sample[PROMPT]]
    matched = 0
    if siblings:
        matched = follow_sibling(samples, row, text, longest, shortest, prompt)
    source = FROM_SIBLINGS if matched else NO_SOURCE
    if sample[OWN_LENGTH] > matched:
        matched, source = sample[OWN_LENGTH], FROM_OWN
    # History is asked only where it could match as much: then it wins, because rewards chose its branches.
    if matched <= longest and prompt[INDEX + TOKEN_COUNT]:
        index, cursor = prompt[INDEX:TABLE], sample[CURSOR:]
        low, high, length, near = follow(index, cursor, text, longest, max(shortest, matched))
        if length:
            size, at = walk(
                index, low, high, length, near, cursor[AT] - length, window, stop_confidence, extend_confidence,
                out[: room if extend_confidence < 1 else window], confidence,
            )  # fmt: skip
            if size:
                move_to(cursor, at)
                sure = np.float32(1)
                for place in range(size):
                    confidences[place] = confidence[place] / sure
                    sure = confidence[place]
                return FROM_HISTORY, size, length
    if source != NO_SOURCE:
        size = window
        if matched >= SURE_MATCH and extend_confidence < 1:
            size = max(window, min(room, np.int64(np.log(extend_confidence) / np.log(SURE_TOKEN))))
        if source == FROM_SIBLINGS:
            size = copy_sibling(samples, sample, out[:size])
        else:
            copy_own(sample, text, out[:size])
        confidences[:size] = SURE_TOKEN
        return source, size, matched
    if siblings and window > 0 and text.size:
        size, token = 0, likely_next(prompt[VOTES], SLOTS, text[text.size - 1])
        while token >= 0 and size < min(window, LIKELY_TOKENS):
            out[size], confidences[size] = token, LIKELY_TOKEN
            size += 1
            token = likely_next(prompt[VOTES], SLOTS, token)
        if size:
            return FROM_SIBLINGS, size, matched
    return source, 0, matched


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
