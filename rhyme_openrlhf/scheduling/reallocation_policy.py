"""From what engines report to which samples go where: the threshold kept up to date, and the cooldown (RLHFSpec 6.1).

Invariants: engines of different weight versions, and those that load weights, are not evened out with each other; a
threshold that was given is used as it is, else it is the knee of the latency model, which whoever hears the engines
keeps corrected by their steps; without either nothing moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.scheduling.engine_status import EngineStatus
from rhyme_openrlhf.scheduling.reallocation import (
    Cooldown,
    EngineLoad,
    Reallocation,
    RunningSample,
    reallocate,
    speculative_knee,
)


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
        self.threshold = self._given or self._knee(taking_part)
        if not self.threshold:
            return []
        by_version = defaultdict(list)
        for status in taking_part:
            by_version[status.weight_version].append(_load(status, numbers))
        orders = [order for loads in by_version.values() for order in reallocate(loads, self.threshold)]
        movable = set(numbers.values())
        found = []
        for order in orders:
            samples = tuple(sample for sample in order.samples if sample in movable)
            if samples:
                found.append(Reallocation(order.source, order.destination, samples))
        return found

    def _knee(self, statuses: Sequence[EngineStatus]) -> int:
        samples = [sample for status in statuses for sample in status.samples]
        if self.predictor is None or not samples:
            return 0
        steps = [(status.decode, status.tokens_per_step) for status in statuses if status.decode is not None]
        decoding = sum(mean.running for mean, _ in steps)
        drafts = sum(mean.drafts for mean, _ in steps) / decoding if decoding else 0.0
        gained = sum(mean.running * tokens for mean, tokens in steps) / decoding if decoding else 1.0
        context = sum(sample.context for sample in samples) / len(samples)
        seats = max(sum(not s.waiting for s in status.samples) + status.free_seats for status in statuses)
        return self._knee_of(self.predictor.step_seconds, context, gained, drafts, max(seats, 1))


def _load(status: EngineStatus, numbers: Mapping[str, int]) -> EngineLoad:
    # A sample that cannot be moved gets a number that none has: it counts.
    running = tuple(
        RunningSample(numbers.get(sample.place, -1 - place), sample.context, sample.accepted)
        for place, sample in enumerate(status.samples)
    )
    return EngineLoad(status.engine, running, status.free_tokens, status.free_seats)
