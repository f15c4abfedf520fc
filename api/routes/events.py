"""Routes for a run's raw events, paged and live, and for the live table of runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.event_stream import LiveResponse, documented_stream, last_id
from rhyme_openrlhf.api.http.fields import PAGE, Cursor, Limit, RunUid
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.live.streams import event_row, follow_events, follow_runs
from rhyme_openrlhf.api.read.events import EventFilter, Level, find_events
from rhyme_openrlhf.api.read.pagination import Direction
from rhyme_openrlhf.api.store.bounds import INT32, INT64, NO_NUL
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.record import KIND_LENGTH, SOURCE_LENGTH

router = APIRouter(prefix="/runs/{uid}/events", tags=["events"], responses=documented(401, 403, 404, 422, 429, 503))
live = APIRouter(prefix="/live", tags=["runs"], responses=documented(401, 403, 429, 503))

Kinds = Annotated[
    list[Annotated[str, Field(max_length=KIND_LENGTH, pattern=NO_NUL)]],
    Query(max_length=32, description="Only these kinds."),
]
Sources = Annotated[
    list[Annotated[str, Field(max_length=SOURCE_LENGTH, pattern=NO_NUL)]],
    Query(max_length=32, description="Only from these sources."),
]


class EventView(BaseModel):
    """One event; `body` has the fields of its kind (see the documentation of a run's events)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": 17,
                    "attempt": 1,
                    "source": "driver",
                    "sequence": 3,
                    "time": 1760000000.0,
                    "kind": "note",
                    "body": {"level": "info", "text": "engines are up"},
                }
            ]
        }
    )

    id: int
    attempt: int
    source: str
    sequence: int
    time: float
    kind: str
    body: dict[str, Any]


class EventPage(BaseModel):
    """Events in the order of storing."""

    items: list[EventView]
    next_cursor: str | None


@router.get("", summary="Events")
def get_events(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    kind: Kinds = [],  # noqa: B006 (FastAPI copies it)
    source: Sources = [],  # noqa: B006
    attempt: Annotated[int | None, Query(ge=1, le=INT32, description="Only of this attempt.")] = None,
    level: Annotated[Level | None, Query(description="Notes of this level; failures are errors.")] = None,
    direction: Direction = "asc",
    limit: Limit = PAGE,
    cursor: Cursor = None,
) -> EventPage:
    """List the events of all attempts of a run."""
    wanted = EventFilter(tuple(kind), tuple(source), attempt, level)
    with service.database.reading(snapshot=False) as session:
        rows, following = find_events(session, find_run(session, uid), wanted, direction, limit, cursor)
        items = [EventView(**event_row(row, number)) for row, number in rows]
    return EventPage(items=items, next_cursor=following)


@router.get(
    "/stream",
    summary="Events, live",
    response_class=EventSourceResponse,
    responses=documented_stream("`id` is the event's id, `data` an EventView. First an event `open`."),
)
def stream_events(
    uid: RunUid,
    who: auth.Viewer,
    service: ServiceDep,
    kind: Kinds = [],  # noqa: B006
    source: Sources = [],  # noqa: B006
    after: Annotated[int | None, Query(ge=0, le=INT64, description="Begin after this id; 0 for all events.")] = None,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> Response:
    """Stream events as they are stored.

    A client continues with Last-Event-ID. Without it and without `after`, the stream begins with new events.
    """
    with service.database.reading() as session:
        run_id = find_run(session, uid).id
    start = last_id(last_event_id, after)
    return LiveResponse(
        service.limits.streams,
        who.holder,
        service.metrics.streams,
        follow_events(service.live, who.caller, run_id, start, tuple(kind), tuple(source)),
    )


@live.get(
    "/runs",
    summary="Runs, live",
    response_class=EventSourceResponse,
    responses=documented_stream("`id` is a run's uid, `data` its RunSummary."),
)
async def stream_runs(who: auth.Viewer, service: ServiceDep) -> Response:
    """Stream the newest runs that are not archived, and each run again when it has changed."""
    messages = follow_runs(service.live, who.caller)
    return LiveResponse(service.limits.streams, who.holder, service.metrics.streams, messages)
