"""When the unfinished samples of a node go on with more tensor parallelism (PAT 4.2, algorithm 1).

Few samples decode faster on many devices together, many on few devices each. Each time samples have finished, the time
that remains under the current layout is compared with what it would be after a switch, the switch included.

Two ways to know what remains. `by_maximum`, the paper's: everything runs to the longest response allowed; the switch is
made when it beats staying. `by_history`: the lengths that the prompts' history makes likely; then samples drop out on
the way, and to switch now is also compared with switching later, when fewer are left, because a rule that only knows
"now or never" switches as soon as it pays at all, which is too early.

How the rest of a stage is timed: decode steps until the next sample ends, as many samples as then run. In the current
layout each engine goes on by itself with the samples it has, and the stage waits for the last one; after a switch they
are spread evenly over the layout's engines.

Invariants: a switch is only ordered if its predicted total, its cost included, is smaller than staying; never to the
current layout; without samples nothing is ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.scheduling.group_time import StepSeconds
from rhyme_openrlhf.scheduling.remaining_lengths import Unfinished, by_history, by_maximum

# Numbers of remaining samples that are told apart: up to this many each, beyond it each an eighth fewer than the last.
_FINE = 8


@dataclass(frozen=True)
class Layout:
    """A way to divide a node: `engines` of `tensor_parallel_size` devices each, and their decode step's seconds.

    `tokens_per_step` and `drafts_per_step`: of a sample, with the speculation of now.
    """

    tensor_parallel_size: int
    engines: int
    step_seconds: StepSeconds
    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0


@dataclass(frozen=True)
class Switch:
    """The order to go on in `layouts[target]`, with what was predicted for the rest of the stage, in seconds."""

    target: int
    seconds_stay: float
    seconds_switched: float


# Seconds to switch from one layout to another with samples of these contexts: (from, to, contexts), layouts by place.
SwitchSeconds = Callable[[int, int, Sequence[int]], float]


def decide(
    current: int,
    layouts: Sequence[Layout],
    samples: Sequence[Unfinished],
    longest_allowed: int,
    switch_seconds: SwitchSeconds,
    from_history: bool = True,
    engines: Sequence[int] | None = None,
) -> Switch | None:
    """Whether to switch now, and to which layout; None: go on as it is (ask again when samples have finished).

    `engines`: which engine of the current layout each sample is on, by any number; None: they are spread evenly.
    """
    if not samples:
        return None
    if engines is None:
        engines = [place % layouts[current].engines for place in range(len(samples))]
    if from_history:
        return _by_stopping(current, layouts, samples, longest_allowed, switch_seconds, engines)
    remaining = by_maximum(samples, longest_allowed)
    stay = float(_ends(layouts[current], samples, remaining, engines)[:, -1].mean())
    contexts = [sample.context for sample in samples]
    best: Switch | None = None
    for place, layout in enumerate(layouts):
        if place == current:
            continue
        total = _rest(layout, samples, remaining).whole() + switch_seconds(current, place, contexts)
        if total < (best.seconds_switched if best else stay):
            best = Switch(place, stay, total)
    return best


def _by_stopping(
    current: int,
    layouts: Sequence[Layout],
    samples: Sequence[Unfinished],
    longest_allowed: int,
    switch_seconds: SwitchSeconds,
    engines: Sequence[int],
) -> Switch | None:
    remaining = by_history(samples, longest_allowed)
    ends = _ends(layouts[current], samples, remaining, engines).mean(axis=0)
    stay = float(ends[-1])
    contexts = sorted(sample.context for sample in samples)
    best: Switch | None = None
    for place, layout in enumerate(layouts):
        if place == current:
            continue
        there = _rest(layout, samples, remaining)
        now = there.whole() + switch_seconds(current, place, contexts)
        if now >= stay:
            continue
        # Switching when `left` samples are left: those that ran longest so far stand for them.
        later = min(
            (
                float(ends[-left - 1]) + switch_seconds(current, place, contexts[-left:]) + there.after(cut)
                for cut, left in enumerate(there.left[1:], start=1)
            ),
            default=float("inf"),
        )
        if now <= later and (best is None or now < best.seconds_switched):
            best = Switch(place, stay, now)
    return best


@dataclass(frozen=True)
class _Rest:
    """The rest of a stage in one layout, cut where the number of running samples falls to a next class.

    `left`: running samples at each cut's beginning, falling; `seconds`: of each cut, in the mean of the scenarios.
    """

    left: tuple[int, ...]
    seconds: NDArray[np.float64]

    def whole(self) -> float:
        return float(self.seconds.sum())

    def after(self, cut: int) -> float:
        return float(self.seconds[cut:].sum())


def _classes(samples: int) -> tuple[int, ...]:
    """Numbers of running samples at which the rest is cut, from `samples` down to 1."""
    found = [samples]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // _FINE))
    return tuple(found)


def _ends(
    layout: Layout, samples: Sequence[Unfinished], remaining: NDArray[np.int64], engines: Sequence[int]
) -> NDArray[np.float64]:
    """When samples end if nothing is switched, seconds from now, ascending in each scenario."""
    on: dict[int, list[int]] = {}
    for place, engine in enumerate(engines):
        on.setdefault(engine, []).append(place)
    found = np.empty(remaining.shape)
    for places in on.values():
        own = [samples[place] for place in places]
        left, ends, seconds = _timed(layout, own, remaining[:, places], len(own), 1)
        tokens = np.concatenate([np.zeros((len(ends), 1)), ends], axis=1)
        clock = np.concatenate([np.zeros((len(ends), 1)), seconds.cumsum(axis=1)], axis=1)
        for scenario in range(len(ends)):
            found[scenario, places] = np.interp(remaining[scenario, places], tokens[scenario], clock[scenario])
    return np.sort(found, axis=1)


def _rest(layout: Layout, samples: Sequence[Unfinished], remaining: NDArray[np.int64]) -> _Rest:
    """In a layout over whose engines the samples are spread evenly, all going on at the same pace."""
    left, _, seconds = _timed(layout, samples, remaining, len(samples), layout.engines)
    return _Rest(left, seconds.mean(axis=0))


def _timed(
    layout: Layout, samples: Sequence[Unfinished], remaining: NDArray[np.int64], count: int, engines: int
) -> tuple[tuple[int, ...], NDArray[np.int64], NDArray[np.float64]]:
    """Samples left at the beginning of each cut; and of each scenario tokens at its end, and its seconds."""
    left = _classes(count)
    # Tokens after which the sample ends that brings the number down to each class; the last one's end is the stage's.
    ordered = np.sort(remaining, axis=1)
    ends = ordered[:, [count - then - 1 for then in left[1:]] + [count - 1]]
    begins = np.concatenate([np.zeros((len(ordered), 1), dtype=ends.dtype), ends[:, :-1]], axis=1)
    mean_context = sum(sample.context for sample in samples) / count
    seconds = np.empty(ends.shape)
    for scenario in range(len(ends)):
        for cut, then in enumerate(left):
            tokens = float(ends[scenario, cut] - begins[scenario, cut])
            running = -(-then // engines)
            context = running * (mean_context + float(begins[scenario, cut]) + tokens / 2)
            each = layout.step_seconds(running, round(context), round(running * layout.drafts_per_step))
            seconds[scenario, cut] = tokens / layout.tokens_per_step * each
    return left, ends, seconds
