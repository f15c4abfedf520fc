"""Kinds of engines from profiles: loading profiles, timing one or thousands of decode steps, naming a profile's gaps.

For fixed numbers of running samples and draft tokens, the step time is a piecewise linear curve over the context
(latency/step_model.py). While nothing finishes, the context grows by the same number of tokens each step. The sum over
any number of steps is therefore a few arithmetic series.

Shipped profiles are derived from numbers printed in papers, for users who have not measured their own.

Invariants:

- `total` is the sum of `seconds` over the same steps, up to rounding.
- `steps_until` is the number of steps whose `total` first reaches a time.
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
# Maps a name on the command line to its files, one for each tensor-parallel size.
SHIPPED = {"pat-a40": ("pat-a40-tp2.json", "pat-a40-tp8.json")}


def load(names: list[str]) -> dict[int, Profile]:
    """Return the profiles of these files or shipped names, by tensor-parallel size.

    Profiles measured with other engines beside (`rhyme profile --beside`) are left out.

    Raises ProfileError if one cannot be read, two are of one size, or they are of different models or hardware.
    """
    return load_all(names)[0]


def load_all(names: list[str]) -> tuple[dict[int, Profile], dict[int, Profile]]:
    """Return the profiles that `load` returns, and those measured with engines beside (`rhyme profile --beside`).

    The latter are keyed by the total number of engines, the measured one included.
    """
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


# Tries of Newton's method before bisection takes over. Newton usually needs four tries, but may be slow where step
# times bend sharply.
NEWTON_TRIES = 8


class StepTimes:
    """The step times of one profile; `beside`: seconds to add to every step because the profile lacks them."""

    def __init__(self, profile: Profile, beside: float = 0.0) -> None:
        self._beside = beside
        self.model = StepModel(profile)
        # The model bends at the context of each profiled point, independent of the number of samples.
        contexts = sorted({0, *(point.context for point in profile.steps)})
        # Add one context, so that two points define the line beyond the last profiled point.
        self._contexts = [*contexts, 2 * contexts[-1] + 1]
        self._courses: dict[tuple[int, int], _Course] = {}

    def _course(self, running: int, drafts: int) -> _Course:
        """Return the course of steps with these numbers of samples and draft tokens; each course is made once."""
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
        """Return the seconds of a step of `running` samples with `context` tokens and `drafts` draft tokens in all."""
        return self._course(running, drafts).seconds(context)

    def total(self, running: int, context: float, drafts: int, steps: int, growth: float) -> float:
        """Return the seconds of `steps` steps: the first has `context` tokens, each next `growth` (above 0) more."""
        return self._course(running, drafts).total(context, steps, growth)

    def steps_until(
        self, running: int, context: float, drafts: int, most: int, growth: float, seconds: float, extra: float = 0.0
    ) -> int:
        """Return the smallest number of steps that take `seconds` or more, at most `most`.

        Each step takes `extra` seconds in addition to its own time.
        """
        if most <= 0 or seconds <= 0:
            return 0
        return self._course(running, drafts).steps_until(context, most, growth, seconds, extra)


class _Course(NamedTuple):
    """A piecewise linear curve of step seconds over the context: values at some contexts, and the slope after each."""

    contexts: list[int]
    values: list[float]
    slopes: list[float]

    def seconds(self, context: float) -> float:
        """Return the seconds of one step."""
        at = bisect_right(self.contexts, context) - 1
        return self.values[at] + self.slopes[at] * (context - self.contexts[at])

    def total(self, context: float, steps: int, growth: float) -> float:
        """Return the seconds of `steps` steps, in the same way as `StepTimes.total`."""
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
        """Return the same number of steps as `StepTimes.steps_until`, for `most` and `seconds` above 0."""
        # `low` steps do not reach `seconds`; `high` steps do, or `high` is `most`. `middle` steps take `found` seconds.
        low, high = -1, most
        middle, found, tries = 0, 0.0, 0
        while high - low > 1:
            if found >= seconds:
                high = middle
            else:
                low = middle
            tries += 1
            if tries <= NEWTON_TRIES:
                # Steps take nearly equal times, so divide the missing seconds by the next step's time.
                each = self.seconds(context + middle * growth) + extra
                more = math.ceil((seconds - found) / each) if each > 0 else most
                middle = min(max(middle + more, low + 1), high - 1)
            else:
                middle = (low + high) // 2
            found = self.total(context, middle, growth) + middle * extra
        return high


@dataclass(frozen=True)
class EngineKind:
    """The properties of engines of one tensor-parallel size.

    - `times`: step times.
    - `transfer`: times of KV transfers.
    - `prefill_seconds`: function from the lengths of sequences to the seconds of prefilling them together.
    - `kv_tokens`: capacity of the KV cache, in tokens of context.
    - `most_running`: most samples that run at once.
    - `step_tokens`: prompt tokens computed per step.
    """

    times: StepTimes
    transfer: TransferModel
    prefill_seconds: Callable[[list[int]], float]
    kv_tokens: int
    most_running: int
    step_tokens: int


def engine_kind(profile: Profile, cluster: Cluster, features: Features) -> EngineKind:
    """Return the kind of engine that this profile describes."""
    transfer = TransferModel(profile)
    return EngineKind(
        StepTimes(profile, cluster.lookup_seconds if features.speculation != "off" else 0.0),
        transfer,
        # Prefills that were not measured take no time; `gaps` reports this with every result.
        transfer.prefill_seconds if profile.prefills else lambda lengths: 0.0,
        profile.kv_cache_tokens,
        cluster.running,
        cluster.step_tokens,
    )


def gaps(profiles: Mapping[int, Profile]) -> list[str]:
    """Return a sentence for each gap of the profiles, which a simulation counts as free or cannot use."""
    found = []
    for size, profile in sorted(profiles.items()):
        if not profile.prefills:
            found.append(f"TP {size}: prefills are not profiled and take no time here")
        if not profile.weight_load_seconds:
            found.append(f"TP {size}: weight loads are not profiled and take no time here")
        if not profile.kv_bytes_per_second:
            found.append(f"TP {size}: KV transfers are not profiled; moved samples are computed again")
    return found
