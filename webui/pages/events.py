"""The page `/runs/<uid>/events`: what happened, when, and which process reported it?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.http.fields import Cursor, RunUid
from rhyme_openrlhf.api.read.events import EventFilter, Level, find_events, kinds_of, sources_of
from rhyme_openrlhf.api.store.bounds import NO_NUL
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.record import KIND_LENGTH, SOURCE_LENGTH, RawEvent
from rhyme_openrlhf.webui.pages.rendering import Page, PageDep, toggled, url_with, whole_number
from rhyme_openrlhf.webui.pages.run import attempts_of, run_context
from rhyme_openrlhf.webui.run.event_words import level_of, sentence

router = APIRouter(include_in_schema=False)

ROWS = 50
# Longest event shown as JSON; longer ones (a command, the end of a log) are cut here and complete in the API.
JSON_LENGTH = 20_000

Kinds = Annotated[list[Annotated[str, Query(max_length=KIND_LENGTH, pattern=NO_NUL)]], Query(max_length=32)]
Source = Annotated[str, Query(max_length=SOURCE_LENGTH, pattern=NO_NUL)]
Word = Annotated[str, Query(max_length=10, pattern=NO_NUL)]


@dataclass(frozen=True)
class EventLine:
    """A row of the table. `step_url`: the event's step in the timeline, or ""."""

    id: int
    time: float
    source: str
    kind: str
    attempt: int
    step: int | None
    step_url: str
    text: str
    level: str
    json: str


class Asked(BaseModel):
    """The query parameters as the form sends them: a field without a choice is empty."""

    kind: Kinds = []
    source: Source = ""
    level: Word = ""
    attempt: Word = ""
    cursor: Cursor = None

    @property
    def wanted(self) -> EventFilter:
        """The filter; unknown values of a choice are ignored."""
        return EventFilter(
            kinds=tuple(self.kind),
            sources=(self.source,) if self.source else (),
            attempt=whole_number(self.attempt),
            level=cast(Level, self.level) if self.level in get_args(Level) else None,
        )


AskedQuery = Annotated[Asked, Query()]


@router.get("/runs/{uid}/events")
def events_page(uid: RunUid, page: PageDep, asked: AskedQuery) -> HTMLResponse:
    """Render the events that match the filter, the newest first; the address holds the whole filter."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        context = run_context(page, session, run)
        table = _table(page, session, run, asked)
        attempts = attempts_of(session, run)
        sources = sources_of(session, run)
    return page.render("events.html", uid=uid, **context, **table, attempts=attempts, sources=sources)


@router.get("/ui/runs/{uid}/parts/events")
def events_table(uid: RunUid, page: PageDep, asked: AskedQuery) -> HTMLResponse:
    """Render the table alone, for reloading it in an open page."""
    with page.service.database.reading() as session:
        run = find_run(session, uid)
        table = _table(page, session, run, asked)
    return page.render("parts/events_table.html", uid=uid, **table)


def _table(page: Page, session: Session, run: Run, asked: Asked) -> dict[str, Any]:
    wanted = asked.wanted
    rows, following = find_events(session, run, wanted, "desc", ROWS, asked.cursor)
    query = page.request.query_params.multi_items()
    here = f"/runs/{run.uid}/events"
    return {
        "lines": [_line(event, number, run.uid) for event, number in rows],
        "kinds": [
            (one, one in asked.kind, url_with(here, query, {"kind": toggled(asked.kind, one), "cursor": None}))
            for one in sorted({*kinds_of(session, run), *asked.kind})
        ],
        "asked": asked,
        "is_filtered": wanted != EventFilter(),
        "all_url": here,
        "next_url": url_with(here, query, {"cursor": following}) if following else None,
        "first_url": url_with(here, query, {"cursor": None}) if asked.cursor else None,
        "piece_url": url_with(f"/ui/runs/{run.uid}/parts/events", query, {}),
    }


def _line(event: RawEvent, attempt: int, uid: str) -> EventLine:
    body = event.content()
    step = body.get("step") if isinstance(body.get("step"), int) else None
    whole = json.dumps(body, indent=2, ensure_ascii=False)
    return EventLine(
        id=event.id,
        time=event.time,
        source=event.source,
        kind=event.kind,
        attempt=attempt,
        step=step,
        step_url=f"/runs/{uid}/timeline?step={step}" if step is not None else "",
        text=sentence(event.kind, body),
        level=level_of(event.kind, body),
        json=whole if len(whole) <= JSON_LENGTH else f"{whole[:JSON_LENGTH]}\n…",
    )
