"""The rest of a stage, and its compiled core, against the plain form."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.drafting_core import stages
from rhyme_openrlhf.scheduling.stage_course import Course, Layout, UnfinishedSamples, by_history, spread
from tests.examples import examples
from tests.scheduling.plain_tp_switch import clock, clocks, stage_so_far


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 128), st.integers(0, 2**32))
def test_mean_seconds_are_those_of_whole_arrays(groups: int, scenarios: int, cuts: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 5000, (groups, scenarios, cuts))
    steps = draw.random((scenarios, groups * cuts))
    counts = draw.integers(1, cuts + 1, groups)
    each = tokens / 1.7 * steps.reshape(scenarios, groups, cuts).transpose(1, 0, 2)
    wanted = [
        float(np.add.reduce(np.add.reduce(of_group[:, :count], axis=1))) / scenarios
        for of_group, count in zip(each, counts, strict=True)
    ]
    # Only cuts that a group has are a column.
    steps = steps[:, (np.arange(cuts) < counts[:, None]).ravel()]
    assert stages.mean_seconds(tokens, steps, 1.7, counts).tolist() == wanted


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(1, 9), st.integers(0, 2**32))
def test_what_is_left_is_the_last_to_end(samples: int, scenarios: int, seed: int) -> None:
    """One engine that makes a token a second for each of its samples."""
    draw = np.random.default_rng(seed)
    contexts = draw.integers(1, 500, samples)
    remaining = draw.integers(1, 3000, (scenarios, samples))
    engine, longest = np.zeros(samples, dtype=np.int64), int(remaining.max())
    had = np.tile([0, longest, longest], (1, scenarios, 1))
    clock = np.tile([0.0, longest, np.inf], (1, scenarios, 1))
    ends = stages.moments_of_ends(had, clock, np.array([1]), engine, remaining)
    assert ends.tolist() == remaining.tolist()
    order, ended = np.argsort(ends, axis=1), np.sort(ends, axis=1)
    lefts = np.array([samples - 1, 1])
    usual, rest, means = stages.when_left(had, clock, engine, contexts, remaining, order, ends, lefts)
    for at, left in enumerate(lefts.tolist()):
        there = []
        for scenario in range(scenarios):
            passed = int(ended[scenario, -left - 1])
            going_on = order[scenario, -left:]
            whole = np.minimum(passed, remaining[scenario, going_on] - 1)
            there.append(np.sort(contexts[going_on] + whole))
            assert rest[at, scenario, -left:].tolist() == (remaining[scenario, going_on] - whole).tolist()
            assert means[at, scenario] == there[-1].sum() / left
            assert not rest[at, scenario, :-left].any()
        assert usual[at] == np.rint(np.mean(there, axis=0)).tolist()


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    """They would be read past their ends."""
    one, three = np.ones(1, dtype=np.int64), np.ones(3, dtype=np.int64)
    grid, cube, clock = np.ones((1, 3), dtype=np.int64), np.ones((1, 1, 3), dtype=np.int64), np.ones((1, 1, 3))
    far = np.full(3, 5)
    asked = [
        lambda: stages.by_engine(three, grid, far, 2),
        lambda: stages.by_engine(three, grid, np.zeros(2, dtype=np.int64), 2),
        lambda: stages.by_engine(three, grid, np.zeros(3, dtype=np.int64), 2),
        lambda: stages.cut(cube, np.array([4]), 1, np.ones((1, 1)), 0.0),
        lambda: stages.cut(cube, one, 0, np.ones((1, 1)), 0.0),
        lambda: stages.mean_seconds(cube, np.ones((1, 2)), 1.0, np.array([3])),
        lambda: stages.mean_seconds(cube, np.ones((1, 4)), 1.0, np.array([4])),
        lambda: stages.clocks(cube, cube[:, :, :2], np.ones((1, 2)), 1.0, np.array([2])),
        lambda: stages.moments_of_ends(cube, clock, np.array([3]), three - 1, grid),
        lambda: stages.moments_of_ends(cube, clock, one, far, grid),
        lambda: stages.mean_moments(np.ones((1, 3)), grid + 2, one),
        lambda: stages.mean_moments(np.ones((1, 3)), grid, np.array([3])),
        lambda: stages.when_left(cube, clock, three - 1, one, grid, grid, np.ones((1, 3)), one),
        lambda: stages.scenarios_of(three, far, three, np.array([0, 3]), 9, 8, 3),
        lambda: stages.scenarios_of(three, three - 1, three, np.array([0, 4, 3]), 9, 8, 3),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match="do not fit together"):
            ask()


@pytest.mark.usefixtures("starts_python")
def test_without_a_compiler_a_tp_switch_is_refused_and_other_simulations_run() -> None:
    program = (
        "import sys\n"
        "sys.modules['rhyme_openrlhf._stage'] = sys.modules['rhyme_openrlhf._drafting'] = None\n"
        "from rhyme_openrlhf.drafting_core import CoreMissing\n"
        "from rhyme_openrlhf.simulation import engine_kinds\n"
        "from rhyme_openrlhf.simulation.workload import PRESETS\n"
        "from rhyme_openrlhf.simulation.run import Run\n"
        "from rhyme_openrlhf.simulation.settings import Cluster, Features\n"
        "from rhyme_openrlhf.simulation.workload import drawn\n"
        "load = drawn(PRESETS['rhymerl-math'], 2, 8, 8, 1, seed=1)\n"
        "cluster, profiles = Cluster(1, 8, 2), engine_kinds.load(['pat-a40'])\n"
        "features = Features(reallocation=True, speculation='window')\n"
        "assert Run(load, cluster, features, profiles).go().seconds > 0\n"
        "try: Run(load, cluster, Features(switching='history'), profiles).go()\n"
        "except CoreMissing as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert sentence.startswith("decisions on TP switches need the compiled core")
    assert "install a C++20 compiler (Debian: apt-get install g++) and run pip install again" in sentence


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
