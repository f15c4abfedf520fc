"""Is a run faster than another one with other options? Compared step by step, from both records. Pure.

Invariants:
- Only steps count that both runs have finished, without the first WARM_UP ones, in which engines and kernels warm up.
- A gain is a geometric mean over these steps. It is a difference only beyond the noise of the steps, and a figure only
  where this noise is below a factor of WIDEST_RESULT.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.telemetry.event_log import Recorded
from rhyme_openrlhf.telemetry.events import REWARD_METRIC, ROLLOUT_PART, RolloutFinished, TrainStep
from rhyme_openrlhf.telemetry.metrics import ERRORS, WARM_UP, WIDEST_RESULT

# A gain needs noise, and two steps have hardly any.
FEWEST = 3


@dataclass(frozen=True)
class Step:
    """A step that a run has finished: seconds of the rollout and of all parts, response tokens, mean reward."""

    epoch: int
    rollout_seconds: float
    seconds: float
    tokens: int
    reward: float | None

    @property
    def rollout_speed(self) -> float:
        """Return response tokens per second of the rollout."""
        return self.tokens / self.rollout_seconds

    @property
    def speed(self) -> float:
        """Return response tokens per second of the whole step."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Gain:
    """The speed of the second run by that of the first, over `steps` steps; `low` to `high` is a 95 % interval."""

    ratio: float
    low: float
    high: float
    steps: int

    @property
    def differs(self) -> bool:
        """Return whether there is a difference, beyond the noise of the steps."""
        return not self.low <= 1 <= self.high

    @property
    def is_exact(self) -> bool:
        """Return whether `ratio` says more than that there is a difference or none."""
        return self.high <= WIDEST_RESULT * self.low


def steps_of(records: Iterable[Recorded]) -> dict[int, Step]:
    """Return the steps that a run has finished. Of a step that was done again after a resume, the last time counts."""
    rollouts: dict[int, RolloutFinished] = {}
    found: dict[int, Step] = {}
    for recorded in records:
        event = recorded.event
        if isinstance(event, RolloutFinished):
            rollouts[event.step] = event
        elif isinstance(event, TrainStep) and (rollout := rollouts.get(event.step)) is not None:
            others = sum(seconds for part, seconds in event.seconds_by_part.items() if part != ROLLOUT_PART)
            if rollout.seconds <= 0 or not rollout.response_tokens:
                continue
            reward = event.metrics.get(REWARD_METRIC) if rollout.reward_mean is None else rollout.reward_mean
            found[event.step] = Step(
                event.epoch, rollout.seconds, rollout.seconds + others, rollout.response_tokens, reward
            )
    return found


def common(first: Mapping[int, Step], second: Mapping[int, Step]) -> list[tuple[Step, Step]]:
    """Return the steps that count, of the first and of the second run."""
    return [(first[step], second[step]) for step in sorted(first.keys() & second.keys()) if step > WARM_UP]


def gain(ratios: Sequence[float]) -> Gain | None:
    """Return the mean of the steps' ratios; None of fewer than FEWEST steps."""
    if len(ratios) < FEWEST:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return Gain(math.exp(mean), math.exp(mean - ERRORS * error), math.exp(mean + ERRORS * error), len(logs))


def rollout_gain(pairs: Sequence[tuple[Step, Step]]) -> Gain | None:
    """Return the gain in response tokens per second of the rollout."""
    return gain([second.rollout_speed / first.rollout_speed for first, second in pairs])


def step_gain(pairs: Sequence[tuple[Step, Step]]) -> Gain | None:
    """Return the gain in response tokens per second of whole steps."""
    return gain([second.speed / first.speed for first, second in pairs])
