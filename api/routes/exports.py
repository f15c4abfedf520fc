"""Routes for exports: whole tables as files."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.fields import RunUid
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.read.export import MEDIA_TYPES, Format, RunTable, Source, encode, run_source, runs_source
from rhyme_openrlhf.api.store.lookup import find_run

router = APIRouter(prefix="/export", tags=["export"], responses=documented(401, 403, 422, 429, 503))

Form = Annotated[Format, Query(alias="format", description="The file's format.")]
_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The table as a file.",
        "content": {
            "text/csv": {"schema": {"type": "string"}},
            "application/json": {"schema": {"type": "array", "items": {"type": "object"}}},
            MEDIA_TYPES["parquet"]: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.get("/runs", response_class=StreamingResponse, responses=_FILE, summary="Export the table of runs")
def export_runs(who: auth.Viewer, service: ServiceDep, form: Form = "csv") -> StreamingResponse:
    """Export all runs, including archived ones, the oldest first."""
    return _file(service, runs_source(), form, "runs")


@router.get(
    "/runs/{uid}/{table}",
    response_class=StreamingResponse,
    responses={**_FILE, **documented(404)},
    summary="Export a run's table",
)
def export_run(
    uid: RunUid, table: RunTable, who: auth.Viewer, service: ServiceDep, form: Form = "csv"
) -> StreamingResponse:
    """Export the steps, metrics, intervals (bubble timeline), engine steps or moves of one run."""
    with service.database.reading() as session:
        run_id = find_run(session, uid).id
    return _file(service, run_source(table, run_id), form, f"{uid}-{table}")


def _file(service: Service, source: Source, form: Format, name: str) -> StreamingResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}
    return StreamingResponse(encode(source, service.database, form), media_type=MEDIA_TYPES[form], headers=headers)
