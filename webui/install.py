"""Add the dashboard to the service: pages, partial pages, figures, static files, and error pages.

Invariants:

- Addresses below `/api/` keep the API's own responses.
- A page for a reader who is not signed in responds 303 to /sign-in, which then continues to the page.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from starlette.routing import BaseRoute

from rhyme_openrlhf.api.app import templates
from rhyme_openrlhf.webui.pages import PAGES, figures
from rhyme_openrlhf.webui.pages.rendering import render_public
from rhyme_openrlhf.webui.site import assets

# Addresses for scripts and machines, which read problem details.
_NO_PAGES = ("/api/", "/ui/", "/static/", "/healthz", "/readyz", "/metrics")
ROUTERS: tuple[APIRouter, ...] = (*PAGES, figures.router)
Handler = Callable[[Request, Any], Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Add the dashboard to the service that `api.app.create_app` made."""
    app.router.routes.extend(routes())
    app.state.templates.update(templates(ROUTERS))
    assets.install(app)
    for kind, handler in list(app.exception_handlers.items()):
        # starlette's WebSocket handlers, which the API does not replace, do not answer a request.
        if not isinstance(kind, type) or not kind.__module__.startswith("fastapi.websockets"):
            app.add_exception_handler(kind, _for_people(handler))  # type: ignore[arg-type]


@functools.cache
def routes() -> tuple[BaseRoute, ...]:
    """Return the dashboard's routes. The result is cached as that of `api.app.routes`."""
    all_of_them = APIRouter()
    for router in ROUTERS:
        all_of_them.include_router(router)
    return tuple(all_of_them.routes)


def is_page(path: str) -> bool:
    """Return True if a person looks at the response."""
    return not path.startswith(_NO_PAGES)


def _for_people(handler: Handler) -> Handler:
    """Wrap `handler` so that its response is an HTML page where a person looks at it."""

    async def handle(request: Request, error: Exception) -> Response:
        response = await handler(request, error)
        if not is_page(request.url.path) or request.method not in ("GET", "HEAD"):
            return response
        if response.status_code == 401:
            following = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            # The fragment, in which the first link carries its token, never leaves the browser.
            return RedirectResponse(f"/sign-in?{urlencode({'next': following})}", 303)
        problem = json.loads(bytes(response.body))
        page = render_public("error.html", response.status_code, problem=problem)
        for name, value in response.headers.items():
            if name not in ("content-length", "content-type"):
                page.headers[name] = value
        return page

    return handle
