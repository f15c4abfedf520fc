"""The page `/runs/<uid>/logs`: what did each process write?

The page lists the files. Its script (`static/js/logs.js`) reads, follows and searches them through the API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.read.log_files import LogError, LogFileView, list_logs, logs_of_attempt
from rhyme_openrlhf.api.read.log_search import SEARCH_LENGTH
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.lookup import NotFoundError, find_run
from rhyme_openrlhf.webui.pages.rendering import PageDep, whole_number
from rhyme_openrlhf.webui.pages.run import attempts_of, run_context

router = APIRouter(include_in_schema=False)
DRIVER = "driver.log"

Word = Annotated[str, Query(max_length=20, pattern=NO_NUL)]
Name = Annotated[str, Query(max_length=1000, pattern=NO_NUL)]
Text = Annotated[str, Query(max_length=SEARCH_LENGTH, pattern=NO_NUL)]


@dataclass(frozen=True)
class LogLine:
    """A file in the list. `title`: the process; `stream`: output or errors; `href`: the address that opens it."""

    file: LogFileView
    title: str
    stream: str
    href: str


@router.get("/runs/{uid}/logs")
def logs_page(
    uid: RunUid,
    page: PageDep,
    launching: LaunchingDep,
    attempt: Word = "",
    file: Name = "",
    q: Text = "",
    at: Word = "",
) -> HTMLResponse:
    """Render an attempt's log files and the text of one of them; the address holds file and search."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = run_context(page, session, run)
        attempts = attempts_of(session, run)
    numbers = [one.number for one in attempts]
    asked = whole_number(attempt)
    number = asked if asked is not None and asked in numbers else max(numbers, default=0)
    problem = ""
    files: list[LogFileView] = []
    try:
        if number:
            with page.service.database.reading() as session:
                logs = logs_of_attempt(session, uid, number, readable_roots(launching))
            files = list_logs(logs)
    except (LogError, NotFoundError) as error:
        problem = str(error)
    files.sort(key=lambda one: (one.name != DRIVER, one.process or "~", one.name))
    chosen = next((one for one in files if one.name == file), files[0] if files and not file else None)
    return page.render(
        "logs.html",
        uid=uid,
        **context,
        attempts=attempts,
        attempt=number,
        lines=[_line(page, one, number if attempt else None) for one in files],
        chosen=chosen,
        asked_file=file,
        q=q,
        at=at if whole_number(at) is not None else "",
        problem=problem,
        api=f"/api/v1/runs/{uid}/attempts/{number}",
        path=quote(chosen.name) if chosen else "",
    )


def _line(page: PageDep, file: LogFileView, attempt: int | None) -> LogLine:
    path, _, suffix = file.name.rpartition(".")
    stream = {"out": "output", "err": "errors"}.get(suffix, "")
    title = "driver" if file.name == DRIVER else file.process or (path if stream else file.name)
    href = page.url_with(file=file.name, attempt=attempt, at=None)
    return LogLine(file, title, stream, href)
