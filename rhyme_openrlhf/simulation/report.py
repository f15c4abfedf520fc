"""Results as rows of a table, and as JSON. Each says that it is simulated, of what, with which profile and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation.recommendation import Recommendation
from rhyme_openrlhf.simulation.result import STATES, Result
from rhyme_openrlhf.simulation.study import Variant
from rhyme_openrlhf.simulation.workload import Workload

HEADINGS = (
    *("run", "samples/s", "x", "step s", "rollout s", "bubbles"),
    *STATES[1:],
    *("tokens/step", "moved", "switches", "preempted"),
)


def title(workload: Workload, profiles: Mapping[int, Profile], size: int) -> str:
    """Return a sentence that names the simulated workload and profile."""
    subject = profiles[size].subject
    return (
        f"simulated: {workload.name} ({workload.source}); {len(workload.steps)} steps; step times of {subject.model} "
        f"on {subject.hardware}, {subject.dtype}, TP {', '.join(map(str, sorted(profiles)))} ({profiles[size].origin})"
    )


def rows(variants: Sequence[Variant], results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a row for each, under HEADINGS; `x`: throughput by the first's; `tokens/step`: mean of a sample."""
    first = results[0].samples_per_second
    found = []
    for variant, result in zip(variants, results, strict=True):
        accounts = result.accounts
        found.append(
            (
                variant.name,
                f"{result.samples_per_second:.3f}",
                f"{result.samples_per_second / first:.2f}",
                f"{result.step_seconds:.1f}",
                f"{result.rollout_seconds:.1f}",
                f"{accounts.bubble_fraction():.1%}",
                *(f"{accounts.bubble_fraction(state):.1%}" for state in STATES[1:]),
                f"{result.tokens_per_sample_step:.2f}",
                f"{sum(result.moves.values())}",
                f"{result.switches}",
                f"{result.preemptions}",
            )
        )
    return found


def as_json(
    heading: str,
    notes: Sequence[str],
    variants: Sequence[Variant],
    results: Sequence[Result],
    advice: Recommendation,
) -> dict[str, Any]:
    """Return all results, for programs. Fractions are of all device time; times are in seconds."""
    return {
        "kind": "simulated",
        "title": heading,
        "notes": list(notes),
        "recommendation": {"run": advice.name, "flags": list(advice.flags), "notes": list(advice.notes)},
        "runs": [
            {
                "name": variant.name,
                "samples_per_second": result.samples_per_second,
                "tokens_per_second": result.tokens_per_second,
                "step_seconds": result.step_seconds,
                "rollout_seconds": result.rollout_seconds,
                "bubble_fraction": result.accounts.bubble_fraction(),
                "device_seconds": dict(result.accounts.seconds),
                "moves": result.moves,
                "switches": result.switches,
                "preemptions": result.preemptions,
                "steps": [
                    {"begun": step.begun, "completed": step.completed, "trained": step.trained, "tokens": step.tokens}
                    for step in result.steps
                ],
            }
            for variant, result in zip(variants, results, strict=True)
        ],
    }
