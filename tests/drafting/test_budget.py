"""The budget: what it expects, bounds and tries (all cuts: tests/oracles); the window (RhymeRL, section 5.4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting import budget
from rhyme_openrlhf.drafting.budget import RUNNING_TO_A_TOKEN, TRIED_AFTER, SpeculationWindow, Tries
from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.drafting.source import Verified
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.examples import examples

# Probabilities are compared by their exponent and this number of bits (csrc/budget.h).
BITS = 8


def choose(acceptance: np.ndarray, lengths: np.ndarray, seconds: np.ndarray) -> budget.Budget:
    """The budget of a step in which every sample has a draft, be it empty."""
    return budget.choose(acceptance, lengths, seconds, len(lengths))


def chains(samples: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = [probability for chain in samples for probability in chain]
    return np.array(tokens, dtype=np.float32), np.array([len(chain) for chain in samples], dtype=np.int64)


def yielded(samples: list[list[float]], lengths: tuple[int, ...]) -> float:
    """Return a decode step's expected tokens if samples verify drafts of these lengths."""
    total = float(len(samples))
    for chain, length in zip(samples, lengths, strict=True):
        total += float(np.cumprod(np.asarray(chain[:length], dtype=np.float64)).sum())
    return total


# Four in a row stay above what the budget looks at.
probability = st.floats(0.2, 1.0)
batch = st.lists(st.lists(probability, max_size=4), min_size=1, max_size=4)


@settings(max_examples=examples(100), deadline=None)
@given(batch)
def test_what_it_expects_is_what_its_cut_yields(samples: list[list[float]]) -> None:
    found = choose(*chains(samples), np.full(17, 1.0))
    lengths = tuple(int(n) for n in found.lengths)
    assert len(samples) + found.expected_accepted == pytest.approx(yielded(samples, lengths), rel=2.0**-BITS * 2)


def test_the_table_bounds_the_drafts() -> None:
    found = choose(*chains([[1.0] * 8] * 4), np.full(6, 1.0))
    assert found.drafts == 5 and found.lengths.tolist() == [5, 0, 0, 0]


def test_samples_without_a_draft_count() -> None:
    """What a draft token brings is weighed against the sure tokens of all."""
    acceptance, lengths, seconds = np.array([0.9], dtype=np.float32), np.array([1]), np.array([1.0, 1.05])
    assert budget.choose(acceptance, lengths, seconds, 10).drafts == 1
    assert budget.choose(acceptance, lengths, seconds, 100).drafts == 0


def test_arrays_that_do_not_fit_are_refused() -> None:
    one = np.ones(1)
    for lengths, seconds in (([2], one), ([1], one[:0]), ([-1, 2], one)):
        with pytest.raises(ValueError, match="do not fit"):
            core.choose(one, lengths, seconds, 1, 0)
    with pytest.raises(ValueError, match="do not fit"):
        core.cut([1, 2], [2], [3])
    assert core.cut([1, 2, 3], [2, 1], [1, 1]).tolist() == [1, 3]


def step(tries: Tries, proposed: int = 4, verified: int = 0, running: int = 1, most: int = 9) -> int:
    """Return the tokens tried in a decode step with `proposed` draft tokens, `verified` of them for their gain."""
    tried = tries.tokens(running, most) if proposed else 0
    tries.decided(proposed, verified or tried)
    return 0 if verified else tried


def test_every_17th_step_in_which_nothing_is_worth_it() -> None:
    tries = Tries()
    tried = [step(tries) for _ in range(3 * (TRIED_AFTER + 1))]
    assert tried == ([0] * TRIED_AFTER + [1]) * 3
    for _ in range(TRIED_AFTER - 1):
        step(tries)
    assert not step(tries, verified=3) and not tries.trying
    assert [step(tries) for _ in range(TRIED_AFTER + 1)] == [0] * TRIED_AFTER + [1]


def test_steps_without_a_proposal_or_without_room_neither_try_nor_put_it_off() -> None:
    """Methods that seldom propose would else never be tried: not often enough in a row."""
    tries = Tries()
    for _ in range(TRIED_AFTER):
        assert step(tries, proposed=0) == 0 and step(tries) == 0
    assert step(tries, proposed=0) == 0
    assert step(tries, most=0) == 0 and not tries.trying
    assert step(tries) == 1 and tries.trying


