"""Estimate of the gain of drafts for a new run: its rollouts are simulated with the step times of a profile.

The simulator and its decisions are those of `rhyme simulate` (`simulation/`, docs/simulator.md). The profile is the one
that a run names, or one that this machine has kept (`known_profile`); all else is pure.

Invariant: at most `MOST_SAMPLES` samples are simulated, which takes less than a second. A larger run is reduced to
fewer engines, and then to fewer prompts. The number of samples per engine stays the same as long as possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from rhyme_openrlhf.api.launch.spec_paths import profile_file
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import Profile, ProfileError, folder
from rhyme_openrlhf.run.model_shape import ModelShape
from rhyme_openrlhf.settings.latency import AUTO, NONE
from rhyme_openrlhf.simulation.workload import Shape, drawn

MOST_SAMPLES = 4000
# One epoch without history, then two with history.
EPOCHS, STEPS_PER_EPOCH = 3, 1
# Assumed lengths if no run with these prompts is known. Half of the responses end at an eighth of the limit, and one in
# twenty at half of it or later. This is about the spread of RLHFSpec's data (section 3.1, 378 and 1,373 of 2,048).
ASSUMED_MEDIAN, ASSUMED_P95 = 0.125, 0.5
_Z95 = NormalDist().inv_cdf(0.95)
_SEED = 1


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens, and their source."""

    median: float
    p95: float
    longest: int
    source: str


@dataclass(frozen=True)
class Rollout:
    """The rollout of a step: `prompts` x `samples` on `engines` engines."""

    engines: int
    tensor_parallel: int
    prompts: int
    samples: int
    speculation: Literal["window", "budget"]


@dataclass(frozen=True)
class Estimate:
    """A simulated result: seconds of a step's rollout without drafts, and with drafts from the second epoch on."""

    without_seconds: float
    with_seconds: float
    tokens_per_step: float
    engines: int
    prompts: int

    @property
    def ratio(self) -> float:
        """The speedup by drafts."""
        return self.without_seconds / self.with_seconds


def assumed_lengths(longest: int) -> Lengths:
    """Return assumed lengths of a run with unknown responses, from the longest response allowed."""
    return Lengths(ASSUMED_MEDIAN * longest, ASSUMED_P95 * longest, longest, "assumed")


def estimate(rollout: Rollout, lengths: Lengths, profile: Profile) -> Estimate:
    """Simulate the rollout. Raises ValueError if the profile has another tensor-parallel size or too few
    measurements.
    """
    # Imported here, because the simulator loads the compiled draft budget.
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
    """Return the engines and the prompts per step to simulate."""
    most = MOST_SAMPLES // (EPOCHS * STEPS_PER_EPOCH)
    wanted = rollout.prompts * rollout.samples
    engines = max(1, min(rollout.engines, rollout.engines * most // wanted if wanted > most else rollout.engines))
    prompts = max(1, round(rollout.prompts * engines / rollout.engines))
    return engines, max(1, min(prompts, most // rollout.samples))


def known_profile(named: str, shape: ModelShape | None, parallel: int, roots: Sequence[Path]) -> Profile | None:
    """Return the profile `named`, else the newest one of this model and tensor-parallel size in the profile cache.

    None without one. Raises ProfileError for a file that is no profile, and PathRefused for one not below `roots`.
    """
    if named not in (AUTO, NONE):
        return profiles.read(profile_file(named, roots))
    if shape is None:
        return None
    newest: tuple[float, Profile] | None = None
    for path in folder().glob("*.json"):
        try:
            known = profiles.read(path)
        except ProfileError:
            continue  # an unfinished or older profile: the run will measure its own
        if (known.subject.model, known.subject.tensor_parallel_size) == (shape.name, parallel):
            newest = max(newest or (0.0, known), (path.stat().st_mtime, known), key=lambda one: one[0])
    return newest[1] if newest else None
