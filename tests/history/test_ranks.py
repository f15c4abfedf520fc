"""Ranking groups: what moves, and by table 2's four rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from rhyme_openrlhf.history.ranks import rank_change, rank_correlation, together
from rhyme_openrlhf.history.shard import EpochLengths


def epoch(before: list[float], lengths: list[list[int]]) -> EpochLengths:
    flat = [length for of_prompt in lengths for length in of_prompt]
    return EpochLengths(
        np.array(before, dtype=float),
        np.array([len(of_prompt) for of_prompt in lengths], dtype=np.int64),
        np.array(flat, dtype=np.int64),
    )


@pytest.mark.parametrize("prompts", [1, 3, 8, 20])
def test_the_same_order_changes_nothing(prompts: int) -> None:
    change = rank_change(epoch([float(n) for n in range(prompts)], [[10 * n, 10 * n] for n in range(prompts)]))
    assert change is not None
    assert (change.accurate, change.responses) == (1.0, 2 * prompts)


def test_equal_lengths_never_move_up() -> None:
    change = rank_change(epoch([1.0, 2.0, 3.0, 4.0], [[512] * 4] * 4), groups=4)
    assert change is not None and change.accurate == 1.0


def test_two_groups_by_hand() -> None:
    """Predicted: the first two prompts are the short group. Their longest response is the longest of all."""
    lengths = [[10, 11, 12, 90], [13, 14, 15, 16], [20, 21, 22, 23], [9, 24, 25, 26]]
    change = rank_change(epoch([10.0, 11.0, 20.0, 21.0], lengths), groups=2)
    assert change is not None
    # Short: 9 to 16 (8 responses), long: 20 to 90. One moved up (90, in the last tenth of its group, beyond 1.1 x 11).
    assert change.accurate == 15 / 16
    assert (change.not_last, change.within_reach, change.migrated) == (0, 0, 1 / 16)
    assert change.near_boundary == 0


def test_what_moves_just_over_the_boundary_is_near_it() -> None:
    lengths = [[10, 11, 12, 20], [13, 14, 15, 19], [9, 21, 22, 23], [16, 24, 25, 26]]
    change = rank_change(epoch([10.0, 18.5, 20.0, 21.0], lengths), groups=2)
    assert change is not None
    # Real long group: 19 to 26. 19 and 20 moved up by one group into its shorter half; 20 is the last of its group's
    # ten per cent, and within 1.1 x 18.5.
    assert (change.accurate, change.near_boundary) == (14 / 16, 2 / 16)
    assert (change.not_last, change.within_reach, change.migrated) == (1 / 16, 1 / 16, 0)


def test_nothing_known_is_nothing_to_say() -> None:
    assert rank_change(epoch([], [])) is None
    assert rank_correlation(epoch([], [])) is None
    assert rank_correlation(epoch([3.0, 3.0], [[1], [2]])) is None


prompts = st.lists(
    st.tuples(st.integers(0, 50), st.lists(st.integers(0, 60), min_size=1, max_size=5)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(prompts, st.sampled_from([1, 2, 8, 16]))
def test_the_four_rows_are_everything(known: list[tuple[int, list[int]]], groups: int) -> None:
    change = rank_change(epoch([float(before) for before, _ in known], [lengths for _, lengths in known]), groups)
    assert change is not None
    rows = (change.accurate, change.not_last, change.within_reach, change.migrated)
    assert sum(rows) == pytest.approx(1) and min(rows) >= 0
    assert 0 <= change.near_boundary <= 1 - change.accurate + 1e-9


@settings(deadline=None)
@given(prompts)
def test_the_correlation_is_spearman_s(known: list[tuple[int, list[int]]]) -> None:
    before, after = [float(b) for b, _ in known], [float(np.median(lengths)) for _, lengths in known]
    found = rank_correlation(epoch(before, [lengths for _, lengths in known]))
    if len(set(before)) < 2 or len(set(after)) < 2:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(before, after).statistic)


def test_workers_put_their_prompts_together() -> None:
    whole = together([epoch([1.0], [[2, 3]]), epoch([], []), epoch([4.0], [[5]])])
    assert (whole.before.tolist(), whole.counts.tolist(), whole.lengths.tolist()) == ([1.0, 4.0], [2, 1], [2, 3, 5])
