"""How routes get at what starts runs (`app.state.launching`), and at what runs that were started here have written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from rhyme_openrlhf.api.http.problems import ProblemError
from rhyme_openrlhf.api.launch.actions import Launching, LaunchSettings


async def launching(request: Request) -> Launching:
    """What starting runs needs; where nobody has said (a test's app), a service that starts none."""
    found: Launching | None = getattr(request.app.state, "launching", None)
    if found is None:
        settings = request.app.state.service.settings
        found = Launching(LaunchSettings(), settings.data_path(), settings.root_paths(), settings.base_url())
    return found


async def starting(request: Request) -> Launching:
    """The same, where runs can be started. Raises ProblemError (409: trying again does not help)."""
    found = await launching(request)
    if found.launcher is None:
        raise ProblemError(409, "this service starts no runs: it was started without a Ray cluster")
    return found


LaunchingDep = Annotated[Launching, Depends(launching)]
StartingDep = Annotated[Launching, Depends(starting)]


def readable_roots(of: Launching) -> tuple[Path, ...]:
    """Below what a run directory may be read: the roots, and where runs that are started here write, always."""
    return (*of.roots, of.runs_directory.resolve())