def test_more_samples_try_more_tokens() -> None:
    for running, tokens in ((1, 1), (2 * RUNNING_TO_A_TOKEN - 1, 1), (2 * RUNNING_TO_A_TOKEN, 2), (512, 9)):
        tries = Tries()
        assert [step(tries, running=running) for _ in range(TRIED_AFTER + 1)][-1] == tokens


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.floats(0.0, 1.0, width=32), max_size=6), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.1, 5.0]),
)
def test_only_a_beginning_and_only_where_nothing_is_chosen(
    chains: list[list[float]], tried: int, dearer: float
) -> None:
    acceptance = np.array([one for chain in chains for one in chain], dtype=np.float32)
    lengths = np.array([len(chain) for chain in chains], dtype=np.int64)
    seconds = 0.01 * (1 + dearer * np.arange(acceptance.size + 1))
    usual, drafts, expected = budget.choose(acceptance, lengths, seconds, len(chains))
    chosen, total, hoped = budget.choose(acceptance, lengths, seconds, len(chains), tried)
    assert total == chosen.sum()
    if drafts or not tried:
        assert (chosen == usual).all() and (total, hoped) == (drafts, expected)
    else:
        longest = int(np.argmax(lengths))
        assert total == chosen[longest] == min(tried, len(chains[longest]))
        assert np.isclose(hoped, np.cumprod(np.array(chains[longest][:total], dtype=np.float64)).sum())


@given(st.lists(st.integers(0, 128), max_size=200), st.integers(-3, 3000))
def test_shares_fit_and_only_the_longest_are_cut(lengths: list[int], most: int) -> None:
    kept = budget.share(lengths, most)
    assert sum(kept) == min(sum(lengths), max(most, 0))
    assert all(0 <= left <= length for left, length in zip(kept, lengths, strict=True))
    cut = [left for left, length in zip(kept, lengths, strict=True) if left < length]
    # All that are cut are as long, but for the tokens that are left over, and none that is kept whole is longer.
    assert not cut or max(kept) - min(cut) <= 1


def test_the_papers_numbers() -> None:
    """Starts at 2, grows by 2 up to 32, falls back to 2."""
    window = SpeculationWindow(HistoSpecSettings())
    sizes = []
    for _ in range(17):
        sizes.append(window.size)
        window.record(window.size, window.size)
    assert sizes == [*range(2, 33, 2), 32]
    window.record(32, 31)
    assert window.size == 2


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(
    st.integers(1, 8),
    st.integers(0, 5),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=30),
)
def test_every_transition(start: int, step: int, extra: int, records: list[list[int]]) -> None:
    rules = HistoSpecSettings(window_start=start, window_step=step, window_max=start + extra)
    window = SpeculationWindow(rules)
    assert window.size == start
    for accepted, drafted in records:
        before = window.size
        window.record(drafted, accepted)
        if drafted == 0:
            assert window.size == before
        elif accepted < drafted:
            assert window.size == start
        else:
            assert window.size == min(before + step, start + extra)
        window = SpeculationWindow(rules, window.size)  # a move to another engine in between changes nothing


@pytest.mark.parametrize("size", [0, 1, 33])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="from 2 to 32"):
        SpeculationWindow(HistoSpecSettings(), size)


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1), (-1, -1)])
def test_impossible_counts_are_refused(drafted: int, accepted: int) -> None:
    window = SpeculationWindow(HistoSpecSettings())
    with pytest.raises(ValueError, match="accepted"):
        window.record(drafted, accepted)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    st.integers(1, 8),
    st.integers(0, 5),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)).filter(lambda both: both[0] <= both[1]), max_size=30),
)
def test_the_compiled_drafter_has_the_same_window(
    start: int, step: int, extra: int, records: list[tuple[int, int]]
) -> None:
    rules = HistoSpecSettings(window_start=start, window_step=step, window_max=start + extra)
    window, drafter = SpeculationWindow(rules), HistoryDrafter(rules)
    drafter.start("a", "p", [], 0, 100)
    for accepted, drafted in records:
        window.record(drafted, accepted)
        drafter.verified(Verified.of(["a"], [drafted], [accepted]))
        assert drafter.window("a") == window.size
