"""Access of routes to the object that starts runs (`app.state.launching`), and the dispatcher as background work."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from rhyme_openrlhf.api.access.service import Background, Service
from rhyme_openrlhf.api.http.problems import ProblemError
from rhyme_openrlhf.api.launch.actions import Launching, LaunchSettings
from rhyme_openrlhf.api.launch.dispatcher import UNKNOWN, Dispatcher
from rhyme_openrlhf.api.launch.lease import Candidate, Lease
from rhyme_openrlhf.api.store.database import DatabaseError

logger = logging.getLogger(__name__)

NO_CLUSTER = "this service cannot start runs: it was started without a Ray cluster"


async def launching(request: Request) -> Launching:
    """Return the launching object; an app without one (in tests) gets one that starts no runs."""
    found: Launching | None = getattr(request.app.state, "launching", None)
    if found is None:
        settings = request.app.state.service.settings
        found = Launching(LaunchSettings(), settings.data_path(), settings.root_paths(), settings.base_url())
    return found


async def starting(request: Request) -> Launching:
    """Return the launching object if it can start runs, else raise ProblemError 409, because a retry does not help."""
    found = await launching(request)
    if found.launcher is None:
        raise ProblemError(409, NO_CLUSTER, code="no_cluster")
    return found


LaunchingDep = Annotated[Launching, Depends(launching)]
StartingDep = Annotated[Launching, Depends(starting)]


def readable_roots(of: Launching) -> tuple[Path, ...]:
    """Return the folders below which run directories may be read: the roots and the folder of runs started here."""
    return (*of.roots, of.runs_directory.resolve())


def dispatching(
    launching: Launching, at_end: Callable[[int], None] = lambda active: None, say: Callable[[str], None] = logger.info
) -> Background:
    """Return the dispatcher as background work of the app.

    At shutdown, `at_end` gets the number of active runs (or UNKNOWN). `say` gets a message when another service
    dispatches, and when this service takes over.
    """

    @asynccontextmanager
    async def background(service: Service) -> AsyncIterator[None]:
        lease = Lease(service.database, Candidate(service.uid, launching.launcher is not None))
        forget = service.callers.forget
        dispatcher = Dispatcher(service.database, launching, lease, service.news.publish, forget, say=say)
        dispatcher.start()
        try:
            yield
        finally:
            await run_in_threadpool(dispatcher.stop)
            try:
                at_end(await run_in_threadpool(dispatcher.active))
            except (SQLAlchemyError, DatabaseError):
                at_end(UNKNOWN)

    return background
