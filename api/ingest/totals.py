"""Sums from steps to epochs to a run's figures: pure. `telemetry/metrics.py` defines the figures.

Invariants:

- An epoch's row is the sum over its steps (epoch 0: steps with unknown epoch). Each change of a step subtracts its old
  values and adds its new ones.
- Every summed float is an integer multiple of a power of two, and small enough for exact sums. Adding and subtracting
  in any order therefore gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES, EngineCounters

# About a microsecond: 2^53 quanta are 272 engine years.
QUANTUM = 2.0**-20
# Quantum of a reward times its samples. A larger reward is shown with its step but not counted in the mean.
REWARD_QUANTUM = 2.0**-24
REWARD_MAX = 2.0**40

BUBBLE_CAUSES = ("tail", "weights", "sync", "switch", "trainer", metrics.UNEXPLAINED)
BUBBLE_COLUMNS = tuple(f"bubble_{cause}" for cause in BUBBLE_CAUSES)
# Columns of a step with the sums of engine counters; `response_tokens` there is counted by the rollout stage.
COUNTER_COLUMNS = {name: "engine_tokens" if name == "response_tokens" else name for name in COUNTER_NAMES}
EPOCH_SUMS = (
    "steps_begun", "steps", "rollout_seconds", "samples", "response_tokens", "reward_sum", "rewarded_samples",
    *COUNTER_COLUMNS.values(), "timeline_seconds", *BUBBLE_COLUMNS,
)  # fmt: skip

Row = Mapping[str, Any]


def quantised(value: float, quantum: float = QUANTUM) -> float:
    """Round `value` to the nearest multiple of `quantum`."""
    return round(value / quantum) * quantum


def finite(value: float | None) -> float | None:
    """Return `value`, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def stage_of(step: Row) -> tuple[float, float] | None:
    """Return begin and end of a step's rollout stage in quantised unix seconds, if both are known."""
    if step["started_at"] is None or step["rollout_seconds"] is None:
        return None
    begin = quantised(step["started_at"])
    return begin, begin + quantised(step["rollout_seconds"])


def epoch_changes(before: Iterable[Row], after: Iterable[Row]) -> dict[int, dict[str, float]]:
    """Return the changes of each epoch's sums when steps change from `before` to `after`."""
    changes: dict[int, dict[str, float]] = {}
    for sign, steps in ((-1, before), (1, after)):
        for step in steps:
            sums = changes.setdefault(step["epoch"] or 0, dict.fromkeys(EPOCH_SUMS, 0))
            for name, value in _share(step).items():
                sums[name] += sign * value
    return changes


def _share(step: Row) -> dict[str, float]:
    """Return the contribution of one step to its epoch's sums."""
    seconds = quantised(step["rollout_seconds"] or 0.0)
    reward = step["reward"] if step["rollout_reward"] is None else step["rollout_reward"]
    rewarded = step["samples"] or 0 if reward is not None and abs(reward) <= REWARD_MAX else 0
    share = {
        "steps_begun": 1,
        "steps": int(step["finished_at"] is not None),
        "rollout_seconds": seconds,
        "samples": step["samples"] or 0,
        "response_tokens": step["response_tokens"] or 0,
        "reward_sum": quantised(reward * rewarded, REWARD_QUANTUM) if rewarded else 0.0,
        "rewarded_samples": rewarded,
        "timeline_seconds": seconds if step["intervals"] and stage_of(step) else 0.0,
    }
    for name in (*COUNTER_COLUMNS.values(), *BUBBLE_COLUMNS):
        share[name] = step[name]
    return share


def run_figures(epochs: Iterable[Row], engines: int | None) -> dict[str, float | int | None]:
    """Compute the figures of a run's row from its epochs, as `telemetry/summary.py` does from its events."""
    epochs = sorted(epochs, key=lambda row: row["epoch"])
    rewards = [row["reward_sum"] / row["rewarded_samples"] for row in epochs if row["rewarded_samples"]]
    total = {name: sum(row[name] for row in epochs) for name in EPOCH_SUMS}
    counters = EngineCounters(**{name: total[column] for name, column in COUNTER_COLUMNS.items()})
    bubbles = sum(total[name] for name in BUBBLE_COLUMNS)
    return {
        "epoch": max((row["epoch"] for row in epochs), default=0),
        "reward": rewards[-1] if rewards else None,
        "tokens_per_second": metrics.tokens_per_second(total["response_tokens"], total["rollout_seconds"]),
        "speculation_rate": metrics.speculation_rate(counters),
        "bubble_fraction": metrics.bubble_share(bubbles, engines or 0, total["timeline_seconds"]),
    }
