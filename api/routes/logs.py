"""Routes for logs of a run's attempts: list, read a part, follow. `api/read/log_files.py` restricts the files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Response
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse
from sse_starlette import EventSourceResponse

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.launching import LaunchingDep, readable_roots
from rhyme_openrlhf.api.access.service import Service, ServiceDep
from rhyme_openrlhf.api.http.event_stream import LiveResponse, documented_stream, last_id
from rhyme_openrlhf.api.http.fields import AttemptNumber, RunUid
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.launch.actions import Launching
from rhyme_openrlhf.api.live.streams import follow_pieces
from rhyme_openrlhf.api.read.log_files import (
    MAX_CHUNK,
    LogChunk,
    LogError,
    LogFileView,
    list_logs,
    logs_of_attempt,
    open_log,
    read_blocks,
    read_range,
    read_tail,
)
from rhyme_openrlhf.api.read.log_search import SEARCH_LENGTH, LogMatches, search
from rhyme_openrlhf.api.store.bounds import INT64, NO_NUL

router = APIRouter(
    prefix="/runs/{uid}/attempts/{number}", tags=["logs"], responses=documented(401, 403, 404, 422, 429, 503)
)

# Several pages of a terminal.
TAIL_LINES = 200

LogName = Annotated[
    str,
    PathParameter(
        max_length=1000, pattern=NO_NUL, description="A name from the list of logs.", examples=["driver.log"]
    ),
]


@router.get("/logs", summary="List logs")
def get_logs(
    uid: RunUid, number: AttemptNumber, who: auth.Viewer, service: ServiceDep, launching: LaunchingDep
) -> list[LogFileView]:
    """List the log files of one attempt, by name."""
    return list_logs(_directory(service, launching, uid, number))


@router.get("/logs/{name:path}", summary="Read a log")
def get_log(
    uid: RunUid,
    number: AttemptNumber,
    name: LogName,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    start: Annotated[int | None, Query(ge=0, le=INT64, description="First byte; without it: the last lines.")] = None,
    length: Annotated[int, Query(ge=1, le=MAX_CHUNK, description="Most bytes from `start` on.")] = MAX_CHUNK,
    tail: Annotated[int, Query(ge=1, le=100_000, description="Number of last lines.")] = TAIL_LINES,
    before: Annotated[int | None, Query(ge=0, le=INT64, description="The last lines before this byte.")] = None,
) -> LogChunk:
    """Return the last lines of a log, or a range of its bytes."""
    with _log(_directory(service, launching, uid, number), name) as file:
        return read_tail(file, tail, before) if start is None else read_range(file, start, length)


@router.get("/log-search/{name:path}", summary="Search a log")
def search_log(
    uid: RunUid,
    number: AttemptNumber,
    name: LogName,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    text: Annotated[str, Query(min_length=1, max_length=SEARCH_LENGTH, pattern=NO_NUL)],
    start: Annotated[int, Query(ge=0, le=INT64, description="First byte of a line: the previous `scanned_to`.")] = 0,
) -> LogMatches:
    """Find lines with a text, ignoring case. A large log is searched in parts: continue from `scanned_to`."""
    with _log(_directory(service, launching, uid, number), name) as file:
        return search(file, text, start)


@router.get(
    "/log-files/{name:path}",
    summary="Download a log",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}}}},
)
def download_log(
    uid: RunUid,
    number: AttemptNumber,
    name: LogName,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
) -> StreamingResponse:
    """Download the whole file with its current content."""
    stack = ExitStack()
    file = stack.enter_context(_log(_directory(service, launching, uid, number), name))

    def content() -> Iterator[bytes]:
        with stack:
            yield from read_blocks(file)

    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name.replace('/', '-'), safe='')}"}
    return StreamingResponse(content(), media_type="text/plain; charset=utf-8", headers=headers)


@router.get(
    "/log-stream/{name:path}",
    summary="Follow a log",
    response_class=EventSourceResponse,
    responses=documented_stream("`id` is the end of a piece, `data` a LogChunk. First an event `open`."),
)
def stream_log(
    uid: RunUid,
    number: AttemptNumber,
    name: LogName,
    who: auth.Viewer,
    service: ServiceDep,
    launching: LaunchingDep,
    start: Annotated[int | None, Query(ge=0, le=INT64, description="First byte; without it: the last lines.")] = None,
    tail: Annotated[int, Query(ge=1, le=100_000)] = TAIL_LINES,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> Response:
    """Stream a log as it is written; a truncated file is read again from its start."""
    logs = _directory(service, launching, uid, number)
    begin = last_id(last_event_id, start)
    with _log(logs, name) as file:
        if begin is None:
            begin = read_tail(file, tail).start
    read = partial(_piece, logs, name)
    return LiveResponse(
        service.limits.streams,
        who.holder,
        service.metrics.streams,
        follow_pieces(service.live, who.caller, logs / name, begin, read),
    )


def _piece(logs: Path, name: str, offset: int) -> dict[str, Any] | None:
    try:
        with open_log(logs, name) as file:
            chunk = read_range(file, offset, MAX_CHUNK)
            if chunk.size < offset:
                chunk = read_range(file, 0, MAX_CHUNK)
    except LogError:  # deleted meanwhile; it may be created again
        return None
    return chunk.model_dump() if chunk.end > chunk.start else None


def _directory(service: Service, launching: Launching, uid: str, number: int) -> Path:
    with found(), service.database.reading() as session:
        return logs_of_attempt(session, uid, number, readable_roots(launching))


@contextmanager
def _log(logs: Path, name: str) -> Iterator[BinaryIO]:
    """Open a log. Raises ProblemError (404)."""
    with found(), open_log(logs, name) as file:
        yield file


@contextmanager
def found() -> Iterator[None]:
    """Convert missing files to ProblemError (404)."""
    try:
        yield
    except LogError as error:
        raise ProblemError(404, str(error)) from error
