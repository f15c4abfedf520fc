"""The loops of a stage's course, compiled: thousands of decisions a second on arrays too small for one call each.

What they mean is said in `stage_course.py`. Invariants: an array has a place for each group of samples, scenario, and
cut or sample, in this order; sums of seconds are added up as `np.add.reduce` adds up so many (`_total`), so that it
makes no difference which of the two does it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Numbers of running samples that are told apart: up to this many each, beyond it each an eighth fewer than the last.
_FINE = 8


@njit(cache=True)
def _total(values):  # type: ignore[no-untyped-def]
    """The sum of at most 128 values: eight partial sums, and what is left behind them."""
    count = values.size
    if count < 8:
        found = 0.0
        for value in values:
            found += value
        return found
    a, b, c, d, e, f, g, h = values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7]
    whole = count - count % 8
    for at in range(8, whole, 8):
        a += values[at]
        b += values[at + 1]
        c += values[at + 2]
        d += values[at + 3]
        e += values[at + 4]
        f += values[at + 5]
        g += values[at + 6]
        h += values[at + 7]
    found = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for at in range(whole, count):
        found += values[at]
    return found


@njit(cache=True)
def by_engine(contexts, remaining, engine, engines):  # type: ignore[no-untyped-def]
    """The samples of each engine: tokens still to come, the last ones of a row behind zeros; the mean of their
    contexts, with an axis for scenarios; and how many they are. `engine`: of each sample, from 0."""
    sizes = np.zeros(engines, dtype=np.int64)
    sums = np.zeros(engines, dtype=np.int64)
    for sample in range(engine.size):
        sizes[engine[sample]] += 1
        sums[engine[sample]] += contexts[sample]
    most = sizes.max()
    rest = np.zeros((engines, remaining.shape[0], most), dtype=np.int64)
    at = most - sizes
    for sample in range(engine.size):
        on = engine[sample]
        for scenario in range(remaining.shape[0]):
            rest[on, scenario, at[on]] = remaining[scenario, sample]
        at[on] += 1
    means = np.empty((engines, 1))
    for on in range(engines):
        means[on, 0] = sums[on] / sizes[on]
    return rest, means, sizes


@njit(cache=True)
def classes(samples):  # type: ignore[no-untyped-def]
    """Numbers of running samples that are told apart, from `samples` down to 1."""
    count, left = 1, samples
    while left > 1:
        count, left = count + 1, left - max(1, left // _FINE)
    found = np.empty(count, dtype=np.int64)
    found[0] = samples
    for at in range(1, count):
        found[at] = found[at - 1] - max(1, found[at - 1] // _FINE)
    return found


@njit(cache=True)
def cut(ordered, sizes, engines, contexts, drafts_per_step):  # type: ignore[no-untyped-def]
    """Tokens at the end of each cut; tokens of each cut; how many samples run on the fullest engine in it, one group
    behind the other; with one row a scenario and one column a group's cut, the tokens of context in its middle; the
    draft tokens of its steps; and how many cuts each group has. `ordered`: tokens still to come, ascending; `sizes`:
    samples of each group, spread over `engines`; `contexts`: the mean of a group's, for each scenario or for all."""
    groups, scenarios, most = ordered.shape
    counts = np.empty(groups, dtype=np.int64)
    for group in range(groups):
        counts[group] = classes(sizes[group]).size
    cuts, columns = counts.max(), counts.sum()
    ends = np.empty((groups, scenarios, cuts), dtype=np.int64)
    tokens = np.zeros((groups, scenarios, cuts), dtype=np.int64)
    running = np.empty(columns, dtype=np.int64)
    middles = np.empty((scenarios, columns), dtype=np.int64)
    drafts = np.empty(columns, dtype=np.int64)
    begin = 0
    for group in range(groups):
        count = counts[group]
        lefts = classes(sizes[group])
        for at in range(count):
            running[begin + at] = -(-lefts[at] // engines)
            drafts[begin + at] = np.int64(np.rint(running[begin + at] * drafts_per_step))
        for scenario in range(scenarios):
            context = contexts[group, scenario if contexts.shape[1] > 1 else 0]
            before = 0
            for at in range(count):
                # But for those that end after the cut.
                end = ordered[group, scenario, most - 1 - (lefts[at + 1] if at + 1 < count else 0)]
                ends[group, scenario, at] = end
                tokens[group, scenario, at] = end - before
                middle = (context + end - (end - before) / 2) * running[begin + at]
                middles[scenario, begin + at] = np.int64(np.rint(middle))
                before = end
            ends[group, scenario, count:] = before
        begin += count
    return ends, tokens, running, middles, drafts, counts


@njit(cache=True)
def mean_seconds(tokens, steps, tokens_per_step, counts):  # type: ignore[no-untyped-def]
    """Seconds of each group, the mean of the scenarios. `steps`: of a step in each cut, as `middles` of
    `cut`; `counts`: cuts that a group has."""
    groups, scenarios, cuts = tokens.shape
    found = np.empty(groups)
    each = np.empty(cuts)
    of_scenario = np.empty(scenarios)
    begin = 0
    for group in range(groups):
        count = counts[group]
        for scenario in range(scenarios):
            for at in range(count):
                each[at] = tokens[group, scenario, at] / tokens_per_step * steps[scenario, begin + at]
            of_scenario[scenario] = _total(each[:count])
        found[group] = _total(of_scenario) / scenarios
        begin += count
    return found


@njit(cache=True)
def clocks(ends, tokens, steps, tokens_per_step, counts):  # type: ignore[no-untyped-def]
    """How many tokens each of a group's samples has by when: tokens and seconds from nothing on, behind the last one's
    end no more and never; and when the last sample of all groups ends, the mean of the scenarios."""
    groups, scenarios, cuts = ends.shape
    had = np.zeros((groups, scenarios, cuts + 2), dtype=np.int64)
    clock = np.zeros((groups, scenarios, cuts + 2))
    last = np.zeros(scenarios)
    begin = 0
    for group in range(groups):
        for scenario in range(scenarios):
            passed = 0.0
            for at in range(counts[group]):
                passed += tokens[group, scenario, at] / tokens_per_step * steps[scenario, begin + at]
                clock[group, scenario, at + 1] = passed
            had[group, scenario, 1 : cuts + 1] = ends[group, scenario]
            had[group, scenario, cuts + 1] = ends[group, scenario, cuts - 1]
            clock[group, scenario, counts[group] + 1 :] = np.inf
            last[scenario] = max(last[scenario], passed)
        begin += counts[group]
    return had, clock, _total(last) / scenarios


@njit(cache=True)
def moments_of_ends(had, clock, counts, engine, remaining):  # type: ignore[no-untyped-def]
    """When each sample ends in each scenario: `clock` over `had`, as np.interp has it."""
    scenarios, samples = remaining.shape
    found = np.empty((scenarios, samples))
    for scenario in range(scenarios):
        for sample in range(samples):
            on, tokens = engine[sample], remaining[scenario, sample]
            last = counts[on]
            if tokens == had[on, scenario, last]:
                found[scenario, sample] = clock[on, scenario, last]
                continue
            at = min(_up_to(had[on, scenario], tokens), last - 1)
            since, until = clock[on, scenario, at], clock[on, scenario, at + 1]
            before = had[on, scenario, at]
            wide = max(had[on, scenario, at + 1] - before, 1)
            found[scenario, sample] = (until - since) / wide * (tokens - before) + since
    return found


@njit(cache=True)
def mean_moments(ends, order, lefts):  # type: ignore[no-untyped-def]
    """When so many samples are left, the mean of the scenarios. `ends`: when samples end; `order`: which is first."""
    scenarios, samples = ends.shape
    found = np.empty(lefts.size)
    moments = np.empty(scenarios)
    for at in range(lefts.size):
        for scenario in range(scenarios):
            moments[scenario] = ends[scenario, order[scenario, samples - lefts[at] - 1]]
        found[at] = _total(moments) / scenarios
    return found


@njit(cache=True)
def when_left(had, clock, engine, contexts, remaining, order, ends, lefts):  # type: ignore[no-untyped-def]
    """Of those left in each scenario when so many are, as they end: their contexts then, behind zeros; what is then
    left of each, likewise; and the mean of those contexts."""
    scenarios, samples = remaining.shape
    there = np.zeros((lefts.size, scenarios, samples), dtype=np.int64)
    rest = np.zeros((lefts.size, scenarios, samples), dtype=np.int64)
    means = np.empty((lefts.size, scenarios))
    whole = np.empty(had.shape[0], dtype=np.int64)
    for at in range(lefts.size):
        for scenario in range(scenarios):
            moment = ends[scenario, order[scenario, samples - lefts[at] - 1]]
            for on in range(had.shape[0]):
                whole[on] = _tokens_at(had[on, scenario], clock[on, scenario], moment)
            total = 0
            for place in range(samples - lefts[at], samples):
                sample = order[scenario, place]
                tokens = min(whole[engine[sample]], remaining[scenario, sample] - 1)
                there[at, scenario, place] = contexts[sample] + tokens
                rest[at, scenario, place] = remaining[scenario, sample] - tokens
                total += contexts[sample] + tokens
            means[at, scenario] = total / lefts[at]
    return there, rest, means


@njit(cache=True)
def usual_contexts(ordered):  # type: ignore[no-untyped-def]
    """The mean over the scenarios of contexts in ascending order, whole tokens. int64[moments, samples]"""
    moments, scenarios, samples = ordered.shape
    found = np.empty((moments, samples), dtype=np.int64)
    for at in range(moments):
        for place in range(samples):
            total = 0
            for scenario in range(scenarios):
                total += ordered[at, scenario, place]
            found[at, place] = np.int64(np.rint(total / scenarios))
    return found


@njit(cache=True)
def _tokens_at(had, clock, moment):  # type: ignore[no-untyped-def]
    """Whole tokens of a sample by then, as np.interp has them."""
    at = _up_to(clock, moment)
    found = (had[at + 1] - had[at]) / (clock[at + 1] - clock[at]) * (moment - clock[at]) + had[at]
    return np.int64(np.rint(found))


@njit(cache=True)
def _up_to(values, one):  # type: ignore[no-untyped-def]
    """The place of the last of `values` (ascending, the first not above `one`) that is not above `one`."""
    low, high = 0, values.size
    while high - low > 1:
        middle = (low + high) // 2
        if values[middle] <= one:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True)
