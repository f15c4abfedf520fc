"""Drafts from what all prompts share: a table against a plain one, its window and its memory, and when it is asked."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting.drafter import FROM_HISTORY, FROM_SHARED, NO_SOURCE, HistoryDrafter
from rhyme_openrlhf.drafting.planner import Drafts
from rhyme_openrlhf.drafting.source import Verified
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.examples import examples

# As csrc/shared.h and csrc/shared.cpp have them.
ORDERS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
SLOTS_PER_TOKEN, TICKS, SWEEP_TICKS, MOST_VOTES = 3, 64, 128, 15
PRIOR, PRIOR_GUESSES, MOST_COUNTED = 0.3, 5.0, 400.0
# As csrc/drafter.cpp has them: steps in which the source is tried, and steps that it rests.
TRIED, RESTS = 64, 960
BITS = 2**64 - 1


def hashes(text: list[int]) -> list[int]:
    """Return the hashes of the ends of a text, of each length of ORDERS that it has."""
    found, value, back = [], 14695981039346656037, 0
    for order in ORDERS:
        if order > len(text):
            break
        while back < order:
            value = ((value ^ (text[-1 - back] & (2**32 - 1))) * 1099511628211) & BITS
            back += 1
        mixed = ((value ^ value >> 33) * 0xFF51AFD7ED558CCD) & BITS
        found.append(max(mixed ^ mixed >> 33, 1))
    return found


class Plain:
    """The table in plain Python: slots are lists [token, mark, votes, tick], with ticks that never overflow."""

    def __init__(self, window: int) -> None:
        self.slots: list[list[int] | None] = [None] * (SLOTS_PER_TOKEN * window)
        self.tick_tokens = max(window // TICKS, 1)
        self.entered = 0
        self.kinds: dict[tuple[int, int], list[float]] = {}

    @property
    def tick(self) -> int:
        return self.entered // self.tick_tokens

    def find(self, key: int) -> tuple[int, list[int] | None]:
        """Return the place of a hash, and what is in it unless it is too old."""
        place = (key >> 32) * len(self.slots) >> 32
        slot = self.slots[place]
        return place, slot if slot and self.tick - slot[3] <= TICKS else None

    def longest(self, text: list[int]) -> tuple[int, list[int]] | None:
        found = None
        for order, key in enumerate(hashes(text)):
            _, slot = self.find(key)
            if slot and slot[1] == key & 0xFFFF:
                found = order, slot
        return found

    def guess(self, text: list[int]) -> tuple[int, int, float]:
        found = self.longest(text)
        if found is None:
            return -1, 0, 0.0
        order, slot = found
        right, every = self.kinds.get((order, slot[2]), [0.0, 0.0])
        return slot[0], ORDERS[order], (right + PRIOR * PRIOR_GUESSES) / (every + PRIOR_GUESSES)

    def enter(self, text: list[int], token: int) -> None:
        if found := self.longest(text):
            kind = self.kinds.setdefault((found[0], found[1][2]), [0.0, 0.0])
            if kind[1] >= MOST_COUNTED:
                kind[:] = kind[0] / 2, kind[1] / 2
            kind[0] += found[1][0] == token
            kind[1] += 1
        for key in hashes(text):
            place, slot = self.find(key)
            if slot and slot[1] == key & 0xFFFF and slot[0] == token:
                slot[2:] = min(slot[2] + 1, MOST_VOTES), self.tick
            elif slot and slot[2] > 1:
                slot[2] -= 1
            else:
                self.slots[place] = [token, key & 0xFFFF, 1, self.tick]
        self.entered += 1


TOKENS = st.one_of(st.integers(0, 2), st.integers(-1, 2**31 - 1))


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.integers(1, 100), st.lists(st.lists(TOKENS, max_size=60), max_size=12))
def test_guesses_are_those_of_a_plain_table(window: int, texts: list[list[int]]) -> None:
    shared, plain = core.Shared(window), Plain(window)
    for text in texts:
        for end in range(len(text)):
            before = text[:end]
            token, matched, probability = shared.guess(before)
            expected = plain.guess(before)
            assert (token, matched) == expected[:2] and probability == pytest.approx(expected[2], rel=1e-5)
            shared.enter(before, text[end])
            plain.enter(before, text[end])


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 64, 100, 1000]))
def test_nothing_older_than_the_window_is_guessed(seed: int, window: int) -> None:
    """Also after many windows, when the ticks of old entries come again."""
    rng, shared = random.Random(seed), core.Shared(window)
    text: list[int] = []
    last: dict[tuple[int, ...], int] = {}
    guessed = strangers = 0
    for number in range(min(40 * window, 6000)):
        end = text[-max(ORDERS) :]
        token, matched, _ = shared.guess(end)
        if token >= 0:
            guessed += 1
            seen = last.get((*end[-matched:], token))
            # A tick more than the window: entries age by ticks. One of 65,536 contexts looks like another. Behind a
            # single token, what followed the other one may have followed this one too, long ago.
            old = seen is not None and number - seen > window + 2 * max(window // TICKS, 1)
            assert not old or matched == 1
            strangers += seen is None or old
        # Some tokens come again soon, some seldom and some never.
        token = rng.choice([rng.randrange(3), rng.randrange(60), number + 100])
        shared.enter(end, token)
        for order in ORDERS:
            if order <= len(end):
                last[*end[-order:], token] = number
        text.append(token)
    assert (guessed or window == 1) and strangers < 10


def test_a_table_has_at_most_24_bytes_for_each_token_of_its_window() -> None:
    for window in (0, 1, 1000, 1 << 18):
        assert core.Shared(window).memory_bytes <= 24 * window
    empty = core.Shared(0)
    empty.enter([1, 2, 3], 4)
    assert empty.guess([1, 2, 3]) == (-1, 0, 0.0)
    with pytest.raises(ValueError, match="window"):
        core.Shared(-1)


class Sharing(HistoryDrafter):
    """A drafter that says what is proposed."""

    def __init__(self, **changes: Any) -> None:
        plain: dict[str, Any] = {"siblings": False, "own_output": False, "shared_tokens": 4096}
        super().__init__(HistoSpecSettings(**(plain | changes)))

    def say(self, name: str, tokens: list[int], key: str | None = None, most: int = 10**6) -> None:
        """Start a sample without a prompt and append its response."""
        self.start(name, key or name, [], 0, most)
        self.append([name], [tokens])

    def proposed(self, *names: str, whole: bool = False) -> Drafts:
        drafts = self.propose(self._samples_of(names), whole)
        self.computing()
        return drafts


def test_other_prompts_say_what_follows() -> None:
    drafter = Sharing()
    drafter.say("a", [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3)
    drafter.proposed("a")
    drafter.finish("a")
    drafter.say("b", [30, 1, 2, 3, 4])
    found = drafter.proposed("b")
    assert found.sources.tolist() == [FROM_SHARED] and found.matches.tolist() == [4]
    assert found.flat.tolist() == [5, 6, 7, 8, 9, 1, 2, 3][: found.flat.size] and found.flat.size >= 1
    assert all(0.05 < probability <= 1 for probability in found.confidences)
    # A planner cuts: it gets a longer draft.
    assert drafter.proposed("b", whole=True).flat.size >= found.flat.size
    drafter.say("full", [30, 1, 2, 3, 4], most=6)
    assert drafter.proposed("full").lengths.tolist() == [0]


def test_what_a_sample_wrote_last_is_shared_when_it_finishes() -> None:
    drafter = Sharing()
    drafter.say("a", [0])
    drafter.proposed("a")
    drafter.append(["a"], [[1, 2, 3, 4]])
    drafter.finish("a")
    drafter.say("b", [1, 2, 3])
    assert drafter.proposed("b").flat.tolist() == [4]


def test_prompts_are_not_shared() -> None:
    drafter = Sharing()
    drafter.start("a", "a", [1, 2, 3, 4, 5, 6], 5, 100)
    drafter.start("moved", "m", [7, 8, 9, 7, 8], 2, 100)
    drafter.proposed("a", "moved")
    for name, text, draft in (("b", [1, 2], []), ("c", [3, 4, 5], [6]), ("d", [7, 8], [9])):
        drafter.say(name, text)
        assert drafter.proposed(name).flat.tolist()[:1] == draft


@pytest.mark.parametrize("shared_tokens", [0, 4096])
def test_memory_is_bounded_and_without_a_window_nothing_is_shared(shared_tokens: int) -> None:
    drafter = Sharing(shared_tokens=shared_tokens)
    assert drafter.memory_bytes() == 24 * shared_tokens
    drafter.say("a", [1, 2, 3, 4] * 2)
    drafter.proposed("a")
    drafter.finish("a")
    assert drafter.memory_bytes() == 24 * shared_tokens
    drafter.say("b", [1, 2, 3])
    assert drafter.proposed("b").sources.tolist() == [FROM_SHARED if shared_tokens else NO_SOURCE]


def test_the_prompts_own_history_drafts_where_it_is_as_good() -> None:
    drafter = Sharing()
    for number in range(3):
        drafter.say(f"a{number}", [1, 2, 3, 4, 5, 6])
        drafter.proposed(f"a{number}")
    drafter.install("b", build_index([Piece([], [1, 2, 3, 7, 8, 9, 10, 11, 12], 1.0)]))
    drafter.say("b", [1, 2, 3])
    for _ in range(40):
        # History is right each time, and the others' texts are not.
        found = drafter.proposed("b")
        right = int(found.flat[0] == 7)
        drafter.verified(Verified.of(["b"], [1], [right]))
    assert drafter.proposed("b").sources.tolist() == [FROM_HISTORY]


def test_it_rests_where_it_gains_nothing_and_is_tried_again() -> None:
    drafter = Sharing()
    drafter.say("a", [1, 2, 3, 4, 5])
    sources = []
    for _ in range(TRIED + RESTS + TRIED):
        found = drafter.proposed("a")
        sources.append(int(found.sources[0]))
        if found.flat.size:
            drafter.verified(Verified.of(["a"], [int(found.flat.size)], [0]))
        drafter.append(["a"], [[1, 2, 3, 4, 5]])
    asked = [source == FROM_SHARED for source in sources]
    assert sum(asked[:TRIED]) > TRIED / 2 and not any(asked[TRIED + 1 : TRIED + RESTS]) and any(asked[-TRIED:])
    # From here on it gains, and goes on.
    for _ in range(2 * TRIED):
        found = drafter.proposed("a")
        if found.flat.size:
            drafter.verified(Verified.of(["a"], [int(found.flat.size)], [int(found.flat.size)]))
        drafter.append(["a"], [[1, 2, 3, 4, 5]])
    assert drafter.proposed("a").sources.tolist() == [FROM_SHARED]
