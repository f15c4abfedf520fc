"""From what engines report to which samples go where: the threshold kept up to date, and the cooldown (RLHFSpec 6.1).

Invariants: engines of different weight versions, and those that load weights, are not evened out with each other; a
threshold that was given is used as it is, else it is the knee of the latency model, which whoever hears the engines
keeps corrected by their steps; without either nothing moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.scheduling.engine_status import EngineStatus, reported_speculation
from rhyme_openrlhf.scheduling.reallocation import (
    Cooldown,
    EngineLoad,
    Reallocation,
    reallocate,
    speculative_knee,
)


@dataclass(frozen=True)
class Decoding:
    """How samples of all engines decode, in the mean, for the knee.

    `context`: tokens of a sample; `tokens_per_step` and `drafts`: of a sample's decode step; `seats`: samples that an
    engine runs at most.
    """

    context: float
    tokens_per_step: float
    drafts: float
    seats: int


class ReallocationPolicy:
    """That of one run. `threshold`: samples, 0 for the knee; `cooldown`: decode steps between two decisions.

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
        """What to move now, if anything.

        `numbers`: the samples that can be moved, by their place at an engine; others only count as load.
        """
        taking_part = [status for status in statuses if status.open]
        steps = max((status.decode_steps for status in statuses), default=0)
        if not self.due([len(status.samples) for status in taking_part], steps):
            return []
        return self.orders(taking_part, numbers)

    def due(self, counts: Sequence[int], steps: int) -> bool:
        """Whether to decide now; begins the cooldown if so.

        `counts`: samples of each engine that takes part; `steps`: decode steps of the engine that made most.
        """
        self._steps = max(self._steps, steps)
        return bool(counts) and max(counts) - min(counts) >= 2 and self._cooldown.due(self._steps)

    def orders(self, taking_part: Sequence[EngineStatus], numbers: Mapping[str, int]) -> list[Reallocation]:
        """What to move, once a decision is due; arguments as `decide`, of engines that take part."""
        by_version = defaultdict(list)
        for status in taking_part:
            by_version[status.weight_version].append(_load(status, numbers))
        return self.moves(list(by_version.values()), _decoding(taking_part))

    def moves(self, loads: Sequence[Sequence[EngineLoad]], decoding: Decoding | None) -> list[Reallocation]:
        """What to move between engines of the same weights, each a list of loads; samples below 0 cannot be moved.

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
