"""Sums of the compiled form against numpy's, to the last bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.scheduling import stage_kernels


@settings(deadline=None)
@given(st.integers(0, 128), st.integers(0, 2**32))
def test_a_total_is_numpys(count: int, seed: int) -> None:
    values = np.random.default_rng(seed).lognormal(0, 3, count)
    assert stage_kernels._total(values) == float(np.add.reduce(values))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32))
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
    assert stage_kernels.mean_seconds(tokens, steps, 1.7, counts).tolist() == wanted


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
    ends = stage_kernels.moments_of_ends(had, clock, np.array([1]), engine, remaining)
    assert ends.tolist() == remaining.tolist()
    order, ended = np.argsort(ends, axis=1), np.sort(ends, axis=1)
    lefts = np.array([samples - 1, 1])
    there, rest, means = stage_kernels.when_left(had, clock, engine, contexts, remaining, order, ends, lefts)
    for at, left in enumerate(lefts.tolist()):
        for scenario in range(scenarios):
            passed = int(ended[scenario, -left - 1])
            going_on = order[scenario, -left:]
            whole = np.minimum(passed, remaining[scenario, going_on] - 1)
            assert there[at, scenario, -left:].tolist() == (contexts[going_on] + whole).tolist()
            assert rest[at, scenario, -left:].tolist() == (remaining[scenario, going_on] - whole).tolist()
            assert means[at, scenario] == there[at, scenario].sum() / left
            assert not there[at, scenario, :-left].any() and not rest[at, scenario, :-left].any()
