"""All drafting of one decode step in one compiled call, divided among a few threads.

A part is all of a step's samples of some prompts: prompts share nothing, so each part is appended and drafted for by
whichever thread takes it, and what is drafted is the same whoever does. The calling thread takes parts too, and gives
each part's drafts to vLLM's requests while the helping threads (`step_threads.py`) draft the next ones; for that the
interpreter's lock is needed, which it alone has. It waits for nothing but parts that a helper has taken: without a
helper, or with one that is not awake in time, it does all of them.

A part's samples are appended and then drafted for, so what was fetched for the one is still near for the other.

Invariants: the order of samples within a prompt is that of the step; a part is done by one thread at a time, and only
the calling thread changes Python's objects.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rhyme_openrlhf.history.addresses import float32s_at, float64s_at, int32s_at, int64s_at, prefetch
from rhyme_openrlhf.speculation.append_step import append
from rhyme_openrlhf.speculation.decoding import foresee, give_draft
from rhyme_openrlhf.speculation.draft_step import draft_step
from rhyme_openrlhf.speculation.rows import (
    BEGINS,
    GROWS,
    HERE,
    LENGTHS,
    NUMBERS,
    ORDERED,
    PROMPT,
    PROMPT_COLUMNS,
    REACHED,
    REQUEST,
    SAMPLE_COLUMNS,
    STATUS,
    STEP_ROWS,
)
from rhyme_openrlhf.speculation.shared_words import (
    SEMAPHORE_WORDS,
    WORD_BYTES,
    let_others_run,
    post,
    put_shared_word,
    shared_word,
    take_one,
    wait_for,
)

# As CALLED_SOURCES of draft_step.py.
CALLED_SOURCES = 209532603

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

# Words that threads share: parts that nobody has taken yet; whether helpers shall end; the semaphore that they sleep on
# (each on a cache line of its own); and the step: addresses, sizes and rules, the last two of them float64.
LEFT, ENDING, SEMAPHORE = 0, 8, 16
SAMPLES, PROMPTS, FOUND, COLUMNS, OUT, CONFIDENCES, LONGEST, SHORTEST, SIBLINGS, MOST, WHOLE, INT, EXTEND, STOP = range(
    24, 38
)
SHARED_WORDS = 40
assert SEMAPHORE + SEMAPHORE_WORDS <= SAMPLES and STOP < SHARED_WORDS
# Samples of a part, at least: what is fetched for so many is still in a core's second cache, and threads that wait for
# each other in the end wait for as long as one part takes. Of 16, 32, 64 and 128, the fastest (docs/histospec.md).
PART = 32
# What a part is at: nobody has finished it, it has to be gone on with by the calling thread, its drafts are made, and
# they were given too.
OPEN, STUCK, DRAFTED, GIVEN = range(4)
# Rows that a table may have: what an address alone does not say.
MANY = 1 << 40
# Samples ahead whose row is fetched while they are ordered.
AHEAD = 16


@njit(cache=True)
def append_and_draft(
    shared: int,
    helpers: int,
    samples_at: int,
    prompts_at: int,
    asked: int,
    again: bool,
    longest: int,
    shortest: int,
    siblings: bool,
    most: int,
    whole: bool,
    extend_confidence: float,
    stop_confidence: float,
    rows: Int64s,
    out: Int32s,
    confidences: Float32s,
    found: Int64s,
    growing: Int64s,
    kind: int,
    attribute: int,
    place: int,
) -> int:
    """Append what is new and draft (`draft_step`) for the first `asked` of `rows`; returns -1 when that is done.

    Else a row whose text may have no room for its part; then `again`. With an `attribute` (`decoding.DRAFT` by address;
    0: none) each request is given its draft, and `place` is where that probably is in its dict. `shared`, `helpers`:
    the words (by address) that so many threads share; `kind`: the type `int`, by address. `growing` becomes the last of
    those whose memory should grow for the steps to come: how many there are, then their rows (as many as fit).
    """
    samples, prompts = int64s_at(samples_at, (MANY, SAMPLE_COLUMNS)), int64s_at(prompts_at, (MANY, PROMPT_COLUMNS))
    step = int64s_at(shared, SHARED_WORDS)
    step[SAMPLES], step[PROMPTS], step[FOUND], step[COLUMNS] = samples_at, prompts_at, found.ctypes.data, found.shape[1]
    step[OUT], step[CONFIDENCES], step[INT] = out.ctypes.data, confidences.ctypes.data, kind
    step[LONGEST], step[SHORTEST], step[SIBLINGS], step[MOST], step[WHOLE] = longest, shortest, siblings, most, whole
    rules = float64s_at(shared, SHARED_WORDS)
    rules[EXTEND], rules[STOP] = extend_confidence, stop_confidence
    if not again:
        found[STATUS, 0] = _divide(samples, prompts, rows[:asked], found)
    parts = found[STATUS, 0]
    if again:
        for part in range(parts):
            if found[STATUS, 1 + part] == STUCK:
                _do(shared, part, 0)
    else:
        put_shared_word(shared + WORD_BYTES * LEFT, parts)
        for _ in range(min(helpers, parts - 1)):
            post(shared + WORD_BYTES * SEMAPHORE)
        while _do_next(shared):
            if attribute:
                _give_drafted(samples, found, parts, out, most, attribute, place)
    # What others have taken.
    stuck = -1
    for part in range(parts):
        status = found.ctypes.data + WORD_BYTES * (STATUS * found.shape[1] + 1 + part)
        while shared_word(status) == OPEN:
            if attribute:
                _give_drafted(samples, found, parts, out, most, attribute, place)
            let_others_run()
        if found[STATUS, 1 + part] == STUCK:
            stuck = found[ORDERED, found[REACHED, part]]
    if attribute:
        _give_drafted(samples, found, parts, out, most, attribute, place)
    if stuck < 0:
        _note_growing(found, asked, growing)
    return stuck


@njit(cache=True)
def _divide(samples: Int64s, prompts: Int64s, rows: Int64s, found: Int64s) -> int:
    """Put the rows of a step in order of their prompts, and those in parts; returns how many parts there are."""
    seen, counted = 0, found[REACHED]
    for number in range(rows.size):
        if number + AHEAD < rows.size:
            prefetch(samples.ctypes.data + WORD_BYTES * (SAMPLE_COLUMNS * rows[number + AHEAD] + PROMPT))
        prompt = samples[rows[number], PROMPT]
        if not prompts[prompt, HERE]:
            counted[seen] = prompt
            seen += 1
        prompts[prompt, HERE] += 1
    parts, begin = 0, 0
    found[BEGINS, 0] = 0
    for number in range(seen):
        count = prompts[counted[number], HERE]
        prompts[counted[number], HERE] = begin
        begin += count
        if begin - found[BEGINS, parts] >= PART or number == seen - 1:
            parts += 1
            found[BEGINS, parts] = begin
    for number in range(rows.size):
        prompt = samples[rows[number], PROMPT]
        place = prompts[prompt, HERE]
        prompts[prompt, HERE] += 1
        found[ORDERED, place], found[NUMBERS, place] = rows[number], number
    for number in range(seen):
        prompts[counted[number], HERE] = 0
    found[REACHED, :parts] = found[BEGINS, :parts]
    found[STATUS, 1 : 1 + parts] = OPEN
    return parts


@njit(cache=True)
def _do_next(shared: int) -> bool:
    """Take a part that nobody has taken, and do it; False: there is none."""
    left = shared_word(shared + WORD_BYTES * LEFT)
    if left <= 0:
        return False
    left = take_one(shared + WORD_BYTES * LEFT)
    if left <= 0:
        return False
    step = int64s_at(shared, SHARED_WORDS)
    _do(shared, int64s_at(step[FOUND], (STEP_ROWS, step[COLUMNS]))[STATUS, 0] - left, step[INT])
    return True


@njit(cache=True)
def _do(shared: int, part: int, kind: int) -> None:
    """Append and draft for the samples of a part, from where that was reached before. `kind`: as `append` has it."""
    step, rules = int64s_at(shared, SHARED_WORDS), float64s_at(shared, SHARED_WORDS)
    samples = int64s_at(step[SAMPLES], (MANY, SAMPLE_COLUMNS))
    prompts = int64s_at(step[PROMPTS], (MANY, PROMPT_COLUMNS))
    found = int64s_at(step[FOUND], (STEP_ROWS, step[COLUMNS]))
    begin, end = found[BEGINS, part], found[BEGINS, part + 1]
    rows, numbers = found[ORDERED, begin:end], found[NUMBERS, begin:end]
    status = step[FOUND] + WORD_BYTES * (STATUS * step[COLUMNS] + 1 + part)
    siblings = step[SIBLINGS] != 0
    reached = begin + append(
        samples, prompts, rows, found[REACHED, part] - begin, step[SHORTEST], siblings, kind, found[GROWS, begin:end]
    )
    found[REACHED, part] = reached
    if reached < end:
        put_shared_word(status, STUCK)
        return
    size = step[COLUMNS] * step[MOST]
    draft_step(
        samples, prompts, rows, numbers, step[LONGEST], step[SHORTEST], siblings, step[MOST], step[WHOLE] != 0,
        rules[EXTEND], rules[STOP], int32s_at(step[OUT], size), float32s_at(step[CONFIDENCES], size), found,
    )  # fmt: skip
    put_shared_word(status, DRAFTED)


@njit(cache=True)
def _give_drafted(
    samples: Int64s, found: Int64s, parts: int, out: Int32s, most: int, attribute: int, place: int
) -> None:
    """Give the requests of each part that was drafted for since their drafts."""
    for part in range(parts):
        if shared_word(found.ctypes.data + WORD_BYTES * (STATUS * found.shape[1] + 1 + part)) == DRAFTED:
            found[STATUS, 1 + part] = GIVEN
            end = found[BEGINS, part + 1]
            for number in range(found[BEGINS, part], end):
                foresee(samples, found[ORDERED], number, end, place, place)
                own = found[NUMBERS, number]
                give_draft(samples[found[ORDERED, number], REQUEST], out, most * own, found[LENGTHS, own], attribute)


@njit(cache=True)
def _note_growing(found: Int64s, asked: int, growing: Int64s) -> None:
    """The last samples of the step whose memory should grow, in the step's order."""
    found_any = 0
    for place in range(asked):
        found_any |= found[GROWS, place]
    if found_any:
        by_number = found[REACHED]
        for place in range(asked):
            by_number[found[NUMBERS, place]] = found[ORDERED, place] if found[GROWS, place] else -1
        for number in range(asked):
            if by_number[number] >= 0:
                growing[1 + growing[0] % (growing.size - 1)] = by_number[number]
                growing[0] += 1


@njit(cache=True)
def gather(
    found: Int64s, asked: int, most: int, out: Int32s, confidences: Float32s, flat: Int32s, of_flat: Float32s
) -> int:
    """The drafts of a step and their confidences, one after the other without gaps; returns how many tokens."""
    filled = 0
    for number in range(asked):
        begin = most * number
        for place in range(begin, begin + found[LENGTHS, number]):
            flat[filled], of_flat[filled] = out[place], confidences[place]
            filled += 1
    return filled


@njit(cache=True, nogil=True)
def help_out(shared: int) -> None:
    """Do parts of steps whenever there are any, until the words say to end."""
    while not shared_word(shared + WORD_BYTES * ENDING):
        wait_for(shared + WORD_BYTES * SEMAPHORE)
        while _do_next(shared):
            pass
