"""Pages of the dashboard, one module per page: its queries, its template, and the parts that it reloads.

`PAGES` are the routers in matching order: fixed addresses come before those with a `{uid}`.
"""

from __future__ import annotations

from fastapi import APIRouter

from rhyme_openrlhf.webui.pages import (
    api_docs,
    cluster,
    compare,
    config,
    events,
    experiment,
    learning,
    logs,
    new_run,
    panels,
    prompt_groups,
    run,
    runs,
    samples,
    scheduling,
    settings,
    sign_in,
    speculation,
    system,
    timeline,
    webhooks,
)

PAGES: tuple[APIRouter, ...] = (
    sign_in.router,
    api_docs.router,
    runs.router,
    new_run.router,
    compare.router,
    experiment.router,
    cluster.router,
    settings.router,
    webhooks.router,
    run.router,
    timeline.router,
    speculation.router,
    scheduling.router,
    learning.router,
    panels.router,
    samples.router,
    prompt_groups.router,
    system.router,
    logs.router,
    config.router,
    events.router,
)
