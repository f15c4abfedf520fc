"""Profiles that come with the package: derived from what papers print, for those who have not measured their own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import Profile, ProfileError

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
