"""From profiles to engines: files and shipped profiles, decode steps one or thousands at a time, what a profile lacks.

For a number of running samples and of draft tokens, the step time is a piecewise linear curve over the context
(latency/step_model.py); while nothing finishes, the context grows by the same number of tokens each step. So the sum
over any number of steps is a few arithmetic series. Shipped profiles are derived from what papers print, for those who
have not measured their own.

Invariants: `total` is the sum of `seconds` over the same steps, up to rounding; `steps_until` is the number of steps
whose `total` first reaches a time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import Profile, ProfileError
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.simulation.settings import Cluster, Features

FOLDER = resources.files("rhyme_openrlhf.simulation") / "profiles"
# Name on the command line -> files, one for each tensor-parallel size.
SHIPPED = {"pat-a40": ("pat-a40-tp2.json", "pat-a40-tp8.json")}


def load(names: list[str]) -> dict[int, Profile]:
    """The profiles of these files or shipped names, by tensor-parallel size; those with engines beside left out.

    Raises ProfileError if one cannot be read, two are of one size, or they are of different models or hardware.
    """
    return load_all(names)[0]


def load_all(names: list[str]) -> tuple[dict[int, Profile], dict[int, Profile]]:
    """As `load`, and the profiles with engines beside (`rhyme profile --beside`), by the number of engines in all."""
    found: dict[int, Profile] = {}
    crowds: dict[int, Profile] = {}
    for name in names:
        paths = [Path(str(FOLDER / file)) for file in SHIPPED[name]] if name in SHIPPED else [Path(name)]
        for path in paths:
            profile = profiles.read(path)
            size = profile.subject.tensor_parallel_size
            if profile.beside and 1 + profile.beside in crowds:
                raise ProfileError(f"{path} is a second profile with {profile.beside} engines beside: give one of each")
            if size in found and not profile.beside:
                raise ProfileError(f"{path} is a second profile of tensor-parallel size {size}: give one of each size")
            for other in (*found.values(), *crowds.values()):
                if (other.subject.model, other.subject.hardware) != (profile.subject.model, profile.subject.hardware):
                    raise ProfileError(
                        f"{path} is of {profile.subject.model} on {profile.subject.hardware}, another given is of "
                        f"{other.subject.model} on {other.subject.hardware}: they must be of one model and hardware"
                    )
            if profile.beside:
                crowds[1 + profile.beside] = profile
            else:
                found[size] = profile
    return found, crowds


# Where step times bend sharply Newton's method may creep: after so many tries (it usually needs four), halving.
NEWTON_TRIES = 8


class StepTimes:
    """The step times of one profile; `beside`: seconds of every step that the profile does not have."""

    def __init__(self, profile: Profile, beside: float = 0.0) -> None:
        self._beside = beside
        self.model = StepModel(profile)
        # The model bends where a profiled point is, for whatever number of samples.
        contexts = sorted({0, *(point.context for point in profile.steps)})
        # One more, so that the line beyond the last point has two points to lie on.
        self._contexts = [*contexts, 2 * contexts[-1] + 1]
        self._courses: dict[tuple[int, int], _Course] = {}

    def _course(self, running: int, drafts: int) -> _Course:
        """Of these steps, made once."""
        known = self._courses.get((running, drafts))
        if known is None:
            seconds = [self.model.seconds(running, context, drafts) + self._beside for context in self._contexts]
            slopes = [
                (seconds[at + 1] - seconds[at]) / (self._contexts[at + 1] - self._contexts[at])
                for at in range(len(seconds) - 1)
            ]
            known = self._courses[running, drafts] = _Course(self._contexts, seconds, [*slopes, slopes[-1]])
        return known

    def seconds(self, running: int, context: float, drafts: int) -> float:
        """Seconds of one step of `running` samples with `context` tokens and `drafts` draft tokens in all."""
        return self._course(running, drafts).seconds(context)

    def total(self, running: int, context: float, drafts: int, steps: int, growth: float) -> float:
        """Seconds of `steps` steps, the first with `context` tokens and each next with `growth` (above 0) more."""
        return self._course(running, drafts).total(context, steps, growth)

    def steps_until(
        self, running: int, context: float, drafts: int, most: int, growth: float, seconds: float, extra: float = 0.0
    ) -> int:
        """The fewest steps, at most `most`, that take `seconds` or more, when each takes `extra` seconds beside."""
        if most <= 0 or seconds <= 0:
            return 0
        return self._course(running, drafts).steps_until(context, most, growth, seconds, extra)


class _Course(NamedTuple):
    """Step seconds over the context: those at some contexts, and the slopes behind each."""

    contexts: list[int]
    values: list[float]
    slopes: list[float]

    def seconds(self, context: float) -> float:
        """Return the seconds of one step."""
        at = bisect_right(self.contexts, context) - 1
        return self.values[at] + self.slopes[at] * (context - self.contexts[at])

    def total(self, context: float, steps: int, growth: float) -> float:
        """As `StepTimes.total`."""
        contexts, values, slopes = self
        last = len(contexts) - 1
        at = bisect_right(contexts, context) - 1
        done, found = 0, 0.0
        while done < steps:
            begin = context + done * growth
            while at < last and contexts[at + 1] <= begin:
                at += 1
            count = steps - done
            if at < last and (inside := math.ceil((contexts[at + 1] - begin) / growth)) < count:
                count = inside if inside > 1 else 1
            slope = slopes[at]
            found += count * (values[at] + slope * (begin - contexts[at])) + slope * growth * (count * (count - 1) / 2)
            done += count
        return found

    def steps_until(self, context: float, most: int, growth: float, seconds: float, extra: float) -> int:
        """As `StepTimes.steps_until`, for what takes some time."""
        # After `low` steps it is not reached; after `high` it is, or that is all. `middle` took `found`.
        low, high = -1, most
        middle, found, tries = 0, 0.0, 0
        while high - low > 1:
            if found >= seconds:
                high = middle
            else:
                low = middle
            tries += 1
            if tries <= NEWTON_TRIES:
                # Steps are nearly alike: as many more as the next one's time fits into what is missing.
                each = self.seconds(context + middle * growth) + extra
                more = math.ceil((seconds - found) / each) if each > 0 else most
                middle = min(max(middle + more, low + 1), high - 1)
            else:
                middle = (low + high) // 2
            found = self.total(context, middle, growth) + middle * extra
        return high


@dataclass(frozen=True)
class EngineKind:
    """What engines of one tensor-parallel size are like.

    `kv_tokens`: room for this many tokens of context; `most_running`: samples at once; `step_tokens`: prompt tokens
    computed per step; `prefill_seconds`: of sequences of such lengths together.
    """

    times: StepTimes
    transfer: TransferModel
    prefill_seconds: Callable[[list[int]], float]
    kv_tokens: int
    most_running: int
    step_tokens: int


def engine_kind(profile: Profile, cluster: Cluster, features: Features) -> EngineKind:
    """An engine of this profile."""
    transfer = TransferModel(profile)
    return EngineKind(
        StepTimes(profile, cluster.lookup_seconds if features.speculation != "off" else 0.0),
        transfer,
        # Without measured prefills they take no time; `gaps` says so beside every result.
        transfer.prefill_seconds if profile.prefills else lambda lengths: 0.0,
        profile.kv_cache_tokens,
        cluster.running,
        cluster.step_tokens,
    )


def gaps(profiles: Mapping[int, Profile]) -> list[str]:
    """What the profiles do not have and a simulation with them therefore counts as free, or cannot use."""
    found = []
    for size, profile in sorted(profiles.items()):
        if not profile.prefills:
            found.append(f"TP {size}: prefills are not profiled and take no time here")
        if not profile.weight_load_seconds:
            found.append(f"TP {size}: weight loads are not profiled and take no time here")
        if not profile.kv_bytes_per_second:
            found.append(f"TP {size}: KV transfers are not profiled; moved samples are computed again")
    return found
