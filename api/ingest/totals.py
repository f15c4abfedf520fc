"""From steps to epochs to a run's figures: pure. The definitions are those of `telemetry/metrics.py`.

Invariants: an epoch's row is the sum over its steps (epoch 0: steps whose epoch is not known yet), kept by adding what
a step is now and taking away what it was. Every float that is summed is a whole multiple of a power of two and small
enough that the sums are exact: adding and taking away in any order gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES, EngineCounters

# About a microsecond: 2^53 of them are 272 engine years.
QUANTUM = 2.0**-20
# Of a reward times its samples; a reward beyond the limit is shown with its step, but makes no mean.
REWARD_QUANTUM = 2.0**-24
REWARD_MAX = 2.0**40

BUBBLE_CAUSES = ("tail", "weights", "sync", "switch", "trainer", metrics.UNEXPLAINED)
BUBBLE_COLUMNS = tuple(f"bubble_{cause}" for cause in BUBBLE_CAUSES)
# Columns of a step that hold an engine counter's sum: `response_tokens` there is what the rollout stage counted.
COUNTER_COLUMNS = {name: "engine_tokens" if name == "response_tokens" else name for name in COUNTER_NAMES}
EPOCH_SUMS = (
    "steps_begun", "steps", "rollout_seconds", "samples", "response_tokens", "reward_sum", "rewarded_samples",
    *COUNTER_COLUMNS.values(), "timeline_seconds", *BUBBLE_COLUMNS,
)  # fmt: skip

Row = Mapping[str, Any]


def quantised(value: float, quantum: float = QUANTUM) -> float:
    """`value` as the nearest whole multiple of `quantum`."""
    return round(value / quantum) * quantum


def finite(value: float | None) -> float | None:
    """`value`, or None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def stage_of(step: Row) -> tuple[float, float] | None:
    """Begin and end of a step's rollout stage in quantised unix seconds, if both are known."""
    if step["started_at"] is None or step["rollout_seconds"] is None:
        return None
    begin = quantised(step["started_at"])
    return begin, begin + quantised(step["rollout_seconds"])


def epoch_changes(before: Iterable[Row], after: Iterable[Row]) -> dict[int, dict[str, float]]:
    """What to add to each epoch's sums when steps go from `before` to `after`."""
    changes: dict[int, dict[str, float]] = {}
    for sign, steps in ((-1, before), (1, after)):
        for step in steps:
            sums = changes.setdefault(step["epoch"] or 0, dict.fromkeys(EPOCH_SUMS, 0))
            for name, value in _share(step).items():
                sums[name] += sign * value
    return changes


def _share(step: Row) -> dict[str, float]:
    """What one step adds to its epoch."""
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
    """The figures of a run's row from its epochs, as `telemetry/summary.py` computes them from its events."""
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
