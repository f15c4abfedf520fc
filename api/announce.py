"""Runs that were not started here: a reporter or an import names its run and attempt before it sends events.

Invariants: the same announcement again is the same run and attempt; an attempt never changes its run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api import lives
from rhyme_openrlhf.api.batch import storable
from rhyme_openrlhf.api.models import NAME_LENGTH, UID_LENGTH, Attempt, Run
from rhyme_openrlhf.telemetry.run_files import strict

_UID = re.compile(rf"[0-9a-f]{{{UID_LENGTH}}}")
ORIGINS = ("reported", "imported")


class AnnouncementError(ValueError):
    """An announcement has not its form; the message is one sentence that names the field."""


class AnnouncementConflictError(Exception):
    """The attempt is known as another run's."""


@dataclass(frozen=True)
class Announcement:
    """Who an attempt is. `config` is the content of its run directory's config.json.

    `origin` is how the run came to be known, if this makes it. Raises AnnouncementError.
    """

    attempt_uid: str
    run_uid: str
    name: str
    run_directory: str
    config: Mapping[str, Any]
    origin: str = "reported"

    def __post_init__(self) -> None:
        for field, uid in (("attempt uid", self.attempt_uid), ("run uid", self.run_uid)):
            if not _UID.fullmatch(uid):
                raise AnnouncementError(f"{field} must be {UID_LENGTH} hexadecimal digits, got {uid[:40]!r}")
        if not 1 <= len(self.name) <= NAME_LENGTH:
            raise AnnouncementError(f"name must have 1 to {NAME_LENGTH} characters, got {len(self.name)}")
        command = self.config.get("command", [])
        if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
            raise AnnouncementError("config.command must be a list of strings")
        if not isinstance(self.config.get("versions", {}), Mapping):
            raise AnnouncementError("config.versions must be an object")
        if not _storable([self.name, self.run_directory, dict(self.config)]):
            raise AnnouncementError("name, run_directory and config must be text without NUL characters")
        if self.origin not in ORIGINS:
            raise AnnouncementError(f"origin must be one of {', '.join(ORIGINS)}, got {self.origin!r}")


def announce(session: Session, announcement: Announcement, now: float) -> Attempt:
    """The attempt, made with its run if they are new. An attempt that was started here gets its configuration.

    `now` in unix seconds. Raises AnnouncementConflictError when the attempt belongs to another run.
    """
    run_id = _run_id(session, announcement, now)
    run, attempts = lives.lock_run(session, run_id)
    attempt = next((one for one in attempts if one.uid == announcement.attempt_uid), None)
    if attempt is None:
        taken = session.execute(select(Attempt.id).where(Attempt.uid == announcement.attempt_uid)).first()
        if taken is not None:
            raise AnnouncementConflictError(f"attempt {announcement.attempt_uid} belongs to another run")
        attempt = Attempt(
            run_id=run.id,
            number=len(attempts) + 1,
            uid=announcement.attempt_uid,
            resumes=bool(attempts),
            message="",
            # It is there already, whoever started it: nothing here waits in a queue.
            status="starting",
            queued_at=now,
        )
        session.add(attempt)
        attempts.append(attempt)
        lives.follow(run, attempts)
    attempt.run_directory = announcement.run_directory
    # The newest attempt says what the run is.
    if attempt is attempts[-1]:
        config = strict(dict(announcement.config))
        run.command, run.versions = config.pop("command", []), dict(config.pop("versions", {}))
        run.config = config
    session.flush()
    return attempt


def _run_id(session: Session, announcement: Announcement, now: float) -> int:
    """The run of that uid, made if there is none; of two who make it at once, one finds the other's."""
    query = select(Run.id).where(Run.uid == announcement.run_uid)
    found = session.execute(query).scalar_one_or_none()
    if found is not None:
        return found
    run = Run(
        uid=announcement.run_uid,
        origin=announcement.origin,
        name=announcement.name,
        notes="",
        status="starting",
        message="",
        command=[],
        config={},
        versions={},
        created_by="",
        created_at=now,
        step=0,
        epoch=0,
        dropped_events=0,
    )
    try:
        with session.begin_nested():
            session.add(run)
    except IntegrityError:
        return session.execute(query).scalar_one()
    return run.id


def _storable(value: Any) -> bool:
    """Whether all text in a JSON value is."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return all(storable(str(key)) and _storable(item) for key, item in value.items())
    return all(map(_storable, value)) if isinstance(value, list) else True