def scenarios_of(generated, history, lengths, begins, longest_allowed, scenarios, shift):  # type: ignore[no-untyped-def]
    """Tokens still to come of each sample in each scenario (`remaining_lengths.by_history`).

    `history`: of each sample, which of the histories; `lengths`: of one history behind the other, each from its place
    in `begins` on; they are put into order.
    """
    for known in range(begins.size - 1):
        own = lengths[begins[known] : begins[known + 1]]
        for at in range(own.size):
            own[at] = min(own[at], longest_allowed)
        own.sort()
    found = np.empty((scenarios, generated.size), dtype=np.int64)
    for sample in range(generated.size):
        now = generated[sample]
        begin, end = begins[history[sample]], begins[history[sample] + 1]
        first = begin
        while first < end and lengths[first] <= now:
            first += 1
        for scenario in range(scenarios):
            quantile = ((scenario + sample * shift) % scenarios + 0.5) / scenarios
            if now >= longest_allowed:
                rest = 1
            elif first < end:
                rest = lengths[first + np.int64(quantile * (end - first))] - now
            else:
                # A Pareto law from here on, cut off at the longest: quantiles of P(L > l) = least / l.
                least = max(now, 1)
                rest = np.int64(least / (1 - quantile * (1 - least / longest_allowed)) - now)
            found[scenario, sample] = max(rest, 1)
    return found
