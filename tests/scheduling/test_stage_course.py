"""The rest of a stage, against the plain form: one scenario and one engine after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling.remaining_lengths import UnfinishedSamples, by_history
from rhyme_openrlhf.scheduling.stage_course import Course, Layout, spread
from tests.examples import examples
from tests.scheduling.plain_tp_switch import clock, clocks, stage_so_far

MOST = 16384
LAYOUT = Layout(2, 4, lambda running, context, drafts: 0.0154 + 2.9e-4 * running + 9e-8 * context)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 120), st.integers(0, 1000))
def test_samples_end_when_each_engines_own_clock_says(seed: int, count: int, done: int) -> None:
    samples, engines = stage_so_far(seed, count, done)
    assume(samples)
    contexts, scenarios = [sample.context for sample in samples], by_history(UnfinishedSamples.of(samples), MOST)
    ends = []
    for rest in scenarios.tolist():
        of_engines = clocks(LAYOUT, contexts, rest, engines)
        ends.append(sorted(np.interp(one, *of_engines[at]) for one, at in zip(rest, engines, strict=True)))
    course = Course(LAYOUT, np.array(contexts), scenarios, engines)
    for left, moment in course.fewer:
        assert moment == pytest.approx(np.mean([of_scenario[-left - 1] for of_scenario in ends]), rel=1e-9)
        # As one who asks for many moments at once: the same contexts and rests.
        moments, usual, means, rest = course.when([left])
        assert moments == [moment] and len(usual[0]) == left and usual[0] == sorted(usual[0])
        assert (rest[0] > 0).sum(axis=1).tolist() == [left] * len(scenarios)
        assert np.mean(usual[0]) == pytest.approx(means[0].mean(), abs=0.5)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 120), st.integers(0, 1000))
def test_evenly_spread_samples_take_as_long_as_the_plain_form_says(seed: int, count: int, done: int) -> None:
    samples, _ = stage_so_far(seed, count, done)
    assume(samples)
    contexts, scenarios = [sample.context for sample in samples], by_history(UnfinishedSamples.of(samples), MOST)
    wanted = [clock(LAYOUT, contexts, rest, LAYOUT.engines)[1][-1] for rest in scenarios.tolist()]
    assert spread(LAYOUT, np.array(contexts), scenarios) == pytest.approx(np.mean(wanted), rel=1e-9)
