"""Earlier runs of this service that a spec names in --history.earlier, by uid. Pure.

A job gets the run's directory, which has one directory of each attempt (actions.py).
"""

from __future__ import annotations

from pathlib import Path

from rhyme_openrlhf.api.launch.spec import Arguments, merged
from rhyme_openrlhf.api.launch.spec_paths import RUN_UID

GROUP, NAME = "history", "earlier"


def named_uids(arguments: Arguments) -> list[str]:
    """Return the uids of runs that checked arguments name."""
    return [part for part in _parts(arguments) if RUN_UID.fullmatch(part)]


def with_directories(arguments: Arguments, runs_directory: Path) -> Arguments:
    """Return checked arguments with the directories of the runs that they name by uid."""
    uids = named_uids(arguments)
    if not uids:
        return arguments
    places = ",".join(str(runs_directory / part) if part in uids else part for part in _parts(arguments))
    return merged(arguments, {GROUP: {NAME: places}})


def _parts(arguments: Arguments) -> list[str]:
    return [part.strip() for part in str(arguments.get(GROUP, {}).get(NAME, "")).split(",")]
