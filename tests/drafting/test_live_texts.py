"""Drafts from texts as they grow: found against a search through everything, and never a wrong match."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.drafter import FROM_OWN, FROM_SIBLINGS, NO_SOURCE
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.drafting.whole_texts import WholeTexts
from tests.examples import examples

PARTS = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=8)
WINDOW = 5
FAR = 10**6
# The constants of csrc/texts.cpp and drafter.cpp: tokens of a draft without a match, buckets of a prompt's first table.
# The third is the number of tokens that a sample's first table can hold, and the last the most tokens of a step that
# enters them before its drafts.
LIKELY_TOKENS, FIRST_BUCKETS, FIRST_TABLED, ENTERED_BEFORE = 2, 4096, 1024, 1024
MANY = 64


class Growing(WholeTexts):
    """Samples by number, that are told what is new."""

    def __init__(self, settings: HistoSpecSettings) -> None:
        super().__init__(settings)
        self.said: dict[str, list[int]] = {}


def live(**changes: Any) -> Growing:
    """The named sources alone; a draft is as long as its window."""
    plain: dict[str, Any] = {
        "prefix_min": 3, "own_output": False, "siblings": False, "shared_tokens": 0, "extend_confidence": 1.0,
        "stop_confidence": 0.0,
    }  # fmt: skip
    return Growing(HistoSpecSettings(**(plain | changes)))


def begin(texts: Growing, key: str, prompt_tokens: int, window: int = WINDOW, most_tokens: int = FAR) -> str:
    name = f"sample {len(texts.said)}"
    texts.begin(name, key, prompt_tokens, most_tokens, window)
    texts.said[name] = []
    return name


def grow(texts: Growing, name: str, part: list[int]) -> tuple[list[int], int]:
    texts.said[name] += part
    texts.tell([name], [texts.said[name]])
    drafts = texts.propose(texts._samples_of([name]), whole=False)
    texts.computing()
    return drafts.tokens()[0], int(drafts.sources[0])


def crowd(texts: Growing, name: str) -> None:
    """Have this sample, of another prompt, write enough that the step enters its tokens after its drafts."""
    texts.said[name] += [0] * (ENTERED_BEFORE + 1)
    texts.tell([name], [texts.said[name]])


def continuations(text: list[int], end: list[int]) -> list[int]:
    """The places in `text` right after an occurrence of `end`."""
    return [at for at in range(len(end), len(text)) if text[at - len(end) : at] == end]


def repeated(text: list[int], at: int, size: int) -> list[int]:
    """`size` tokens from `at`, as if the text went on repeating itself from there."""
    period = len(text) - at
    return [text[at + i % period] for i in range(size)]


@settings(deadline=None, derandomize=True)
@given(PARTS, st.integers(1, 4))
def test_own_text_is_found_when_it_repeats(parts: list[list[int]], shortest: int) -> None:
    texts, text = live(own_output=True, prefix_min=shortest), []
    row = begin(texts, "p", 0)
    for part in parts:
        found, source = grow(texts, row, part)
        text += part
        # Four different tokens never fill the table: nothing is taken over.
        places = continuations(text, text[-shortest:]) if len(text) >= shortest else []
        assert (source == FROM_OWN) == bool(places)
        assert not places or found in [repeated(text, at, WINDOW) for at in places]


@settings(deadline=None, derandomize=True)
@given(PARTS, PARTS, st.integers(1, 4))
def test_what_a_sibling_wrote_after_the_same_tokens_is_found(
    theirs: list[list[int]], ours: list[list[int]], shortest: int
) -> None:
    texts = live(siblings=True, prefix_min=shortest)
    other, row = begin(texts, "p", 1), begin(texts, "p", 1)
    their_text, our_text = [0], [0]
    grow(texts, other, [0])
    grow(texts, row, [0])
    for number in range(max(len(theirs), len(ours))):
        for text, who, parts in ((their_text, other, theirs), (our_text, row, ours)):
            part = parts[number] if number < len(parts) else []
            found, source = grow(texts, who, part)
            text += part
        places = continuations(their_text, our_text[-shortest:]) if len(our_text) >= shortest else []
        assert source in (FROM_SIBLINGS, NO_SOURCE)
        # The latest place may be where the sibling is now; then there may be none although an earlier one goes on.
        # Without a match it is what followed the last token somewhere.
        matches = [their_text[at : at + WINDOW] for at in places]
        pairs = {both[at : at + 2] for both in map(tuple, (their_text, our_text)) for at in range(len(both) - 1)}
        chain = [our_text[-1], *found]
        followers = len(found) <= LIKELY_TOKENS and all(pair in pairs for pair in itertools.pairwise(chain))
        assert found in matches or followers
        if places and their_text[-shortest:] != our_text[-shortest:]:
            assert found in matches


@settings(deadline=None, derandomize=True)
@given(PARTS, st.integers(1, 2))
def test_a_step_of_many_tokens_finds_what_its_own_text_had_before(parts: list[list[int]], shortest: int) -> None:
    # No sample has a sibling; without the source all steps would enter their tokens first. Pairs of tokens are so few
    # that none takes over another's slot.
    texts, text = live(own_output=True, siblings=True, prefix_min=shortest), []
    row, other = begin(texts, "p", 0), begin(texts, "q", 0)
    for part in parts:
        crowd(texts, other)
        found, source = grow(texts, row, part)
        before = len(text)
        text += part
        places = continuations(text, text[-shortest:]) if len(text) >= shortest else []
        assert source != FROM_OWN or found in [repeated(text, at, WINDOW) for at in places]
        assert source == FROM_OWN or not part or not any(at <= before for at in places)


@settings(deadline=None, derandomize=True)
@given(PARTS, PARTS, st.integers(1, 4))
def test_a_step_of_many_tokens_finds_what_siblings_had_before(
    theirs: list[list[int]], ours: list[list[int]], shortest: int
) -> None:
    texts = live(siblings=True, prefix_min=shortest)
    other, row, filler = begin(texts, "p", 1), begin(texts, "p", 1), begin(texts, "q", 0)
    their_text, our_text = [0], [0]
    grow(texts, other, [0])
    grow(texts, row, [0])
    for their_part, our_part in itertools.zip_longest(theirs, ours, fillvalue=[]):
        crowd(texts, filler)
        before, text = len(their_text), our_text + our_part
        texts.said[other] += their_part
        texts.tell([other], [texts.said[other]])
        found, source = grow(texts, row, our_part)
        their_text, our_text = their_text + their_part, text
        places = continuations(their_text, our_text[-shortest:]) if len(our_text) >= shortest else []
        if len(found) > LIKELY_TOKENS:
            assert source == FROM_SIBLINGS and found in [their_text[at : at + WINDOW] for at in places]
        # The latest place that was known before is found, unless nothing was written behind it.
        if known := [at for at in places if at <= before]:
            assert found or known[-1] == len(their_text)


@settings(deadline=None, derandomize=True)
@given(PARTS)
def test_drafts_from_own_text_alone_do_not_depend_on_other_samples(parts: list[list[int]]) -> None:
    """Reproducible runs rely on this: they have neither siblings nor what all prompts share."""
    alone, beside = live(own_output=True), live(own_output=True)
    row, same, other = begin(alone, "p", 0), begin(beside, "p", 0), begin(beside, "q", 0)
    for part in parts:
        crowd(beside, other)
        assert grow(beside, same, part) == grow(alone, row, part)


def test_without_a_match_siblings_say_what_mostly_follows() -> None:
    texts = live(siblings=True)
    first, second = begin(texts, "p", 1), begin(texts, "p", 1)
    grow(texts, first, [9, 5, 7, 1, 5, 7, 2, 5, 8, 3])
    assert grow(texts, second, [9, 4, 5]) == ([7, 1], FROM_SIBLINGS)
    assert grow(texts, second, [6]) == ([], NO_SOURCE)
    full = begin(texts, "p", 1, most_tokens=4)
    assert grow(texts, full, [9, 4, 5]) == ([], NO_SOURCE)
    stranger = begin(texts, "q", 1)
    assert grow(texts, stranger, [9, 4, 5]) == ([], NO_SOURCE)


def test_a_loop_is_drafted_on() -> None:
    texts = live(own_output=True)
    row = begin(texts, "p", 0, window=10, most_tokens=20)
    assert grow(texts, row, [1, 2, 3, 4] * 2)[0] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert grow(texts, row, [1, 2, 3, 4] * 2)[0] == [1, 2, 3]
    assert grow(texts, row, [1, 2, 3, 4]) == ([], NO_SOURCE)


def test_the_most_recent_occurrence_counts() -> None:
    texts = live(own_output=True, prefix_min=2)
    row = begin(texts, "p", 0, window=2)
    assert grow(texts, row, [1, 2, 7, 1, 2, 8, 1, 2])[0] == [8, 1]


def test_it_does_not_matter_how_the_tokens_came() -> None:
    text = [number * number % 11 for number in range(4 * FIRST_TABLED)]
    texts = live(own_output=True, siblings=True)
    whole, single = begin(texts, "p", 0, window=20), begin(texts, "q", 0, window=20)
    grow(texts, whole, text[:-1])
    drafted = grow(texts, whole, text[-1:])
    for token in text[:-1]:
        grow(texts, single, [token])
    assert grow(texts, single, text[-1:]) == drafted


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=10, max_size=400))
def test_any_token_id_is_fine(text: list[int]) -> None:
    """A slot that other tokens took over loses a match once; a text this long has more than one chance."""
    texts = live(own_output=True)
    row = begin(texts, "p", 0)
    found, source = grow(texts, row, text + text)
    assert source == FROM_OWN
    assert found in [repeated(text + text, at, WINDOW) for at in continuations(text + text, text[-3:])]


def test_tables_and_rows_grow_and_nothing_is_lost() -> None:
    texts = live(siblings=True)
    rows = [begin(texts, f"p{number % 3}", 0) for number in range(3 * MANY)]
    # Every other token is new, so that there are more places than the first table has buckets.
    said = {row: [(n * 7919 + i * 31 + i * i) % 100003 for i in range(400)] for n, row in enumerate(rows)}
    assert 400 * MANY > 4 * FIRST_BUCKETS
    for row in rows:
        grow(texts, row, said[row])
    missed = 0
    for row in rows:
        sibling = rows[(rows.index(row) + 3) % len(rows)]
        grow(texts, row, [5, 4, 3])
        found, source = grow(texts, row, said[sibling][50:60])
        assert source in (FROM_SIBLINGS, NO_SOURCE)
        missed += found != said[sibling][60:65]
    assert missed < len(rows) / 5
    for row in rows:
        texts.finish(row)
    assert texts.memory_bytes() == 0


def test_a_prompt_with_an_index_outlives_its_samples() -> None:
    texts = live()
    texts.install("p", build_index([Piece([1, 2, 3], [4, 5], 1.0)]))
    for _ in range(2):
        row = begin(texts, "p", 3)
        assert grow(texts, row, [1, 2, 3])[0] == [4, 5]
        texts.finish(row)
    texts.forget("p")
    texts.forget("p")
    row = begin(texts, "p", 3)
    assert grow(texts, row, [1, 2, 3])[0] == []


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=4), PARTS, st.integers(0, 8))
def test_history_drafts_as_the_index_does(history: list[list[int]], parts: list[list[int]], again: int) -> None:
    """Holds for any tokens since the last decode step, and when the prompt gets another index in between."""
    pieces = [Piece([], tokens, float(number % 2)) for number, tokens in enumerate(history)]
    texts, text = live(prefix_min=1), []
    buffer = build_index(pieces)
    index = DraftIndex.from_buffer(buffer)
    texts.install("p", buffer)
    row = begin(texts, "p", 0)
    for number, part in enumerate(parts):
        if number == again:
            buffer = build_index([*pieces[1:], Piece([], text, 1.0)])
            index = DraftIndex.from_buffer(buffer)
            texts.install("p", buffer)
        # Half of the parts begin with what was drafted.
        drafted = index.draft(text, 16, 1, WINDOW).tokens
        new = [*drafted, *part[:2]] if number % 2 else part
        text += new
        assert grow(texts, row, new)[0] == index.draft(text, 16, 1, WINDOW).tokens


def test_samples_that_began_together_do_not_grow_together() -> None:
    """A step gives more memory to four samples at most; without texts that are full it would all come in two steps.

    Of samples that draft from siblings too: the others' drafts would depend on it.
    """
    samples, a_sample = 24, 4 * (3 * 2 * 1024 + 3 * 4096)
    texts = live(own_output=True, siblings=True)
    names = [begin(texts, f"p{number}", 1, most_tokens=1 << 16) for number in range(samples)]
    sizes = [texts.memory_bytes()]
    for step in range(2 * 4096 // 16):
        for number, name in enumerate(names):
            texts.said[name] += [(step * 7 + i * number) % 911 for i in range(16)]
        texts.draft_for(names, [texts.said[name] for name in names])
        sizes.append(texts.memory_bytes())
    added = [after - before for before, after in itertools.pairwise(sizes)]
    assert 0 < max(added[1:]) <= 4 * a_sample
    assert sum(added) > samples * a_sample
    for name in names:
        texts.finish(name)
    assert texts.memory_bytes() == 0


def words(rng: random.Random, tokens: int) -> list[int]:
    """Text whose phrases return, and with them what follows."""
    phrases = [[rng.randrange(5000) for _ in range(12)] for _ in range(200)]
    return list(itertools.chain.from_iterable(rng.choice(phrases) for _ in range(tokens // 12)))


def test_own_drafts_of_long_texts_do_not_depend_on_other_samples() -> None:
    """Tables grow many times, beside more samples than a step gives memory to."""
    others, tokens, part = 256, 6000, 24
    rng = random.Random(5)
    alone, beside = live(own_output=True), live(own_output=True)
    row, same = begin(alone, "p", 0), begin(beside, "p", 0)
    names = [same, *(begin(beside, f"q{number}", 0) for number in range(others))]
    text = words(rng, tokens)
    for at in range(0, len(text), part):
        new = text[at : at + part]
        expected = grow(alone, row, new)
        beside.append(names, [new] * len(names))
        drafts = beside.propose(beside._samples_of(names), whole=False)
        beside.computing()
        assert (drafts.tokens()[0], drafts.sources[0]) == expected


def test_a_row_that_is_used_again_finds_its_new_text_and_so_do_others() -> None:
    """Between two steps a sample ends whose tokens are not entered yet, and the next sample gets its row."""
    texts = live(own_output=True)
    rng, found = random.Random(3), 0
    turns = 100
    for _ in range(turns):
        gone = begin(texts, "p", 0)
        texts.append([gone], [words(rng, 60)])
        texts.finish(gone)
        both = [begin(texts, "p", 0), begin(texts, "q", 0)]
        written = [[rng.randrange(10**6) for _ in range(20)] for _ in both]
        texts.append(both, written)
        texts.propose(texts._samples_of(both), whole=False)
        texts.computing()
        for name, text in zip(both, written, strict=True):
            found += grow(texts, name, text[:4])[0] == text[4 : 4 + WINDOW]
            texts.finish(name)
    assert found == 2 * turns
