"""Import of a whole run directory: the store then has the same rows as if the run had reported them live.

Invariants:

- Importing again changes nothing.
- Stored events of the attempt are kept if they have no gaps. With gaps, they are replaced in one transaction.
- A directory with fewer events than are stored is refused.
- A run may be imported while it reports.
- Newer attempts that are not vouched for (`models.Attempt.vouched`) are removed. A run whose figures another reporter
  has replaced then matches its directory again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest.announce import Announcement, AnnouncementConflictError, AnnouncementError, announce
from rhyme_openrlhf.api.ingest.decoding import BatchError
from rhyme_openrlhf.api.ingest.imported_files import ImportedFiles, ImportingError, SourceLines
from rhyme_openrlhf.api.ingest.store_batch import add_events, forget_events, remove_attempts
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.json_values import read_json
from rhyme_openrlhf.api.store.models import NAME_LENGTH, UID_LENGTH, Attempt, Run
from rhyme_openrlhf.api.store.record import EventSource
from rhyme_openrlhf.api.store.status import ACTIVE
from rhyme_openrlhf.settings.recorded import object_at
from rhyme_openrlhf.telemetry.run_directory import CONFIG_FILE

BAD_JSON = (UnicodeDecodeError, msgspec.DecodeError, RecursionError)
UNHEARD = "imported from a run directory without an end"


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    `replaced`: missing events were filled in. `removed`: uids of newer attempts that were not vouched for.
    """

    run_uid: str
    attempt_uid: str
    accepted: int
    duplicates: int
    replaced: bool
    removed: tuple[str, ...]


def import_directory(
    database: Database, directory: Path, now: float, ended: Callable[[], bool] = lambda: False
) -> Imported:
    """Import a run directory. Attempts of a resumed run are imported in the order of their starts.

    `now` in unix seconds; `ended` returns True when the service ends. Raises ImportingError, BusyError.
    """
    try:
        files = ImportedFiles(directory.resolve(), ended)
        announcement = _announcement(files.directory, files.config(), files.first_line())
        # Before the file is read, because a run writes to its file first, so the file has at least the stored events.
        known = _known(database, announcement.attempt_uid)
        replaced = _fills_gaps(known, files.sources(), announcement.attempt_uid)
        return _import(database, announcement, files, replaced, now)
    except (AnnouncementError, AnnouncementConflictError, BatchError, *BAD_JSON) as error:
        raise ImportingError(f"{directory} cannot be imported: {error}") from error
    except OSError as error:
        raise ImportingError(f"{error.filename} cannot be read: {error.strerror}") from error


def _import(
    database: Database, announcement: Announcement, files: ImportedFiles, replaced: bool, now: float
) -> Imported:
    uid = announcement.attempt_uid
    accepted = duplicates = 0
    with database.writing() as session:
        removed = _remove_unvouched(session, announcement)
        attempt = announce(session, announcement, now)
        if replaced:
            accepted = _replace(session, attempt, files)
    if not replaced:
        for chunk in files.chunks():
            arrived = prepare(chunk)
            with database.writing() as session:
                fresh = len(add_events(session, uid, arrived))
            accepted, duplicates = accepted + fresh, duplicates + len(arrived) - fresh
    with database.writing() as session:
        _end_unheard(session, uid, now)
    return Imported(announcement.run_uid, uid, accepted, duplicates, replaced, removed)


def _remove_unvouched(session: Session, announcement: Announcement) -> tuple[str, ...]:
    """Remove attempts after the announced one that are not vouched for, the newest first; return their uids."""
    run_id = session.scalar(select(Run.id).where(Run.uid == announcement.run_uid))
    if run_id is None:
        return ()
    run, attempts = run_status.lock_run(session, run_id)
    if not any(one.uid == announcement.attempt_uid for one in attempts):
        return ()
    behind = itertools.takewhile(lambda one: one.uid != announcement.attempt_uid, reversed(attempts))
    gone = list(itertools.takewhile(lambda one: not one.vouched, behind))
    if gone:
        remove_attempts(session, run, attempts, gone)
    return tuple(one.uid for one in gone)


