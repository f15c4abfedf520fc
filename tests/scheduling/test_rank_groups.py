"""The order of the steps; rank groups: tests/oracles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.rank_groups import ascending, engines_by_group


def test_odd_steps_ascend_and_even_ones_descend() -> None:
    assert engines_by_group(1, [1, 1, 2]) == [range(0, 1), range(1, 2), range(2, 4)]
    assert engines_by_group(2, [1, 1, 2]) == [range(3, 4), range(2, 3), range(0, 2)]
    assert ascending(3) and not ascending(4)


@given(st.integers(1, 30), st.floats(0, 100), st.floats(0, 10))
def test_linear_times_complement_each_other_exactly(engines: int, first: float, gradient: float) -> None:
    """One engine a rank group, finishing times linear: over two steps all engines are busy equally long."""
    busy = [0.0] * engines
    for step in (1, 2):
        for group, places in enumerate(engines_by_group(step, [1] * engines)):
            busy[places[0]] += first + group * gradient
    assert max(busy) == pytest.approx(min(busy))
