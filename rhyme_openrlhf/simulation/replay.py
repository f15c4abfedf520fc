"""A recorded run simulated as it was, three times: by the profile alone, as a forecast, and under its own conditions.

Which is what: simulation/conditions.py. The profile alone says how far a profile carries; a forecast, how far what a
run's earlier steps showed carries; the replay under each step's own conditions, how well everything but step times is
simulated, and it is what other features are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation.conditions import Conditions, known_before, recorded
from rhyme_openrlhf.simulation.recorded_run import Comparison, RecordedRun, compare, summary
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run

Way = Literal["by the profile", "forecast", "own speed"]
WAYS: tuple[Way, ...] = ("by the profile", "forecast", "own speed")


@dataclass(frozen=True)
class Replay:
    """`conditions`: what each step was like; `results` and `compared`: of each way, compared step by step."""

    conditions: tuple[Conditions, ...]
    results: Mapping[Way, Result]
    compared: Mapping[Way, Sequence[Comparison]]

    def lines(self) -> list[str]:
        """A table of the stages, and a sentence for each way."""
        head = f"{'step':>4}  {'rollout s, real':>15}  {'slowness':>8}"
        lines = [head + "".join(f"  {way:>14}  {'error':>7}" for way in WAYS)]
        for place, condition in enumerate(self.conditions):
            stages = [self.compared[way][place] for way in WAYS]
            line = f"{stages[0].step:4d}  {stages[0].real:15.2f}  {condition.slowness:8.2f}"
            lines.append(line + "".join(f"  {one.simulated:14.2f}  {one.error:+7.1%}" for one in stages))
        return lines + [f"{way}: {summary(self.compared[way], self.results[way])}" for way in WAYS]


def replay(run: RecordedRun, profiles: Mapping[int, Profile], crowds: Mapping[int, Profile]) -> Replay:
    """The run of a run directory, again."""

    def simulated(conditions: Sequence[Conditions] = ()) -> Result:
        return Run(run.workload, run.cluster, run.features, profiles, run.rates, crowds, conditions).go()

    plain = simulated()
    own = recorded(run.busy, [step.busy for step in plain.steps])
    results: dict[Way, Result] = {
        "by the profile": plain,
        "forecast": simulated(known_before(own)),
        "own speed": simulated(own),
    }
    return Replay(own, results, {way: compare(run, result) for way, result in results.items()})
