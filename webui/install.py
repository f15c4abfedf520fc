"""Puts the dashboard into the service: pages, pieces, figures, static files, and errors as pages.

Invariants: addresses below `/api/` keep the API's own answers; a page that nobody is signed in for answers 303 to
/sign-in, which remembers where to go on.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from rhyme_openrlhf.api.app import templates
from rhyme_openrlhf.webui.pages import PAGES, figures
from rhyme_openrlhf.webui.pages.rendering import render_public
from rhyme_openrlhf.webui.site import assets

# What scripts and machines ask: they read problem details.
_NO_PAGES = ("/api/", "/ui/", "/static/", "/healthz", "/readyz", "/metrics")
Handler = Callable[[Request, Any], Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Add the dashboard to the service that `api.app.create_app` made."""
    routers = (*PAGES, figures.router)
    for router in routers:
        app.include_router(router)
    app.state.templates.update(templates(routers))
    assets.install(app)
    for kind, handler in list(app.exception_handlers.items()):
        # Those of starlette that the API does not replace (WebSockets) are no answers to a request.
        if not isinstance(kind, type) or not kind.__module__.startswith("fastapi.websockets"):
            app.add_exception_handler(kind, _for_people(handler))  # type: ignore[arg-type]


def is_page(path: str) -> bool:
    """Whether a person looks at the answer."""
    return not path.startswith(_NO_PAGES)


def _for_people(handler: Handler) -> Handler:
    """What `handler` answers, as a page where a person looks at it."""

    async def handle(request: Request, error: Exception) -> Response:
        response = await handler(request, error)
        if not is_page(request.url.path) or request.method not in ("GET", "HEAD"):
            return response
        if response.status_code == 401:
            following = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            # The fragment, in which the first link carries its token, stays with the browser.
            return RedirectResponse(f"/sign-in?{urlencode({'next': following})}", 303)
        problem = json.loads(bytes(response.body))
        page = render_public("error.html", response.status_code, problem=problem)
        for name, value in response.headers.items():
            if name not in ("content-length", "content-type"):
                page.headers[name] = value
        return page

    return handle
