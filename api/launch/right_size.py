"""Right-sizing of a recorded run, as `rhyme simulate --from-run DIRECTORY --advise` prints it.

Invariants: at most the latest `MOST_SAMPLES` samples are simulated, which takes a few seconds; files are regular files
of the run directory and at most `MOST_BYTES` long. The caller has checked that the run directory is below a root.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rhyme_openrlhf.api.launch.gain_estimate import known_profile
from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.api.launch.spec_paths import PathRefused, checked
from rhyme_openrlhf.api.store.bounds import View
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


class CandidateView(View):
    """One simulated configuration. Ratios are to the run as it was."""

    engines: int = Field(description="Rollout engines.")
    features: str = Field(description="Features by their names in `rhyme simulate --features`.")
    samples_per_second: float
    ratio: float = Field(description="Of samples per second.")
    ratio_per_device: float = Field(description="Of samples per second and rollout device.")
    idle: float = Field(description="Share of device time with nothing to run.")
    older: bool = Field(description="It trains on samples of older weights than the run did; never recommended.")
    recommended: bool


class RightSizeView(View):
    """A recommendation by simulation. Without one, `missing` has the reason and the rest is empty."""

    rows: list[CandidateView]
    sentence: str
    method: str = Field(description="How the recommendation was found.")
    assumed: list[str]
    settings: str = Field(description="Options of the recommended run.")
    missing: str

    @classmethod
    def lacking(cls, reason: str) -> RightSizeView:
        """Return no recommendation."""
        return cls(rows=[], sentence="", method="", assumed=[], settings="", missing=reason)


def lacks(directory: Path | None) -> str:
    """Return the reason for which the run of `directory` cannot be simulated, as far as its files tell; else ""."""
    if directory is None:
        return NO_DIRECTORY
    try:
        for name in (LENGTHS_FILE, EVENTS_FILE):
            _check(directory / name)
    except ValueError as error:
        return str(error)
    return ""


def advise(directory: Path | None, config: Mapping[str, Any], roots: Sequence[Path]) -> RightSizeView:
    """Simulate the run of `directory` with other engines and features; `config`: the run's config.json."""
    # Imported here, because the simulator loads the compiled draft budget.
    from rhyme_openrlhf.simulation.recorded_run import read_run, replay
    from rhyme_openrlhf.simulation.right_size import latest, right_size
    from rhyme_openrlhf.simulation.settings import Cluster, Features
    from rhyme_openrlhf.simulation.workload import WorkloadError

    if reason := lacks(directory):
        return RightSizeView.lacking(reason)
    assert directory is not None
    try:
        run = latest(read_run(directory, Cluster(), Features()), MOST_SAMPLES)
        named = _text(config, "settings", "emulate", "profile") or _text(config, "settings", "latency", "profile")
        model = _text(config, "arguments", "actor", "model_name_or_path")
        size = run.cluster.tensor_parallel
        shape = read_shape(checked(options()["actor", "model_name_or_path"], model, roots)) if model else None
        profile = known_profile(named or AUTO, shape, size, roots)
        if profile is None:
            return RightSizeView.lacking(NO_PROFILE)
        profiles = {profile.subject.tensor_parallel_size: profile}
        found = right_size(run, profiles, {}, replay(run, profiles, {}).conditions)
    except (WorkloadError, ProfileError, PathRefused, NotMeasured, CoreMissing, ValueError) as error:
        return RightSizeView.lacking(str(error))
    # Files of another program may hold numbers and references that no run has.
    except (ArithmeticError, LookupError, RecursionError) as error:
        return RightSizeView.lacking(f"the run's record cannot be simulated: {type(error).__name__}")
    was = found.candidates[0]
    rows = [
        CandidateView(
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
    ]
    subject = profile.subject
    times = f"step times are of {subject.model} on {subject.hardware}, {subject.dtype} ({profile.origin})"
    settings = " ".join(found.settings({size: "PROFILE"}).flags)
    return RightSizeView(
        rows=rows,
        sentence=found.sentence,
        method=found.method,
        assumed=[times, *found.assumed],
        settings=f"rhyme train ... {settings}",
        missing="",
    )


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
