"""Right-sizing of a recorded run, as `rhyme simulate --from-run DIRECTORY --advise` prints it.

Invariants: at most the latest `MOST_SAMPLES` samples are simulated, which takes a few seconds; files are regular files
of the run directory and at most `MOST_BYTES` long. The caller has checked that the run directory is below a root.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhyme_openrlhf.api.launch.gain_estimate import known_profile
from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.api.launch.spec_paths import PathRefused, checked
from rhyme_openrlhf.drafting_core import CoreMissing
from rhyme_openrlhf.latency.profile import ProfileError
from rhyme_openrlhf.latency.transfer_model import NotMeasured
from rhyme_openrlhf.run.model_shape import read_shape
from rhyme_openrlhf.settings.latency import AUTO
from rhyme_openrlhf.telemetry.run_directory import EVENTS_FILE, LENGTHS_FILE

# Twenty candidates of as many samples take about two seconds.
MOST_SAMPLES = 4096
MOST_BYTES = 256 * 1024 * 1024
NO_PROFILE = "no profile of this run's engines exists here: `rhyme profile` measures one"
NO_DIRECTORY = "the run has no directory that this service can read"


@dataclass(frozen=True)
class Row:
    """One simulated candidate; ratios are to the run as it was. `older`: it trains on samples of older weights."""

    engines: int
    features: str
    samples_per_second: float
    ratio: float
    ratio_per_device: float
    idle: float
    older: bool
    recommended: bool


@dataclass(frozen=True)
class Advice:
    """The recommended number of engines and features; `missing`: the reason if there is none, one clause."""

    rows: tuple[Row, ...] = ()
    sentence: str = ""
    method: str = ""
    assumed: tuple[str, ...] = ()
    settings: str = ""
    missing: str = ""


def advise(directory: Path | None, config: Mapping[str, Any], roots: Sequence[Path]) -> Advice:
    """Simulate the run of `directory` with other engines and features; `config`: the run's config.json."""
    # Imported here, because the simulator loads the compiled draft budget.
    from rhyme_openrlhf.simulation.recorded_run import read_run, replay
    from rhyme_openrlhf.simulation.right_size import latest, right_size
    from rhyme_openrlhf.simulation.settings import Cluster, Features
    from rhyme_openrlhf.simulation.workload import WorkloadError

    if directory is None:
        return Advice(missing=NO_DIRECTORY)
    try:
        for name in (LENGTHS_FILE, EVENTS_FILE):
            _check(directory / name)
        run = latest(read_run(directory, Cluster(), Features()), MOST_SAMPLES)
        named = _text(config, "settings", "emulate", "profile") or _text(config, "settings", "latency", "profile")
        model = _text(config, "arguments", "actor", "model_name_or_path")
        size = run.cluster.tensor_parallel
        shape = read_shape(checked(options()["actor", "model_name_or_path"], model, roots)) if model else None
        profile = known_profile(named or AUTO, shape, size, roots)
        if profile is None:
            return Advice(missing=NO_PROFILE)
        profiles = {profile.subject.tensor_parallel_size: profile}
        found = right_size(run, profiles, {}, replay(run, profiles, {}).conditions)
    except (WorkloadError, ProfileError, PathRefused, NotMeasured, CoreMissing, ValueError) as error:
        return Advice(missing=str(error))
    was = found.candidates[0]
    rows = tuple(
        Row(
            engines=one.engines,
            features=one.name,
            samples_per_second=one.result.samples_per_second,
            ratio=one.result.samples_per_second / was.result.samples_per_second,
            ratio_per_device=one.per_device / was.per_device,
            idle=one.result.accounts.bubble_fraction(),
            older=one.older,
            recommended=one is found.best,
        )
        for one in found.candidates
    )
    subject = profile.subject
    times = f"step times are of {subject.model} on {subject.hardware}, {subject.dtype} ({profile.origin})"
    settings = " ".join(found.settings({size: "PROFILE"}).flags)
    return Advice(rows, found.sentence, found.method, (times, *found.assumed), f"rhyme train ... {settings}")


def _check(path: Path) -> None:
    """Raise ValueError unless `path` is a regular file of bearable size, and no link."""
    try:
        about = path.lstat()
    except OSError as error:
        raise ValueError(f"the run directory has no {path.name} on this machine") from error
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path.name} of the run directory is no regular file")
    if about.st_size > MOST_BYTES:
        raise ValueError(f"{path.name} is too long for this page: use rhyme simulate --from-run DIRECTORY --advise")


def _text(config: Mapping[str, Any], *keys: str) -> str:
    """Return a recorded text, "" if it is missing or of another kind."""
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else ""
