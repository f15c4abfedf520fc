"""Comparison of like with like: the same steps, without the first ones, and differences beyond noise alone."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.api.read.comparison import WARM_UP, StepSpan, common_steps, differ
from rhyme_openrlhf.api.store.models import Run


@pytest.mark.parametrize(
    ("steps", "common"),
    [
        ([24, 14], StepSpan(WARM_UP + 1, 14)),
        # One that waits in the queue takes nothing from the others.
        ([24, 0], StepSpan(WARM_UP + 1, 24)),
        # So few steps have no warm-up to leave out.
        ([24, 2 * WARM_UP - 1], StepSpan(1, 2 * WARM_UP - 1)),
        ([24, 2 * WARM_UP], StepSpan(WARM_UP + 1, 2 * WARM_UP)),
        ([0, 0], StepSpan(1, 0)),
    ],
)
def test_figures_are_of_the_steps_that_all_runs_have(steps: list[int], common: StepSpan) -> None:
    assert common_steps([Run(step=step) for step in steps]) == common


def test_a_difference_is_between_the_same_steps_and_beyond_their_noise() -> None:
    long_and_short = {3: 10.0, 4: 2.0, 5: 11.0, 6: 3.0}
    assert differ({step: 0.9 * value for step, value in long_and_short.items()}, long_and_short)
    assert not differ({3: 10.5, 4: 1.6, 5: 10.8, 6: 3.2}, long_and_short)
    # Other steps say nothing, nor does a single one, nor no difference at all.
    assert not differ({7: 1.0, 8: 1.0}, long_and_short) and not differ({3: 1.0}, long_and_short)
    assert not differ(long_and_short, long_and_short)
