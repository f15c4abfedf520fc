"""What drafts would give a run before it is started: its rollouts simulated by the step times of a profile. Pure.

The simulator and its decisions are those of `rhyme simulate` (`simulation/`, docs/simulator.md). Invariant: whatever is
asked for, no more than `MOST_SAMPLES` samples are simulated, which takes less than a second: of a larger run fewer
engines, and if that is not enough fewer prompts, with the same number of samples on each engine as long as possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation.workload import Shape, drawn

MOST_SAMPLES = 4000
# An epoch without history, then two that have one.
EPOCHS, STEPS_PER_EPOCH = 3, 1
# Where no run of these prompts has been seen: half of the responses stop at an eighth of the longest allowed, and
# one in twenty at half of it: about the spread that RLHFSpec prints for its data (section 3.1, 378 and 1,373 of 2,048).
ASSUMED_MEDIAN, ASSUMED_P95 = 0.125, 0.5
_Z95 = NormalDist().inv_cdf(0.95)
_SEED = 1


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens, and where they come from."""

    median: float
    p95: float
    longest: int
    source: str


@dataclass(frozen=True)
class Rollout:
    """What a step's rollout is: `prompts` x `samples` on `engines` engines."""

    engines: int
    tensor_parallel: int
    prompts: int
    samples: int
    speculation: Literal["window", "budget"]


@dataclass(frozen=True)
class Estimate:
    """Simulated. Seconds of a step's rollout without drafts, and with them from the second epoch on."""

    without_seconds: float
    with_seconds: float
    tokens_per_step: float
    engines: int
    prompts: int

    @property
    def ratio(self) -> float:
        """How many times as fast."""
        return self.without_seconds / self.with_seconds


def assumed_lengths(longest: int) -> Lengths:
    """Those of a run of which nothing is known but the longest response allowed."""
    return Lengths(ASSUMED_MEDIAN * longest, ASSUMED_P95 * longest, longest, "assumed")


def estimate(rollout: Rollout, lengths: Lengths, profile: Profile) -> Estimate:
    """Raises ValueError for a profile of another tensor-parallel size, or of too little."""
    # They bring the compiled draft budget along, which only those who ask need to wait for.
    from rhyme_openrlhf.simulation.run import Run
    from rhyme_openrlhf.simulation.settings import Cluster, Features

    engines, prompts = _part(rollout)
    spread = math.log(max(lengths.p95, 1.01 * lengths.median) / lengths.median) / _Z95
    shape = Shape(lengths.source, lengths.source, max(lengths.median, 1.0), spread, lengths.longest)
    workload = drawn(shape, EPOCHS * STEPS_PER_EPOCH, prompts, rollout.samples, STEPS_PER_EPOCH, _SEED)
    cluster = Cluster(1, engines * rollout.tensor_parallel, rollout.tensor_parallel)
    profiles = {profile.subject.tensor_parallel_size: profile}
    plain = Run(workload, cluster, Features("sync"), profiles).go()
    drafting = Run(workload, cluster, Features("sync", speculation=rollout.speculation), profiles).go()
    seconds = [[step.completed - step.begun for step in result.steps if step.epoch > 1] for result in (plain, drafting)]
    without, with_drafts = (sum(of) / len(of) for of in seconds)
    return Estimate(without, with_drafts, drafting.tokens_per_sample_step, engines, prompts)


def _part(rollout: Rollout) -> tuple[int, int]:
    """Engines and prompts of a step that are simulated."""
    most = MOST_SAMPLES // (EPOCHS * STEPS_PER_EPOCH)
    wanted = rollout.prompts * rollout.samples
    engines = max(1, min(rollout.engines, rollout.engines * most // wanted if wanted > most else rollout.engines))
    prompts = max(1, round(rollout.prompts * engines / rollout.engines))
    return engines, max(1, min(prompts, most // rollout.samples))
