"""One module a page: what it asks, which template it fills, and the pieces that it fetches again.

`PAGES` are their routers, in the order in which routes are looked for: fixed addresses before those with a `{uid}`.
"""

from __future__ import annotations

from fastapi import APIRouter

from rhyme_openrlhf.webui.pages import (
    cluster,
    compare,
    config,
    events,
    learning,
    logs,
    new_run,
    run,
    runs,
    samples,
    scheduling,
    settings,
    sign_in,
    speculation,
    system,
    timeline,
)

PAGES: tuple[APIRouter, ...] = (
    sign_in.router,
    runs.router,
    new_run.router,
    compare.router,
    cluster.router,
    settings.router,
    run.router,
    timeline.router,
    speculation.router,
    scheduling.router,
    learning.router,
    samples.router,
    system.router,
    logs.router,
    config.router,
    events.router,
)
