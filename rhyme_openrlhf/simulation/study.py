"""Several simulated runs beside each other: features added in turn, or a setting swept; in as many processes as asked.

Invariants: variants come back in the order in which they were asked for, with any number of processes; all are compared
with the first.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.scheduling.step_plan import most_rank_groups, no_second_tier
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.run import Run
from rhyme_openrlhf.simulation.settings import Cluster, Conditions, Features
from rhyme_openrlhf.simulation.speculation import Rates
from rhyme_openrlhf.simulation.workload import Workload

# What a feature's name on the command line changes.
FEATURES: dict[str, dict[str, Any]] = {
    "sync": {"trainer": "sync"},
    "async": {"trainer": "async"},
    "pipeline": {"trainer": "pipeline"},
    "two-tier": {"two_tier": True},
    "outliers": {"outliers": True},
    "defer": {"defer": True},
    "dispatch": {"dispatch": True},
    "reallocation": {"reallocation": True},
    "tp-switch": {"switching": "history"},
    "tp-switch-max": {"switching": "maximum"},
    "speculation": {"speculation": "window"},
    "budget": {"speculation": "budget"},
    "measured-speculation": {"speculation": "measured"},
}


@dataclass(frozen=True)
class Variant:
    """A run to simulate, and its name in the table."""

    name: str
    cluster: Cluster
    features: Features

    @property
    def no_effect(self) -> str:
        """Return why one of the run's features cannot act, "" if all can."""
        if not self.features.two_tier:
            return ""
        engines = self.cluster.engines
        groups = min(most_rank_groups(self.features.rank_groups, engines), engines)
        reason = no_second_tier(groups, engines)
        return f"{self.name}: {reason}" if reason else ""


def with_features(names: Sequence[str], base: Features) -> Features:
    """`base` with these. Raises ValueError for a feature that does not exist, and for those that exclude each other."""
    changes: dict[str, Any] = {}
    for name in names:
        if name not in FEATURES:
            raise ValueError(f"there is no feature {name!r}; there are {', '.join(FEATURES)}")
        changes |= FEATURES[name]
    # What is asked for beside a run as it was is planned anew.
    return dataclasses.replace(base, as_placed=base.as_placed and not names, **changes)


def ablation(names: Sequence[str], cluster: Cluster, base: Features) -> list[Variant]:
    """`base`, then each feature added to those before it."""
    variants = [Variant(base.trainer, cluster, base)]
    for count in range(1, len(names) + 1):
        variants.append(Variant("+ " + names[count - 1], cluster, with_features(names[:count], base)))
    return variants


def sweep(setting: str, values: Sequence[str], cluster: Cluster, features: Features) -> list[Variant]:
    """Return the run with each value of one setting, named as its option. Raises ValueError for an unknown setting."""
    field = setting.replace("-", "_")
    field = {"tp": "tensor_parallel", "beta": "beta_floor"}.get(field, field)
    found = []
    for text in values:
        name = f"{setting} = {text}"
        if field in _numbers(cluster):
            found.append(Variant(name, _changed(cluster, field, text), features))
        elif field in _numbers(features):
            found.append(Variant(name, cluster, _changed(features, field, text)))
        else:
            known = sorted([*_numbers(cluster), *_numbers(features)])
            raise ValueError(f"there is no setting {setting!r} to sweep; there are {', '.join(known)}")
    return found


def _numbers(settings: Cluster | Features) -> dict[str, type]:
    values = dataclasses.asdict(settings)
    return {name: type(v) for name, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _changed(settings: Any, field: str, text: str) -> Any:
    kind = _numbers(settings)[field]
    try:
        value = kind(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no value of {field}: it takes numbers") from error
    return dataclasses.replace(settings, **{field: value})


def simulate(
    variants: Sequence[Variant],
    workload: Workload,
    profiles: Mapping[int, Profile],
    jobs: int = 1,
    measured: Sequence[Rates] = (),
    crowds: Mapping[int, Profile] | None = None,
    conditions: Sequence[Conditions] = (),
) -> list[Result]:
    """Return the results, in order; `measured`, `crowds` and `conditions`: as `Run` takes them.

    Raises what a run raises (ValueError: it cannot be run as asked).
    """
    if jobs == 1 or len(variants) == 1:
        return [_one(variant, workload, profiles, measured, crowds, conditions) for variant in variants]
    # Not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(variants)), mp_context=context) as pool:
        same = ([one] * len(variants) for one in (workload, dict(profiles), measured, crowds, conditions))
        return list(pool.map(_one, variants, *same))


def _one(
    variant: Variant,
    workload: Workload,
    profiles: Mapping[int, Profile],
    measured: Sequence[Rates],
    crowds: Mapping[int, Profile] | None,
    conditions: Sequence[Conditions],
) -> Result:
    return Run(workload, variant.cluster, variant.features, profiles, measured, crowds, conditions).go()
