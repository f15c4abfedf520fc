"""Right-sizing: how many rollout engines and which features a recorded run should have.

The search has two parts. It first simulates the run's own number of engines with each set of features that
`rhyme train` accepts. It then simulates other numbers of engines with the run's own features and with the best set.

Invariants:
- The recommendation trains on samples that are no older than the recorded run's.
- It is the smallest number of engines that keeps `KEPT` of the most samples a second.
- Every candidate has the run's lengths, trainer and speed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.simulation import study
from rhyme_openrlhf.simulation.recommendation import Recommendation, flags, refused, unsettable
from rhyme_openrlhf.simulation.recorded_run import RecordedRun
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.settings import MOST_DEVICES, Conditions, Features
from rhyme_openrlhf.simulation.study import Variant, with_features

AS_IT_WAS = "as it was"
# Real stages differ from simulated ones by up to a tenth (docs/simulator.md): a smaller loss cannot be told from none.
KEPT = 0.95
# Numbers of engines to try, as multiples of the run's own.
SIZES = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0)
# Sets of features beside the run's own, by their names in `rhyme simulate --features`.
SETS = (
    ("sync", "dispatch"),
    ("sync", "dispatch", "reallocation"),
    ("async", "dispatch"),
    ("pipeline",),
    ("pipeline", "two-tier"),
    ("pipeline", "two-tier", "outliers"),
    ("pipeline", "two-tier", "outliers", "defer"),
)


@dataclass(frozen=True)
class Candidate:
    """One simulated configuration. `per_device`: samples a second by rollout device; `older`: it trains on samples of
    older weights than the run did."""

    name: str
    variant: Variant
    result: Result
    older: bool

    @property
    def engines(self) -> int:
        return self.variant.cluster.engines

    @property
    def per_device(self) -> float:
        cluster = self.variant.cluster
        return self.result.samples_per_second / (cluster.nodes * cluster.devices)


@dataclass(frozen=True)
class RightSize:
    """`candidates`: the run as it was first, then by engines; `best`: the recommended one; `assumed`: sentences."""

    candidates: tuple[Candidate, ...]
    best: Candidate
    assumed: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return the recommendation in one sentence."""
        was, best = self.candidates[0], self.best
        ratio = best.result.samples_per_second / was.result.samples_per_second
        return (
            f"recommended (simulated): {_engines(best)}, {best.name}: {ratio:.2f}x the samples/s of the "
            f"run as it was ({_engines(was)}), {best.per_device / was.per_device:.2f}x per rollout device"
        )

    @property
    def method(self) -> str:
        """Return how the recommendation was found."""
        return (
            f"found among {len(self.candidates)} simulated candidates: each set of features with the run's engines, "
            f"then other numbers of engines with the run's features and with the best set; recommended is the fewest "
            f"engines with {KEPT:.0%} of the most samples/s, on samples no older than the run's"
        )

    def settings(self, files: Mapping[int, str]) -> Recommendation:
        """Return the options of the recommended run; `files`: the profile of each tensor-parallel size."""
        cluster, features = self.best.variant.cluster, self.best.variant.features
        notes = unsettable(features) if self.best.name != AS_IT_WAS else []
        return Recommendation(f"{_engines(self.best)}, {self.best.name}", flags(cluster, features, files), tuple(notes))

    def rows(self) -> list[tuple[str, ...]]:
        """Return a table's rows under `HEADINGS`."""
        was = self.candidates[0]
        return [
            (
                f"{one.engines}",
                one.name,
                f"{one.result.samples_per_second:.3f}",
                f"{one.result.samples_per_second / was.result.samples_per_second:.2f}",
                f"{one.per_device / was.per_device:.2f}",
                f"{one.result.accounts.bubble_fraction():.0%}",
                "recommended" if one is self.best else "older samples" if one.older else "",
            )
            for one in self.candidates
        ]


HEADINGS = ("engines", "features", "samples/s", "x", "x per device", "idle", "")


def _engines(one: Candidate) -> str:
    return "1 rollout engine" if one.engines == 1 else f"{one.engines} rollout engines"


def feature_sets(run: RecordedRun, profile: Profile) -> dict[str, Features]:
    """Return the sets of features to compare, by name; the run's own first.

    Sets that move samples are left out if the profile has no prefills, because a moved sample may be computed again.
    """
    found = {AS_IT_WAS: run.features}
    for names in SETS:
        features = with_features(names, run.features)
        moves = features.reallocation or features.outliers
        variant = Variant("", run.cluster, features)
        if not refused(features) and not variant.no_effect and (profile.prefills or not moves):
            found[" + ".join(names)] = features
    if run.features.speculation == "measured":
        found[f"{AS_IT_WAS}, without drafts"] = dataclasses.replace(run.features, speculation="off")
    return found


