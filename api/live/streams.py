"""Live streams (server-sent events): stored events of a run, a log that is being written, and changes of runs.

Invariants:

- An event's id is its row's id, and a log piece's id is its end. A client that reconnects with Last-Event-ID misses
  nothing and gets nothing twice. (Ids of one run grow in the order of commits, because ingestion locks the run.)
- Streams are counted. They end after `STREAM_SECONDS` (browsers reconnect by themselves), and when their user may no
  longer read.

A stream sleeps until something has changed. News of this service's own events wakes it at once. Other changes are found
by polling that the streams share (`LiveLooks`), so a hundred idle streams load the database no more than one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anyio.to_thread import run_sync
from sqlalchemy import func, select

from rhyme_openrlhf.api.live.shared_polling import News, SharedLook, Sleeper
from rhyme_openrlhf.api.read.runs import RunFilter, list_runs
from rhyme_openrlhf.api.store.credentials import Caller, still_hold
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Attempt, Run
from rhyme_openrlhf.api.store.record import RawEvent, of_kinds

# Events per query: about 1 MB.
BATCH = 1000
STREAM_SECONDS = 3600.0
# Runs that a page of the table watches: those it shows, and room for new ones.
WATCHED_RUNS = 200
# Time until a revoked token stops reading.
CHECK_SECONDS = 5.0


class Message(NamedTuple):
    """A message of a stream; `event` is its kind if it is not data."""

    id: str
    data: str
    event: str | None = None


# State of a file that changes when it is written, truncated or replaced.
_FileState = tuple[int, int, int]


async def follow_events(
    live: LiveLooks, caller: Caller, run_id: int, after: int | None, kinds: Sequence[str], sources: Sequence[str]
) -> AsyncGenerator[Message]:
    """Yield a run's events after `after` (None: only new ones) as soon as they are stored."""
    loop = asyncio.get_running_loop()
    with _stream(live, caller) as stream:

        def wake_up() -> None:
            loop.call_soon_threadsafe(stream.wake)

        unsubscribe = live.news.subscribe(run_id, wake_up)
        try:
            with live.events.watch(run_id, lambda _: stream.wake(), stream.end):
                if after is None:
                    after = await run_sync(_newest, live.database, run_id)
                # A client that loses the connection before the first event still knows where to continue.
                yield Message(event="open", id=str(after), data="{}")
                while await stream.look_due():
                    while True:
                        rows = await run_sync(_events_after, live.database, run_id, after, kinds, sources)
                        for row in rows:
                            after = row["id"]
                            yield Message(id=str(after), data=json.dumps(row))
                        if len(rows) < BATCH:
                            break
        finally:
            unsubscribe()


async def follow_pieces(
    live: LiveLooks, caller: Caller, file: Path, start: int, read: Callable[[int], dict[str, Any] | None]
) -> AsyncGenerator[Message]:
    """Yield the pieces of `file` from byte `start` on. `read(offset)` returns the next piece with its "end", or
    None.
    """
    with _stream(live, caller) as stream, live.files.watch(file, lambda _: stream.wake(), stream.end):
        yield Message(event="open", id=str(start), data="{}")
        offset = start
        while await stream.look_due():
            while (piece := await run_sync(read, offset)) is not None:
                offset = piece["end"]
                yield Message(id=str(offset), data=json.dumps(piece))


async def follow_runs(live: LiveLooks, caller: Caller) -> AsyncGenerator[Message]:
    """Yield the newest runs, then each one again when it has changed. The id is the run's uid.

    The stream shows a state, not a history: a client that reconnects gets all of it and has missed nothing.
    """
    shown: Mapping[str, str] = {}
    with _stream(live, caller) as stream, live.runs.watch(None, lambda _: stream.wake(), stream.end):
        while await stream.look_due():
            # None until the first query, which wakes the stream again.
            rows = live.runs.value(None) or {}
            for uid, text in rows.items():
                if shown.get(uid) != text:
                    yield Message(id=uid, data=text)
            shown = rows


class LiveLooks:
    """Objects that the streams of a service share: the store, its news, and one poll for each kind of change."""

    def __init__(self, database: Database, news: News, poll_s: float) -> None:
        self.database = database
        self.news = news
        self.runs: SharedLook[None, dict[str, str]] = SharedLook(lambda _: {None: _newest_runs(database)}, poll_s)
        self.events: SharedLook[int, int] = SharedLook(partial(_newest_events, database), poll_s)
        self.files: SharedLook[Path, _FileState | None] = SharedLook(_file_states, poll_s)
        self.rights: SharedLook[Caller, bool] = SharedLook(partial(_rights, database), CHECK_SECONDS)


@contextmanager
def _stream(live: LiveLooks, caller: Caller) -> Iterator[Sleeper]:
    """Provide a stream that ends after `STREAM_SECONDS`, or when its user loses the right to read."""
    stream = Sleeper()
    timer = asyncio.get_running_loop().call_later(STREAM_SECONDS, stream.end)

    def checked(holds: bool) -> None:
        if not holds:
            stream.end()

    try:
        with live.rights.watch(caller, checked, stream.end):
            yield stream
    finally:
        timer.cancel()


def _rights(database: Database, callers: Set[Caller]) -> dict[Caller, bool]:
    with database.reading() as session:
        return still_hold(session, callers, time.time())


def _newest_runs(database: Database) -> dict[str, str]:
    with database.reading() as session:
        page, _ = list_runs(session, RunFilter(), "created_at", "desc", WATCHED_RUNS, None)
    return {run.uid: run.model_dump_json() for run in page}


def _newest_events(database: Database, run_ids: Set[int]) -> dict[int, int]:
    """Return the id of the newest event of each run; ids of one run grow in the order of commits."""
    newest = select(func.max(RawEvent.id)).where(RawEvent.run_id == Run.id).scalar_subquery()
    with database.reading() as session:
        found = session.execute(select(Run.id, newest).where(Run.id.in_(run_ids)))
        return {run_id: event_id or 0 for run_id, event_id in found}


def _file_states(files: Set[Path]) -> dict[Path, _FileState | None]:
    return {file: _file_state(file) for file in files}


def _file_state(file: Path) -> _FileState | None:
    try:
        about = file.stat()
    except OSError:  # deleted; it may be created again
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def _newest(database: Database, run_id: int) -> int:
    return _newest_events(database, {run_id}).get(run_id, 0)


def _events_after(
    database: Database, run_id: int, after: int, kinds: Sequence[str], sources: Sequence[str]
) -> list[dict[str, Any]]:
    query = (
        select(RawEvent, Attempt.number)
        .join(Attempt, Attempt.id == RawEvent.attempt_id)
        .where(RawEvent.run_id == run_id, RawEvent.id > after)
        .order_by(RawEvent.id)
        .limit(BATCH)
    )
    if kinds:
        query = query.where(*of_kinds(kinds))
    if sources:
        query = query.where(RawEvent.source.in_(sources))
    with database.reading() as session:
        return [event_row(event, number) for event, number in session.execute(query)]


def event_row(event: RawEvent, attempt: int) -> dict[str, Any]:
    """Return an event as the API shows it; `attempt` is its attempt's number."""
    return {
        "id": event.id,
        "attempt": attempt,
        "source": event.source,
        "sequence": event.sequence,
        "time": event.time,
        "kind": event.kind,
        "body": event.content(),
    }
