"""Announcements of runs that were not started here: a reporter or an import names its run and attempt first.

Invariants: repeating an announcement gives the same run and attempt; an attempt never changes its run; only a sender
that may report for a run (`admit`) changes its content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.json_values import TOO_DEEP, check_json, is_too_deep
from rhyme_openrlhf.api.store.models import NAME_LENGTH, UID_LENGTH, Attempt, Run
from rhyme_openrlhf.api.store.parameters import keep_parameters
from rhyme_openrlhf.api.store.races import RUN_UID, violated
from rhyme_openrlhf.api.store.status import PERHAPS_ACTIVE
from rhyme_openrlhf.telemetry.run_directory import strict

_UID = re.compile(rf"[0-9a-f]{{{UID_LENGTH}}}")
ORIGINS = ("reported", "imported")
# Every batch reads all attempts of its run; a run that is resumed each hour has as many after six weeks.
MOST_ATTEMPTS = 1000
# Parts of a config.json that are objects wherever they are read.
OBJECTS = ("settings", "arguments", "versions", "git", "machine")


class AnnouncementError(ValueError):
    """An invalid announcement; the message is one sentence that names the field."""


class AnnouncementConflictError(Exception):
    """The attempt belongs to another run."""


class ForeignRunError(Exception):
    """The sender may not report for this run; the message is one sentence for the reporter."""


@dataclass(frozen=True)
class Sender:
    """The token of a report. `run_id`: the only run that it may report for, None for a general token."""

    token_id: int
    run_id: int | None
    operator: bool


def admit(run: Run, attempt: Attempt | None, sender: Sender | None) -> None:
    """Raise ForeignRunError unless the sender may report for the attempt; `attempt` None stands for a new one.

    `sender` None is the service itself. The run must be locked; its reporter is stored if it had none.
    """
    if sender is None or sender.operator:
        return
    if sender.run_id is not None:
        if sender.run_id != run.id:
            raise ForeignRunError("this token may report only for another run")
        if run.origin == "launched" and (attempt is None or attempt.submission_id is None):
            raise ForeignRunError("the service started this run: only the service adds attempts to it")
        return
    if run.origin == "launched":
        raise ForeignRunError("the service started this run: only the token of the run itself may report for it")
    # The run was imported while active, or stored by a version without reporters; its first attempt keeps reporting.
    if run.reporter_id is None and attempt is not None and attempt.number == 1 and attempt.status in PERHAPS_ACTIVE:
        run.reporter_id = sender.token_id
    if run.reporter_id != sender.token_id:
        raise ForeignRunError(
            "the run belongs to another token: report with that token, with an operator's token, or with a reporter's "
            "token that an operator creates for this run"
        )


@dataclass(frozen=True)
class Announcement:
    """The identity of an attempt. Raises AnnouncementError.

    `config`: content of the run directory's config.json. `origin`: the origin of the run if this announcement creates
    it.
    """

    attempt_uid: str
    run_uid: str
    name: str
    run_directory: str
    config: dict[str, Any]
    origin: str = "reported"

    def __post_init__(self) -> None:
        for field, uid in (("attempt uid", self.attempt_uid), ("run uid", self.run_uid)):
            if not isinstance(uid, str) or not _UID.fullmatch(uid):
                raise AnnouncementError(f"{field} must be {UID_LENGTH} hexadecimal digits")
        if not 1 <= len(self.name) <= NAME_LENGTH:
            raise AnnouncementError(f"name must have 1 to {NAME_LENGTH} characters, got {len(self.name)}")
        if is_too_deep(self.config):
            raise AnnouncementError(f"config {TOO_DEEP}")
        texts = {"name": self.name, "run_directory": self.run_directory, "config": strict(self.config)}
        for field, value in texts.items():
            try:
                check_json(value)
            except ValueError as error:
                raise AnnouncementError(f"{field} {error}") from error
        command = self.config.get("command", [])
        if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
            raise AnnouncementError("config.command must be a list of strings")
        for part in OBJECTS:
            if not isinstance(self.config.get(part, {}), dict):
                raise AnnouncementError(f"config.{part} must be an object")
        if self.origin not in ORIGINS:
            raise AnnouncementError(f"origin must be one of {', '.join(ORIGINS)}, got {self.origin!r}")


def announce(session: Session, announcement: Announcement, now: float, sender: Sender | None = None) -> Attempt:
    """Return the announced attempt, created with its run if new. An attempt started here gets its configuration.

    `now` in unix seconds; `sender` None is the service itself. Raises ForeignRunError, AnnouncementConflictError if the
    attempt belongs to another run, and AnnouncementError if the run has too many.
    """
    run_id = _run_id(session, announcement, now, sender)
    run, attempts = run_status.lock_run(session, run_id)
    attempt = next((one for one in attempts if one.uid == announcement.attempt_uid), None)
    admit(run, attempt, sender)
    if attempt is None:
        taken = session.execute(select(Attempt.id).where(Attempt.uid == announcement.attempt_uid)).first()
        if taken is not None:
            raise AnnouncementConflictError(f"attempt {announcement.attempt_uid} belongs to another run")
        if len(attempts) >= MOST_ATTEMPTS:
            raise AnnouncementError(f"the run has {MOST_ATTEMPTS} attempts, and none can be added")
        attempt = Attempt(
            run_id=run.id,
            number=attempts[-1].number + 1 if attempts else 1,
            uid=announcement.attempt_uid,
            resumes=bool(attempts),
            # An operator may also report for runs of others.
            vouched=sender is None or not sender.operator or run.reporter_id == sender.token_id,
            message="",
            # The process exists already, so the attempt does not wait in a queue.
            status="starting",
            queued_at=now,
        )
        session.add(attempt)
        attempts.append(attempt)
        run_status.follow(run, attempts)
    attempt.run_directory = announcement.run_directory
    if sender is None:
        attempt.vouched = True
    # The newest attempt defines the run's configuration.
    if attempt is attempts[-1]:
        config = strict(announcement.config)
        run.command, run.versions = config.pop("command", []), dict(config.pop("versions", {}))
        run.config = config
        keep_parameters(session, run)
    session.flush()
    return attempt


def _run_id(session: Session, announcement: Announcement, now: float, sender: Sender | None) -> int:
    """Return the run with that uid, created if there is none; of two concurrent callers, one finds the other's run."""
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
        reporter_id=sender.token_id if sender else None,
        created_at=now,
        step=0,
        epoch=0,
        dropped_events=0,
    )
    try:
        with session.begin_nested():
            session.add(run)
    except IntegrityError as error:
        if violated(error) != RUN_UID:
            raise
        return session.execute(query).scalar_one()
    return run.id
