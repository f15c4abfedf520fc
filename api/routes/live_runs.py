"""Route for the live table of runs."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sse_starlette import EventSourceResponse

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.event_stream import LiveResponse
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.live.streams import follow_runs

router = APIRouter(prefix="/live", tags=["runs"], responses=documented(401, 403, 429, 503))


@router.get(
    "/runs",
    summary="Runs, live",
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "Server-sent events: `id` is a run's uid, `data` its RunSummary.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def stream_runs(who: auth.Viewer, service: ServiceDep) -> Response:
    """Stream the newest runs that are not archived, and each run again when it has changed."""
    return LiveResponse(service.limits.streams, service.metrics.streams, follow_runs(service.live, who.caller))
