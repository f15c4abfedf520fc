"""Rendering of pages and their parts: the request's user, the store, and the templates.

A route takes `page: PageDep` and ends with `return page.render("run.html", ...)`. Invariants:

- Only signed-in users see pages; `install.py` redirects everyone else to /sign-in.
- Templates escape all values.
- No cache keeps a page, because a page depends on its reader's role and carries the session's CSRF token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.webui.figures.one_run import FIGURE_TITLES
from rhyme_openrlhf.webui.site import assets, navigation, reading, text

TEMPLATES = Path(__file__).parents[1] / "templates"
HEADERS = {"Cache-Control": "no-store"}


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        # A misspelt name in a template raises an error instead of leaving an empty place.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        static=assets.static_url,
        page_modules=assets.modules("js/page.js"),
        plotly=assets.PLOTLY,
        plotly_style_ids=assets.plotly_style_ids(),
        figure_titles=FIGURE_TITLES,
    )
    filters = (
        text.ago, text.breakable, text.change, text.clock, text.coded, text.compact, text.counted, text.duration,
        text.iso, text.label, text.memory, text.moment, text.number, text.percent, text.ratio, text.short_path,
        text.span, text.whole_options, reading.visible,
    )  # fmt: skip
    environment.filters.update({one.__name__: one for one in filters})
    return environment


ENVIRONMENT = _environment()


@dataclass(frozen=True)
class Page:
    """A request for a page or a part of one. `now`: unix seconds, the same moment for the whole page."""

    request: Request
    service: Service
    who: credentials.Principal
    now: float

    @property
    def may_act(self) -> bool:
        """True if the user may act, so that actions are shown."""
        return self.who.role == "operator"

    def url_with(self, **changes: Any) -> str:
        """Return this page's address with these query parameters replaced; None or an empty value removes one."""
        return url_with(self.request.url.path, self.request.query_params.multi_items(), changes)

    def render(self, template: str, *, uid: str = "", status: int = 200, **context: Any) -> HTMLResponse:
        """Render a template. `uid`: the run whose tabs are shown.

        Besides `context`, templates have `page`, `menu` and `tabs`.
        """
        current = self.request.app.state.templates.get(self.request.scope.get("endpoint"), "")
        menu = navigation.links(navigation.MENU, current, self.may_act)
        tabs = navigation.links(navigation.RUN_TABS, current, self.may_act, uid) if uid else []
        values = {"page": self, "menu": menu, "tabs": tabs, "uid": uid, **context}
        return HTMLResponse(ENVIRONMENT.get_template(template).render(values), status, HEADERS)


def url_with(path: str, given: list[tuple[str, str]], changes: dict[str, Any]) -> str:
    """Return `path` with the query `given` after `changes` (name -> value or list of values)."""
    query = [(name, value) for name, value in given if name not in changes and value != ""]
    for name, value in changes.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        query += [(name, str(one)) for one in values if one not in (None, "")]
    return f"{path}?{urlencode(query)}" if query else path


def toggled(words: list[str], word: str) -> list[str]:
    """Return the words of a choice after a click on one of them."""
    return [one for one in words if one != word] if word in words else [*words, word]


def whole_number(given: str) -> int | None:
    """Return the number that `given` writes in ASCII digits alone, 0 or more; None for anything else.

    A form sends an empty text for a field without a choice, and that is no error.
    """
    # isdigit() accepts digits of every script, and superscripts, which int() refuses.
    return int(given) if given.isascii() and given.isdigit() else None


def _page(request: Request, who: auth.Viewer, service: ServiceDep) -> Page:
    return Page(request, service, who, time.time())


PageDep = Annotated[Page, Depends(_page)]


def _page_or_none(request: Request, who: auth.MaybeViewer, service: ServiceDep) -> Page | None:
    return None if who is None else Page(request, service, who, time.time())


PageOrNone = Annotated[Page | None, Depends(_page_or_none)]


def render_public(template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """Render a page without menu, run and role: the sign-in page or an error."""
    values = {"page": None, "menu": [], "tabs": [], "uid": "", **context}
    return HTMLResponse(ENVIRONMENT.get_template(template).render(values), status, HEADERS)
