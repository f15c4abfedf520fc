"""The page `/runs/<uid>/system`: how loaded are the run's machines?"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.system import nodes_of
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.record import NODE_LENGTH
from rhyme_openrlhf.webui.figures.subjects.system import FIGURES
from rhyme_openrlhf.webui.pages.rendering import PageDep
from rhyme_openrlhf.webui.pages.run import run_context

router = APIRouter(include_in_schema=False)
WINDOWS: tuple[tuple[str, str], ...] = (
    ("", "Whole run"),
    ("24", "Last day"),
    ("6", "Last 6 hours"),
    ("1", "Last hour"),
)


@router.get("/runs/{uid}/system")
def system_page(
    uid: RunUid,
    page: PageDep,
    node: Annotated[str, Query(max_length=NODE_LENGTH, pattern=NO_NUL)] = "",
    hours: Annotated[str, Query(max_length=10, pattern=r"^[0-9.]*$")] = "",
) -> HTMLResponse:
    """Render the figures of one machine or of all; the address holds both choices."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = run_context(page, session, run)
        nodes = nodes_of(session, run)
    window = hours if hours in dict(WINDOWS) else ""
    chosen = {name: value for name, value in (("node", node), ("hours", window)) if value}
    return page.render(
        "system.html",
        uid=uid,
        **context,
        nodes=nodes,
        node=node,
        hours=window,
        windows=WINDOWS,
        figures=[figure.name for figure in FIGURES],
        query=f"?{urlencode(chosen)}" if chosen else "",
    )
