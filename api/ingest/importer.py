"""Import of a whole run directory: the store then has the same rows as if the run had reported them live.

Invariants:

- Importing again changes nothing.
- Stored events of the attempt are kept if they have no gaps. With gaps, they are replaced (`replacement.py`).
- No transaction grows with the length of the run directory.
- A directory with fewer events than are stored is refused.
- A run may be imported while it reports.
- Newer attempts that are not vouched for (`models.Attempt.vouched`) are removed. A run whose figures another reporter
  has replaced then matches its directory again.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.ingest.announce import Announcement, AnnouncementConflictError, AnnouncementError, announce
from rhyme_openrlhf.api.ingest.decoding import BatchError
from rhyme_openrlhf.api.ingest.imported_files import ImportedFiles, ImportingError, SourceLines
from rhyme_openrlhf.api.ingest.replacement import Given, Replacement
from rhyme_openrlhf.api.ingest.store_batch import (
    ReplacingError,
    UnknownAttemptError,
    add_events,
    is_being_replaced,
    remove_attempts,
)
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

    `directory` is resolved, and is not resolved again: a link that replaces one of its folders since then is refused.
    `now` in unix seconds; `ended` returns True when the service ends. Raises ImportingError, BusyError.
    """
    try:
        files = ImportedFiles(directory, ended)
        announcement = _announcement(files.directory, files.config(), files.first_line())
        # Before the file is read, because a run writes to its file first, so the file has at least the stored events.
        known, sources = _known(database, announcement.attempt_uid), files.sources()
        _check_complete(known, sources, announcement.attempt_uid)
        if _fills_gaps(known, sources):
            # An event that is refused is refused before stored ones are deleted.
            for chunk in files.chunks():
                prepare(chunk)
            return _import(database, announcement, files, now, sources)
        return _import(database, announcement, files, now)
    except (AnnouncementError, AnnouncementConflictError, BatchError, *BAD_JSON) as error:
        raise ImportingError(f"{directory} cannot be imported: {error}") from error
    except (ReplacingError, UnknownAttemptError) as error:
        raise ImportingError("another import of this directory is under way, or the run was deleted") from error
    except OSError as error:
        raise ImportingError(f"{error.filename} cannot be read: {error.strerror}") from error


def _import(
    database: Database,
    announcement: Announcement,
    files: ImportedFiles,
    now: float,
    checked: Mapping[str, SourceLines] | None = None,
) -> Imported:
    """Import files. `checked`: their sources, if all events were checked to replace those that are stored."""
    uid = announcement.attempt_uid
    accepted = duplicates = 0
    replacement: Replacement | None = None
    with database.writing() as session:
        removed = _remove_unvouched(session, announcement)
        attempt = announce(session, announcement, now)
        if is_being_replaced(attempt, time.time()):
            raise ReplacingError
        known = _sources(session, uid)
        # Another import may have filled the gaps meanwhile.
        if checked is not None and _fills_gaps(known, checked):
            given = {one.source: Given(one.filled, one.dropped) for one in known}
            replacement = Replacement(database, attempt, given)
    if replacement is not None:
        accepted = _replace(replacement, files)
    else:
        for chunk in files.chunks():
            arrived = prepare(chunk)
            with database.writing() as session:
                fresh = len(add_events(session, uid, arrived))
            accepted, duplicates = accepted + fresh, duplicates + len(arrived) - fresh
    with database.writing() as session:
        _end_unheard(session, uid, now)
    return Imported(announcement.run_uid, uid, accepted, duplicates, replacement is not None, removed)


def _replace(replacement: Replacement, files: ImportedFiles) -> int:
    """Replace the stored events; return the number of new ones."""
    with replacement.whole():
        while not replacement.forget_some():
            files.go_on()
        accepted = sum(replacement.add(prepare(chunk)) for chunk in files.chunks())
        replacement.end()
    return accepted


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


def _check_complete(known: Iterable[_Source], sources: Mapping[str, SourceLines], attempt_uid: str) -> None:
    """Raise ImportingError if the file has fewer events than the store."""
    for stored in known:
        ours = sources.get(stored.source, SourceLines())
        if ours.following < stored.next_sequence or ours.missing_below(stored.next_sequence) > stored.gaps:
            raise _holds_less(attempt_uid, stored.source, ours.following, stored.next_sequence)


def _fills_gaps(known: Iterable[_Source], sources: Mapping[str, SourceLines]) -> bool:
    """Return True if the file has events that are missing in the store."""
    ours = ((stored, sources.get(stored.source, SourceLines())) for stored in known)
    return any(stored.dropped > lines.missing_below(lines.following) for stored, lines in ours)


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
