"""The settings to use, as options of `rhyme train`: the quickest of the simulated runs that can be run today.

Invariants (a test holds the first two against the parser and checks of `rhyme train`):
- Only options that `rhyme train` takes are named.
- A combination that it refuses is not recommended.
- A property of a simulated run that no option gives is named beside the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhyme_openrlhf.scheduling.outliers import ALPHA, BETA_FLOOR
from rhyme_openrlhf.scheduling.step_plan import usual_rank_groups
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.histopipe import DispatchSettings, HistoPipeSettings
from rhyme_openrlhf.settings.latency import AUTO, NONE, LatencySettings
from rhyme_openrlhf.settings.moves import MoveSettings, ReallocationSettings
from rhyme_openrlhf.settings.tp_switch import BY_HISTORY, BY_MAXIMUM, TpSwitchSettings
from rhyme_openrlhf.simulation.result import Result
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.study import Variant

# A run reports its engines at least this often (--reallocation.status_s).
SLOWEST_STATUS = 60.0


@dataclass(frozen=True)
class Recommendation:
    """`flags`: of `rhyme train`, for the variant `name`; `notes`: what to know, one sentence each. Without flags: none
    of the runs can be run today."""

    name: str
    flags: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the recommendation in words, for a terminal or a page."""
        if not self.flags:
            return list(self.notes)
        return [f"settings to use (simulated, {self.name}): rhyme train ... {' '.join(self.flags)}", *self.notes]


def recommend(variants: Sequence[Variant], results: Sequence[Result], files: Mapping[int, str]) -> Recommendation:
    """Return the quickest variant that can be run; `files`: the profile of each tensor-parallel size."""
    order = sorted(range(len(results)), key=lambda place: -results[place].samples_per_second)
    notes = []
    for place in order:
        variant = variants[place]
        reason = refused(variant.features)
        if not reason:
            notes += unsettable(variant.features)
            return Recommendation(variant.name, flags(variant.cluster, variant.features, files), tuple(notes))
        notes.append(f"{variant.name} is simulated only: rhyme train refuses {reason}")
    return Recommendation("", (), tuple(notes))


def refused(features: Features) -> str:
    """Return the features among these that `rhyme train` does not run together; "" if it runs them all."""
    if features.trainer == "pipeline" and features.reallocation:
        return "--histopipe.enable with --reallocation.enable"
    if features.trainer == "async" and features.switching != "off":
        return "--tp_switch.enable with --train.async_enable"
    return ""


def unsettable(features: Features) -> list[str]:
    """Return a sentence for each simulated setting that a run has fixed otherwise."""
    found = []
    if features.outliers and (features.alpha, features.beta_floor) != (ALPHA, BETA_FLOOR):
        found.append(f"a run has alpha {ALPHA:g} and beta {BETA_FLOOR:g} at least: they are no options")
    if features.speculation == "measured":
        found.append("drafts are as in the recorded run")
    if features.switching != "off":
        found.append("TP switches have never been run on a GPU")
    if needs_profile(features) and features.speculation == "window":
        found.append("with a profile, a run cuts drafts by step times too: simulated as the feature 'budget'")
    return found


def needs_profile(features: Features) -> bool:
    """Return whether a run has to know step times, to decide when samples move or layouts switch."""
    return features.switching != "off" or (features.reallocation and not features.threshold)


def flags(cluster: Cluster, features: Features, files: Mapping[int, str]) -> tuple[str, ...]:
    """Options that make a run what was simulated; those at their defaults are left out where a default decides."""
    found = ["--vllm.num_engines", str(cluster.engines), "--vllm.tensor_parallel_size", str(cluster.tensor_parallel)]
    if features.trainer != "sync":
        found.append("--train.async_enable")
    if features.trainer == "pipeline":
        found += _pipeline(cluster, features)
    else:
        found.append(_switch(DispatchSettings.flag("by_history"), features.dispatch))
    if features.reallocation:
        flag = ReallocationSettings.flag
        status = min(features.interval, SLOWEST_STATUS)
        found += [flag("enable"), flag("threshold"), str(features.threshold)]
        found += [flag("cooldown_steps"), str(features.cooldown), flag("status_s"), f"{status:g}"]
    if features.switching != "off":
        flag = TpSwitchSettings.flag
        sizes = sorted(size for size in files if size > cluster.tensor_parallel and not cluster.devices % size)
        rule = BY_HISTORY if features.switching == "history" else BY_MAXIMUM
        found += [flag("enable"), flag("size" if len(sizes) == 1 else "sizes"), ",".join(map(str, sizes))]
        found += [flag("rule"), rule, flag("profile"), ",".join(files[size] for size in sizes)]
    found.append(_switch(HistoSpecSettings.flag("enable"), features.speculation != "off"))
    if features.speculation in ("window", "budget"):
        found += [HistoSpecSettings.flag("window_max"), str(features.window_max)]
    if needs_profile(features):
        found += [LatencySettings.flag("profile"), files[cluster.tensor_parallel]]
    elif features.speculation in ("window", "budget"):
        found += [LatencySettings.flag("profile"), AUTO if features.speculation == "budget" else NONE]
    return tuple(found)


def _pipeline(cluster: Cluster, features: Features) -> list[str]:
    flag = HistoPipeSettings.flag
    groups = min(features.rank_groups or usual_rank_groups(cluster.engines), cluster.engines)
    found = [flag("enable"), flag("rank_groups"), str(groups), _switch(flag("two_tier"), features.two_tier)]
    if features.outliers:
        found.append(MoveSettings.flag("enable"))
    if features.defer:
        found.append(flag("defer"))
    return found


def _switch(flag: str, on: bool) -> str:
    """Return the flag, or its `--no-` form."""
    return flag if on else f"--no-{flag.removeprefix('--')}"
