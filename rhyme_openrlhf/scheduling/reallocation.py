"""Reallocation: samples move from engines that run many to engines that run few (RLHFSpec 6.1).

There are two rules:
- Without a threshold, `by_throughput` decides. The fullest engine is paired with the emptiest. Each pair moves the
  samples that raise its throughput most, by the latency model, corrected by the engines' decode steps.
- With a given threshold, `by_threshold` is the paper's rule (equation 6). Engines above it are paired with engines
  below it by the largest difference. Each pair moves min(source - threshold, threshold - destination).

In simulated runs `by_throughput` is about as quick as the best of seven thresholds, and the best threshold is only
known after the run (benchmarks/reallocation_rules.py).

Invariants:
- An engine takes part in at most one pair of a decision. A source never gets fewer samples than its destination.
- By throughput: each pair gains at least `LEAST_GAIN` of its throughput.
- By threshold: a source keeps at least the threshold, a destination gets at most up to it. No pairing moves more
  samples in all, if all destinations have room.
- A destination's free KV cache and seats hold what it gets.
- A sample that cannot be moved takes no other sample's place in a move.
- Engines exchange samples only with engines of the same weight version. Engines that load weights take no part.
- Without a threshold and a latency model nothing moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rhyme_openrlhf.latency.predictor import Predictor, SecondsOfMany
from rhyme_openrlhf.scheduling.engine_status import EngineStatus, reported_speculation

# A pair must gain this part of its throughput. A move costs a sample about two decode steps, and predictions are off by
# 3 %: with 10 % instead, simulated rollouts lose up to 4 % of their speed.
LEAST_GAIN = 0.02
# The fewest samples are moved with which the pair reaches this part of the best gain: the last few add little.
ENOUGH = 0.95


Floats = NDArray[np.float64]

# Prompt and response tokens so far; draft tokens accepted per step, in the mean; and which sample it is. A number below
# 0 is of one that counts as load and cannot be moved. Plain, because a decision has thousands.
RunningSample = tuple[int, float, int]


class EngineLoad(NamedTuple):
    """An engine's reported load: its samples, free tokens of KV cache, and free seats (None: enough)."""

    engine: int
    running: Sequence[RunningSample]
    free_tokens: int
    free_seats: int | None = None


@dataclass(frozen=True)
class Reallocation:
    """Samples to move from engine `source` to engine `destination`."""

    source: int
    destination: int
    samples: tuple[int, ...]


def throughput_by_samples(
    seconds_of: SecondsOfMany, context: float, tokens_per_step: float, drafts: float, most: int
) -> Floats:
    """Return tokens a second of an engine with 0 to `most` running samples.

    Each sample has `context` tokens, verifies `drafts` and gains `tokens_per_step` tokens a step. `seconds_of`: of
    steps, in all (`Predictor.seconds_of`).
    """
    counts = np.arange(1, most + 1)
    contexts = np.rint(counts * context).astype(np.int64)[None]
    seconds = seconds_of(counts, contexts, np.rint(counts * drafts).astype(np.int64))[0]
    return np.concatenate([[0.0], counts * tokens_per_step / seconds])


