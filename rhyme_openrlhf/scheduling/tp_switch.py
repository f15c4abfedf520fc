"""When the unfinished samples of a node go on with more tensor parallelism (PAT 4.2, algorithm 1).

Few samples decode faster on many devices together, many on few devices each. Each time samples have finished, the time
that remains under the current layout is compared with what it would be after a switch, the switch included.

Two ways to know what remains. `by_maximum`, the paper's: everything runs to the longest response allowed; the switch is
made when it beats staying. `by_history`: the lengths that the prompts' history makes likely; then samples drop out on
the way, and to switch now is also compared with switching later, when fewer are left, because a rule that only knows
"now or never" switches as soon as it pays at all, which is too early.

How the rest of a stage is timed: decode steps until the next sample ends, as many samples as then run. After a switch
they are spread evenly over the layout's engines; in the current layout the fullest engine keeps the share of them that
it has now, and the stage waits for it.

Invariants: a switch is only ordered if its predicted total, its cost included, is smaller than staying; never to the
current layout; without samples nothing is ordered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.scheduling.group_time import StepSeconds
from rhyme_openrlhf.scheduling.remaining_lengths import Unfinished, by_history, by_maximum

# A share of a number of samples that is whole must not be rounded up.
_ROUNDING = 1e-9
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
    fullest: int = 0,
) -> Switch | None:
    """Whether to switch now, and to which layout; None: go on as it is (ask again when samples have finished).

    `fullest`: samples on the engine that has most of them; 0: they are spread evenly.
    """
    if not samples:
        return None
    share = fullest / len(samples)
    if from_history:
        return _by_stopping(current, layouts, samples, longest_allowed, switch_seconds, share)
    remaining = by_maximum(samples, longest_allowed)
    rests = [
        _rest(layout, samples, remaining, share if place == current else 0.0) for place, layout in enumerate(layouts)
    ]
    stay = rests[current].whole()
    contexts = [sample.context for sample in samples]
    best: Switch | None = None
    for place, rest in enumerate(rests):
        if place == current:
            continue
        total = rest.whole() + switch_seconds(current, place, contexts)
        if total < (best.seconds_switched if best else stay):
            best = Switch(place, stay, total)
    return best


def _by_stopping(
    current: int,
    layouts: Sequence[Layout],
    samples: Sequence[Unfinished],
    longest_allowed: int,
    switch_seconds: SwitchSeconds,
    share: float,
) -> Switch | None:
    remaining = by_history(samples, longest_allowed)
    here = _rest(layouts[current], samples, remaining, share)
    contexts = sorted(sample.context for sample in samples)
    best: Switch | None = None
    for place, layout in enumerate(layouts):
        if place == current:
            continue
        there = _rest(layout, samples, remaining, 0.0)
        now = there.whole() + switch_seconds(current, place, contexts)
        if now >= here.whole():
            continue
        # Switching when `left` samples are left: those that ran longest so far stand for them.
        later = min(
            (
                here.until(cut) + switch_seconds(current, place, contexts[-left:]) + there.after(cut)
                for cut, left in enumerate(here.left[1:], start=1)
            ),
            default=float("inf"),
        )
        if now <= later and (best is None or now < best.seconds_switched):
            best = Switch(place, here.whole(), now)
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

    def until(self, cut: int) -> float:
        return float(self.seconds[:cut].sum())

    def after(self, cut: int) -> float:
        return float(self.seconds[cut:].sum())


def _classes(samples: int) -> tuple[int, ...]:
    """Numbers of running samples at which the rest is cut, from `samples` down to 1."""
    found = [samples]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // _FINE))
    return tuple(found)


def _rest(layout: Layout, samples: Sequence[Unfinished], remaining: NDArray[np.int64], share: float) -> _Rest:
    """`share`: of the running samples, on the layout's fullest engine; evenly spread if that is more."""
    left = _classes(len(samples))
    # Tokens after which the sample ends that brings the number down to each class; the last one's end is the stage's.
    ordered = np.sort(remaining, axis=1)
    ends = ordered[:, [len(samples) - count - 1 for count in left[1:]] + [len(samples) - 1]]
    begins = np.concatenate([np.zeros((len(ordered), 1), dtype=ends.dtype), ends[:, :-1]], axis=1)
    mean_context = sum(sample.context for sample in samples) / len(samples)
    seconds = np.empty(ends.shape)
    for scenario in range(len(ends)):
        for cut, count in enumerate(left):
            tokens = float(ends[scenario, cut] - begins[scenario, cut])
            running = max(-(-count // layout.engines), min(count, math.ceil(share * count - _ROUNDING)))
            context = running * (mean_context + float(begins[scenario, cut]) + tokens / 2)
            each = layout.step_seconds(running, round(context), round(running * layout.drafts_per_step))
            seconds[scenario, cut] = tokens / layout.tokens_per_step * each
    return _Rest(left, seconds.mean(axis=0))
