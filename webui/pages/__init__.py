"""One module a page: what it asks, which template it fills, and the pieces that it fetches again.

`PAGES` are their routers, in the order in which routes are looked for: fixed addresses before those with a `{uid}`.
"""

from __future__ import annotations

from fastapi import APIRouter

from rhyme_openrlhf.webui.pages import learning, run, runs, scheduling, sign_in, speculation, timeline

PAGES: tuple[APIRouter, ...] = (
    sign_in.router,
    runs.router,
    run.router,
    timeline.router,
    speculation.router,
    scheduling.router,
    learning.router,
)