def by_throughput(loads: Sequence[EngineLoad], throughput: Floats) -> list[Reallocation]:
    """Return the moves that raise throughput; `throughput`: of an engine, by running samples from 0.

    An engine with more samples than `throughput` has is as fast as with the most.
    """
    order = sorted(loads, key=lambda load: (len(load.running), load.engine))
    most = len(throughput) - 1
    found = []
    for target, source in zip(order[: len(order) // 2], reversed(order), strict=False):
        few, many = len(target.running), len(source.running)
        counts = np.arange((many - few) // 2 + 1)
        gains = throughput[np.minimum(many - counts, most)] + throughput[np.minimum(few + counts, most)]
        count = int(np.argmax(gains >= gains[0] + ENOUGH * (gains.max() - gains[0])))
        if gains[count] >= (1 + LEAST_GAIN) * gains[0]:
            found.extend(_moves(source, target, count))
    return found


def by_threshold(loads: Sequence[EngineLoad], threshold: int) -> list[Reallocation]:
    """Return the moves of equation 6 with this threshold."""
    counted = [(len(e.running), e) for e in loads]
    sources = sorted((it for it in counted if it[0] > threshold), key=lambda it: (-it[0], it[1].engine))
    destinations = sorted((it for it in counted if it[0] < threshold), key=lambda it: (it[0], it[1].engine))
    found: list[Reallocation] = []
    for (most, source), (fewest, target) in zip(sources, destinations, strict=False):
        found.extend(_moves(source, target, min(most - threshold, threshold - fewest)))
    return found


def leaving_order(sample: RunningSample) -> tuple[float, ...]:
    """Return the key of the order in which samples leave a source: short ones first, then rarely accepted ones.

    RLHFSpec weighs both. In simulated runs the weight gains nothing (docs/differences.md).
    """
    return sample


def _moves(source: EngineLoad, target: EngineLoad, count: int) -> list[Reallocation]:
    """Return the move of at most `count` samples for which the target has room; empty if there are none."""
    if target.free_seats is not None:
        count = min(count, target.free_seats)
    free = target.free_tokens
    moved: list[int] = []
    movable = (sample for sample in source.running if sample[2] >= 0)
    for context, _, sample in sorted(movable, key=leaving_order):
        # Those behind it are no shorter.
        if len(moved) >= count or context > free:
            break
        free -= context
        moved.append(sample)
    return [Reallocation(source.engine, target.engine, tuple(moved))] if moved else []


class Cooldown:
    """Lets a decision pass every `steps` decode steps (RLHFSpec 6.1), counted from the last one."""

    def __init__(self, steps: int) -> None:
        """Raises ValueError for less than one step."""
        if steps < 1:
            raise ValueError(f"a cooldown is at least one step, got {steps}")
        self._steps = steps
        self._last: int | None = None

    def due(self, step: int) -> bool:
        """Return whether to decide at this decode step (counted over the run, never falling), and note it if so."""
        if self._last is not None and step - self._last < self._steps:
            return False
        self._last = step
        return True


@dataclass(frozen=True)
class Decoding:
    """The mean decode step of all engines' samples, from which throughput follows.

    `context`: tokens of a sample; `tokens_per_step` and `drafts`: of a sample's decode step; `seats`: samples that an
    engine runs at most.
    """

    context: float
    tokens_per_step: float
    drafts: float
    seats: int


class ReallocationPolicy:
    """The policy of one run. `threshold`: samples, 0 to decide by throughput; `cooldown`: decode steps between two
    decisions.

    `curve_of`: `throughput_by_samples`, or that with its answers kept, where step times are never corrected.
    """

    def __init__(self, threshold: int, cooldown: int, curve_of: Callable[..., Floats] = throughput_by_samples) -> None:
        self._curve_of = curve_of
        self._threshold = threshold
        self._cooldown = Cooldown(cooldown)
        self._steps = 0
        self.predictor: Predictor | None = None

    def decide(self, statuses: Sequence[EngineStatus], numbers: Mapping[str, int]) -> list[Reallocation]:
        """Return the moves to make now, if any.

        `numbers`: the samples that can be moved, by their place at an engine; others only count as load.
        """
        taking_part = [status for status in statuses if status.open]
        steps = max((status.decode_steps for status in statuses), default=0)
        if not self.due([len(status.samples) for status in taking_part], steps):
            return []
        return self.orders(taking_part, numbers)

    def due(self, counts: Sequence[int], steps: int) -> bool:
        """Return whether to decide now, and begin the cooldown if so.

        `counts`: samples of each engine that takes part; `steps`: decode steps of the engine that made most.
        """
        self._steps = max(self._steps, steps)
        return bool(counts) and max(counts) - min(counts) >= 2 and self._cooldown.due(self._steps)

    def orders(self, taking_part: Sequence[EngineStatus], numbers: Mapping[str, int]) -> list[Reallocation]:
        """Return the moves of a decision that is due; arguments as `decide`, of engines that take part."""
        by_version = defaultdict(list)
        for status in taking_part:
            by_version[status.weight_version].append(_load(status, numbers))
        return self.moves(list(by_version.values()), _decoding(taking_part))

    def moves(self, loads: Sequence[Sequence[EngineLoad]], decoding: Decoding | None) -> list[Reallocation]:
        """Return the moves between engines of the same weights, each a list of loads.

        `decoding`: of all engines that take part; None: none has a sample.
        """
        return [order for alike in loads for order in self._orders(alike, decoding)]

    def _orders(self, alike: Sequence[EngineLoad], decoding: Decoding | None) -> list[Reallocation]:
        if self._threshold:
            return by_threshold(alike, self._threshold)
        if self.predictor is None or decoding is None:
            return []
        seats = max(decoding.seats, 1)
        curve = self._curve_of(
            self.predictor.seconds_of, decoding.context, decoding.tokens_per_step, decoding.drafts, seats
        )
        return by_throughput(alike, curve)


def _decoding(statuses: Sequence[EngineStatus]) -> Decoding | None:
    samples = [sample for status in statuses for sample in status.samples]
    if not samples:
        return None
    gained, drafts = reported_speculation(statuses)
    context = sum(sample.context for sample in samples) / len(samples)
    seats = max(sum(not s.waiting for s in status.samples) + status.free_seats for status in statuses)
    return Decoding(context, gained, drafts, seats)


def _load(status: EngineStatus, numbers: Mapping[str, int]) -> EngineLoad:
    # A sample that cannot be moved gets a number that none has: it counts.
    running = tuple(
        (sample.context, sample.accepted, numbers.get(sample.place, -1 - place))
        for place, sample in enumerate(status.samples)
    )
    return EngineLoad(status.engine, running, status.free_tokens, status.free_seats)