def latest(run: RecordedRun, most_samples: int) -> RecordedRun:
    """Return the run's latest steps with at most this many samples, and at least one step."""
    samples = [sum(len(prompt.lengths) for prompt in step.prompts) for step in run.workload.steps]
    steps = max(sum(total <= most_samples for total in itertools.accumulate(reversed(samples))), 1)
    return dataclasses.replace(
        run,
        workload=dataclasses.replace(run.workload, steps=run.workload.steps[-steps:]),
        rates=run.rates[-steps:],
        stages=run.stages[-steps:],
        busy=run.busy[-steps:],
    )


def older(features: Features, run: Features) -> bool:
    """Return whether these features train on older samples than the run's: only the synchronous trainer has none."""
    return run.trainer == "sync" and features.trainer != "sync"


def sizes(engines: int) -> list[int]:
    """Return the numbers of engines to try beside `engines`, ascending."""
    return sorted({max(round(engines * size), 1) for size in SIZES} - {engines})


def chosen(candidates: Sequence[Candidate]) -> Candidate:
    """Return the recommended candidate: the fewest engines that keep `KEPT` of the most samples a second.

    Of equal numbers of engines the fastest is recommended; of equal speeds the first.
    """
    allowed = [one for one in candidates if not one.older]
    most = max(one.result.samples_per_second for one in allowed)
    enough = [one for one in allowed if one.result.samples_per_second >= KEPT * most]
    return min(enough, key=lambda one: (one.engines, -one.result.samples_per_second))


def right_size(
    run: RecordedRun,
    profiles: Mapping[int, Profile],
    crowds: Mapping[int, Profile],
    conditions: Sequence[Conditions],
    jobs: int = 1,
) -> RightSize:
    """Simulate the candidates and choose among them; `conditions`: the run's own speed, by step."""

    def simulated(named: Sequence[tuple[str, Variant]]) -> list[Candidate]:
        variants = [variant for _, variant in named]
        results = study.simulate(variants, run.workload, profiles, jobs, run.rates, crowds, conditions)
        return [
            Candidate(name, variant, result, older(variant.features, run.features))
            for (name, variant), result in zip(named, results, strict=True)
        ]

    size = run.cluster.tensor_parallel
    profile = profiles[size]
    sets = feature_sets(run, profile)
    found = simulated([(name, Variant(name, run.cluster, features)) for name, features in sets.items()])
    best = max((one for one in found if not one.older), key=lambda one: one.result.samples_per_second)
    names = dict.fromkeys((AS_IT_WAS, best.name))
    others = []
    for engines in sizes(run.cluster.engines):
        if engines * size > MOST_DEVICES:
            continue
        cluster = dataclasses.replace(run.cluster, devices=engines * size)
        for name in names:
            # Prompts stay on their recorded engines only where these engines exist.
            features = dataclasses.replace(sets[name], as_placed=False)
            variant = Variant(name, cluster, features)
            if not variant.no_effect:
                others.append((name, variant))
    rest = sorted([*found[1:], *simulated(others)], key=lambda one: (one.engines, -one.result.samples_per_second))
    candidates = (found[0], *rest)
    return RightSize(candidates, chosen(candidates), tuple(_assumed(run, profile, crowds, conditions)))


def _assumed(
    run: RecordedRun, profile: Profile, crowds: Mapping[int, Profile], conditions: Sequence[Conditions]
) -> list[str]:
    """Return what the simulation takes for granted, one sentence each."""
    found = [
        f"the {len(run.workload.steps)} recorded steps return with the same lengths, and the trainer keeps its speed",
        "each engine has devices of its own, and the trainer's devices are not counted",
    ]
    slowness = [one.slowness for one in conditions]
    if slowness:
        found.append(
            f"each step is as slow beside the profile as it was ({min(slowness):.2f} to {max(slowness):.2f}x), "
            "with any number of engines"
        )
    if crowds:
        found.append(f"engines that share cores were measured with up to {max(crowds)} at work; more count as so many")
    if not profile.prefills:
        found.append(
            "reallocation and outliers are not compared, because the profile has no prefills (`rhyme profile`)"
        )
    if run.features.speculation == "measured":
        found.append("drafts are accepted as in the run, whatever the batch sizes")
    else:
        found.append("the run had no drafts, so their gain is not compared")
    return found
