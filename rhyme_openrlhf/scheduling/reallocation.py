"""Reallocation: samples move from engines that run many to engines that run few (RLHFSpec 6.1, equation 6).

Throughput over the number of running samples rises and then stays level. Its knee is the threshold: an engine above it
gives samples away at little cost, one below it gains by each. Sources (above) and destinations (below) are paired by
the largest difference; each pair moves min(source - threshold, threshold - destination).

Invariants:
- A source keeps at least the threshold, a destination gets at most up to it.
- An engine takes part in at most one pair of a decision.
- No pairing moves more samples in all, if all destinations have room.
- A destination's free KV cache and seats hold what it gets.
- Engines exchange samples only with engines of the same weight version. Engines that load weights take no part.
- A given threshold is used as it is. Otherwise it is the knee of the latency model, corrected by the engines' decode
  steps. Without either nothing moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rhyme_openrlhf.latency.predictor import Predictor, SecondsOfMany
from rhyme_openrlhf.scheduling.engine_status import EngineStatus, reported_speculation

# A sample that adds less than this part of what the first one brought is beyond the knee. On an ideal roofline (a
# slope, then level) any part between 0 and 1 gives the corner; a half is farthest from both.
LEVEL = 0.5


# Prompt and response tokens so far; draft tokens accepted per step, in the mean; and which sample it is. Plain, since
# a decision has thousands, and in this order, since so they are given away.
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


def knee(throughput: Callable[[int], float], most: int) -> int:
    """Return the number of samples, 1 to `most`, from which one more brings less than LEVEL of what the first brought.

    `throughput(n)`: tokens a second with n samples. Measured throughput is a staircase; what counts is the smallest
    concave curve above it, so an edge where nothing is won for one sample is not taken for the knee.
    """
    # The corners of that curve, and the slope from each to the next.
    corners, slopes = [(0, 0.0)], list[float]()
    for count in range(1, most + 1):
        value = throughput(count)
        before, known = corners[-1]
        slope = (value - known) / (count - before)
        while slopes and slopes[-1] <= slope:
            slopes.pop()
            corners.pop()
            before, known = corners[-1]
            slope = (value - known) / (count - before)
        corners.append((count, value))
        slopes.append(slope)
    return next(
        (corners[at][0] for at in range(1, len(slopes)) if slopes[at] < LEVEL * slopes[0]),
        corners[-1][0],
    )


def speculative_knee(
    seconds_of: SecondsOfMany, context: float, tokens_per_step: float, drafts: float, most: int
) -> int:
    """Return the knee if each sample has `context` tokens, verifies `drafts` and gains `tokens_per_step` tokens a step.

    `seconds_of`: of steps, in all (`Predictor.seconds_of`).
    """
    counts = np.arange(1, most + 1)
    contexts = np.rint(counts * context).astype(np.int64)[None]
    seconds = seconds_of(counts, contexts, np.rint(counts * drafts).astype(np.int64))[0]
    throughput = [0.0, *(counts * tokens_per_step / seconds).tolist()]
    return knee(throughput.__getitem__, most)


def reallocate(loads: Sequence[EngineLoad], threshold: int) -> list[Reallocation]:
    """Return the moves to make now. Samples with shorter context, then fewer accepted tokens, leave a source first."""
    counted = [(len(e.running), e) for e in loads]
    sources = sorted((it for it in counted if it[0] > threshold), key=lambda it: (-it[0], it[1].engine))
    destinations = sorted((it for it in counted if it[0] < threshold), key=lambda it: (it[0], it[1].engine))
    found: list[Reallocation] = []
    for (most, source), (fewest, target) in zip(sources, destinations, strict=False):
        count = min(most - threshold, threshold - fewest)
        if target.free_seats is not None:
            count = min(count, target.free_seats)
        free = target.free_tokens
        moved: list[int] = []
        for context, _, sample in sorted(source.running):
            # Those behind it are no shorter.
            if len(moved) >= count or context > free:
                break
            free -= context
            moved.append(sample)
        if moved:
            found.append(Reallocation(source.engine, target.engine, tuple(moved)))
    return found


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
    """The mean decode step of all engines' samples, from which the knee follows.

    `context`: tokens of a sample; `tokens_per_step` and `drafts`: of a sample's decode step; `seats`: samples that an
    engine runs at most.
    """

    context: float
    tokens_per_step: float
    drafts: float
    seats: int


class ReallocationPolicy:
    """The policy of one run. `threshold`: samples, 0 for the knee; `cooldown`: decode steps between two decisions.

    `knee_of`: `reallocation.speculative_knee`, or that with its answers kept, where step times are never corrected.
    """

    def __init__(self, threshold: int, cooldown: int, knee_of: Callable[..., int] = speculative_knee) -> None:
        self._knee_of = knee_of
        self._given = threshold
        self._cooldown = Cooldown(cooldown)
        self._steps = 0
        self.predictor: Predictor | None = None
        self.threshold = threshold
        """The threshold of the last decision, 0 before there is one."""

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
        """Return the moves between engines of the same weights, each a list of loads; samples below 0 cannot be moved.

        `decoding`: of all engines that take part; None: none has a sample.
        """
        self.threshold = self._given or self._knee(decoding)
        if not self.threshold:
            return []
        orders = [order for alike in loads for order in reallocate(alike, self.threshold)]
        found = []
        for order in orders:
            samples = tuple(sample for sample in order.samples if sample >= 0)
            if samples:
                found.append(Reallocation(order.source, order.destination, samples))
        return found

    def _knee(self, decoding: Decoding | None) -> int:
        if self.predictor is None or decoding is None:
            return 0
        return self._knee_of(
            self.predictor.seconds_of,
            decoding.context,
            decoding.tokens_per_step,
            decoding.drafts,
            max(decoding.seats, 1),
        )


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
