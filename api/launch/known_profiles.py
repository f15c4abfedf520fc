"""The profile of a model's engines that this machine already has: the one a run names, or one in the profile cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rhyme_openrlhf.api.launch.spec_paths import profile_file
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.profile import Profile, ProfileError, folder
from rhyme_openrlhf.run.model_shape import ModelShape
from rhyme_openrlhf.settings.latency import AUTO, NONE


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