def _replace(session: Session, attempt: Attempt, files: ImportedFiles) -> int:
    """Replace the attempt's stored events; return the number of new ones.

    Raises ImportingError if the file has fewer events than were stored.
    """
    before = _sources(session, attempt.uid)
    run, _ = run_status.lock_run(session, attempt.run_id)
    forget_events(session, run, attempt)
    accepted = sum(len(add_events(session, attempt.uid, prepare(chunk))) for chunk in files.chunks())
    after = {one.source: one for one in _sources(session, attempt.uid)}
    for one in before:
        now = after.get(one.source, _Source(one.source))
        # A reporter has stored more since the comparison, so the directory does not belong to that reporter.
        if now.next_sequence < one.next_sequence:
            raise _holds_less(attempt.uid, one.source, now.next_sequence, one.next_sequence)
        mine = (EventSource.attempt_id == attempt.id, EventSource.source == one.source)
        session.execute(update(EventSource).where(*mine).values(filled=one.filled + one.dropped - now.dropped))
    return accepted


class _Source(NamedTuple):
    """The stored state of one source of an attempt; columns of `EventSource`."""

    source: str
    next_sequence: int = 0
    gaps: int = 0
    dropped: int = 0
    filled: int = 0


def _known(database: Database, attempt_uid: str) -> list[_Source]:
    """Return the stored sources of an attempt, none if it is unknown."""
    with database.reading(snapshot=False) as session:
        return _sources(session, attempt_uid)


def _sources(session: Session, attempt_uid: str) -> list[_Source]:
    columns = [getattr(EventSource, name) for name in _Source._fields]
    query = select(*columns).join(Attempt, Attempt.id == EventSource.attempt_id).where(Attempt.uid == attempt_uid)
    return [_Source(*row) for row in session.execute(query)]


def _fills_gaps(known: Iterable[_Source], sources: Mapping[str, SourceLines], attempt_uid: str) -> bool:
    """Return True if the file has events that are missing in the store.

    Raises ImportingError if the file has fewer events than the store.
    """
    fills = False
    for stored in known:
        ours = sources.get(stored.source, SourceLines())
        if ours.following < stored.next_sequence or ours.missing_below(stored.next_sequence) > stored.gaps:
            raise _holds_less(attempt_uid, stored.source, ours.following, stored.next_sequence)
        fills = fills or stored.dropped > ours.missing_below(ours.following)
    return fills


def _holds_less(attempt_uid: str, source: str, ours: int, known: int) -> ImportingError:
    return ImportingError(
        f"the directory has fewer events than the store for attempt {attempt_uid}: its events of source {source!r} "
        f"end before number {ours}, and {known} are stored"
    )


def _end_unheard(session: Session, attempt_uid: str, now: float) -> None:
    """Mark an imported run without an end as lost if neither a reporter nor a job reports on it."""
    run_id = session.execute(select(Attempt.run_id).where(Attempt.uid == attempt_uid)).scalar_one()
    run, attempts = run_status.lock_run(session, run_id)
    attempt = next(one for one in attempts if one.uid == attempt_uid)
    if attempt.status in ACTIVE and attempt.heartbeat_at is None and attempt.submission_id is None:
        run_status.move(run, attempts, attempt, "lost", UNHEARD, run.last_event_at or now)


def _announcement(directory: Path, text: bytes, first_line: bytes) -> Announcement:
    """Return the identity of the run: the reported one if its settings name it, else a digest of its content."""
    try:
        config = read_json(text)
    except ValueError as error:
        raise AnnouncementError(f"{CONFIG_FILE} {error}") from error
    if not isinstance(config, dict):
        raise AnnouncementError(f"{CONFIG_FILE} is not a JSON object")
    digest = hashlib.sha256(text + first_line).hexdigest()
    control, run = object_at(config, "settings", "control"), object_at(config, "settings", "run")
    return Announcement(
        attempt_uid=control.get("attempt_uid") or digest[:UID_LENGTH],
        run_uid=control.get("run_uid") or digest[UID_LENGTH : 2 * UID_LENGTH],
        name=str(run.get("name") or directory.name)[:NAME_LENGTH],
        run_directory=str(directory),
        config=config,
        origin="imported",
    )
