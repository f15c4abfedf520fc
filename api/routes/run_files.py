"""Routes for all files of a run's attempts: their list, and an archive of them. `api/read/run_files.py` finds them."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.fields import AttemptNumber, RunUid
from rhyme_openrlhf.api.http.problems import documented
from rhyme_openrlhf.api.launch.actions import Launching
from rhyme_openrlhf.api.read.run_files import (
    KINDS,
    USUAL,
    Kind,
    Place,
    RunFileView,
    archive,
    list_files,
    places_of_attempt,
)
from rhyme_openrlhf.api.routes.logs import found
from rhyme_openrlhf.api.store.bounds import View

router = APIRouter(
    prefix="/runs/{uid}/attempts/{number}", tags=["files"], responses=documented(401, 403, 404, 422, 429, 503)
)


class RunFiles(View):
    """The files of an attempt, and where they are on the service's machine."""

    directory: str
    checkpoints: str = Field(description="Where checkpoints are; empty if there are none that the service may read.")
    files: list[RunFileView]


@router.get("/files", summary="List files")
def get_files(
    uid: RunUid, number: AttemptNumber, who: auth.Viewer, service: ServiceDep, launching: LaunchingDep
) -> RunFiles:
    """List the files of one attempt: record, logs, samples, history and checkpoints."""
    places = _places(service, launching, uid, number)
    by_name = {place.name: str(place.path) for place in places}
    checkpoints = by_name.get("checkpoints", "")
    return RunFiles(directory=by_name[""], checkpoints=checkpoints, files=list_files(places))


@router.get(
    "/archive",
    summary="Download files",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
)
def download_files(
    uid: RunUid,
    number: AttemptNumber,
    who: auth.Operator,
    service: ServiceDep,
    launching: LaunchingDep,
    kind: Annotated[
        list[Kind], Query(max_length=len(KINDS), description="Kinds of files; without it record, logs and samples.")
    ] = [],  # noqa: B006 (FastAPI copies it)
) -> StreamingResponse:
    """Download files of one attempt as a tar archive (.tar.gz), made while it is sent.

    For operators: records of older versions may hold what newer ones hide.
    """
    places = _places(service, launching, uid, number)
    folder = f"{uid}-{number}"
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(folder, safe='')}.tar.gz"}
    content = archive(places, frozenset(kind or USUAL), folder)
    return StreamingResponse(content, media_type="application/gzip", headers=headers)


def _places(service: Service, launching: Launching, uid: str, number: int) -> list[Place]:
    with found(), service.database.reading() as session:
        return places_of_attempt(session, uid, number, readable_roots(launching))
