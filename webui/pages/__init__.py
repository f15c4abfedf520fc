"""One module a page: what it asks, which template it fills, and the pieces that it fetches again.

`PAGES` are their routers, in the order in which routes are looked for: fixed addresses before those with a `{uid}`.
"""

from __future__ import annotations

from fastapi import APIRouter

from rhyme_openrlhf.webui.pages import events, logs, run, runs, samples, sign_in, system

PAGES: tuple[APIRouter, ...] = (
    sign_in.router,
    runs.router,
    run.router,
    samples.router,
    system.router,
    logs.router,
    events.router,
)
