"""The lease on dispatching: of all services on one database, exactly one starts, watches and stops runs.

One row, the same on SQLite and PostgreSQL. The holder counts `beats` up every `BEAT_SECONDS`. A service that has seen
the same term and beats for `LEASE_SECONDS` takes the lease, and counts `term` up.

Invariants:
- Two holders never both commit: each change of the dispatcher is made by `changing`, which ends with an update of this
  row for the holder's term. A holder that was frozen finds another term when it wakes, and its transaction is undone.
- Clocks of the day decide nothing: each service measures on a clock of its own that only goes forward, from when it saw
  the row change. `since` is for people alone. A wrong measurement changes the holder, and never makes two.
- A holder that freezes inside a transaction does not keep the row on PostgreSQL: the server ends such a transaction
  after `IDLE_SECONDS`. On SQLite a process that freezes inside a transaction keeps the whole file locked.

An advisory lock of PostgreSQL would need a second mechanism for SQLite. It would also stay with a machine that has
vanished until the server notices the dead connection, and it would not fence a holder that has lost its connection.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from sqlalchemy import CursorResult, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import DispatchLease

# Another service has taken over 2 s (its next look) after this at the latest: within the 30 s that are promised.
LEASE_SECONDS = 15.0
PROMISED_SECONDS = 30.0
BEAT_SECONDS = 2.0
# Well below LEASE_SECONDS: the row is free when another service may take it.
IDLE_SECONDS = 10.0
ROW = 1
NOBODY = ""


class LeaseLost(Exception):
    """Another service dispatches now: what was about to be changed is not changed."""


@dataclass(frozen=True)
class Candidate:
    """A service that may hold the lease. `uid` is its own since it started; `launches`: it has a cluster."""

    uid: str
    launches: bool
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class Holder:
    """The row as one look found it. `since`: unix seconds, by the holder's clock."""

    service: str
    host: str
    pid: int
    since: float
    launches: bool
    term: int
    beats: int

    @property
    def mark(self) -> tuple[int, int]:
        """What changes with every sign of life."""
        return self.term, self.beats


def may_take(holder: Holder | None, me: Candidate, unchanged: float, seconds: float) -> bool:
    """Return whether a service takes the lease, after it has seen the row `unchanged` for so many seconds.

    A service with a cluster takes it at once from one without, which could start nothing.
    """
    if holder is None or holder.service in (NOBODY, me.uid):
        return True
    return (me.launches and not holder.launches) or unchanged >= seconds


def find_holder(session: Session) -> Holder | None:
    """Return who has the lease: None before the first service; `service` is NOBODY after an orderly end."""
    row = session.get(DispatchLease, ROW)
    if row is None:
        return None
    return Holder(row.service, row.host, row.pid, row.since, row.launches, row.term, row.beats)


def not_dispatching(holder: Holder | None, uid: str) -> str:
    """Return the sentence that a service shows while it does not have the lease; "" for the `holder` itself."""
    if holder is None or holder.service == NOBODY:
        return "no service dispatches now: queued runs wait until one takes over, within seconds"
    if holder.service == uid:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since))
    return (
        f"this service does not dispatch, because another one on its database does: process {holder.pid} on "
        f"{holder.host}, since {since}; runs that are asked for here wait in the queue for that service, and this one "
        f"takes over within {PROMISED_SECONDS:.0f} s when it ends"
    )


class Lease:
    """One service's side of the lease. Any thread may call it."""

    def __init__(
        self,
        database: Database,
        me: Candidate,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LEASE_SECONDS,
    ) -> None:
        """`clock` only goes forward; `seconds`: how long a holder may be silent."""
        self.me = me
        self.seconds = seconds
        self._database = database
        self._clock = clock
        self._idle_ms = int(1000 * seconds * IDLE_SECONDS / LEASE_SECONDS)
        self._lock = threading.Lock()
        self._term: int | None = None
        self._seen: Holder | None = None
        # When the row was first seen as it is, and when it was looked at last.
        self._since = self._looked = -math.inf

    @property
    def other(self) -> Holder | None:
        """Who had it when this service last looked and did not get it."""
        return self._seen

    def keep(self) -> int | None:
        """Renew the lease, or take it if that is due. Return its term while this service holds it, else None."""
        with self._lock:
            if self._term is not None and self._renewed(self._term):
                return self._term
            self._term = None
            self._look()
            if may_take(self._seen, self.me, self._clock() - self._since, self.seconds):
                self._term = self._taken(self._seen)
            return self._term

    @contextmanager
    def changing(self, term: int) -> Iterator[Session]:
        """Give a writing session whose changes are committed only if the lease is still of this term.

        Raises LeaseLost; otherwise as `Database.writing`.
        """
        with self._writing() as session:
            yield session
            # At the end, so that the row is locked for one statement only.
            if not _changed(session, DispatchLease.term == term, beats=DispatchLease.beats + 1):
                raise LeaseLost("another service on this database dispatches now")

    def confirm(self, term: int) -> None:
        """Raise LeaseLost if the lease is no longer of this term: to be asked right before Ray is told something."""
        with self.changing(term):
            pass

    def release(self) -> None:
        """Give the lease up, so that another service takes it at its next look."""
        with self._lock:
            if self._term is not None:
                with self._writing() as session:
                    values = {"service": NOBODY, "beats": DispatchLease.beats + 1}
                    _changed(session, DispatchLease.term == self._term, **values)
                self._term = None

    def _renewed(self, term: int) -> bool:
        with self._writing() as session:
            return _changed(session, DispatchLease.term == term, beats=DispatchLease.beats + 1)

    def _look(self) -> None:
        with self._database.reading(snapshot=False) as session:
            found = find_holder(session)
        now = self._clock()
        # Who did not look for long (the database was away, or this process was frozen) begins to wait anew: the holder
        # could not renew the lease either, or the row has changed many times.
        blind = now - self._looked > self.seconds / 2
        if blind or found is None or self._seen is None or found.mark != self._seen.mark:
            self._since = now
        self._seen, self._looked = found, now

    def _taken(self, seen: Holder | None) -> int | None:
        """The new term, if the row is still as it was seen."""
        mine = {
            "service": self.me.uid, "host": self.me.host, "pid": self.me.pid, "launches": self.me.launches,
            "since": time.time(), "beats": 0,
        }  # fmt: skip
        term = 1 if seen is None else seen.term + 1
        try:
            with self._writing() as session:
                if seen is None:
                    session.add(DispatchLease(id=ROW, term=term, **mine))
                    return term
                same = (DispatchLease.term == seen.term) & (DispatchLease.beats == seen.beats)
                return term if _changed(session, same, term=term, **mine) else None
        except IntegrityError:  # another service has made the row
            return None

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """A transaction that a frozen process cannot hold open for ever."""
        with self._database.writing() as session:
            if not self._database.is_sqlite:
                session.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {self._idle_ms}"))
            yield session


def _changed(session: Session, condition: Any, **values: Any) -> bool:
    """Change the row if it fulfils the condition; whether it did."""
    statement = update(DispatchLease).where(DispatchLease.id == ROW, condition).values(**values)
    done = session.execute(statement, execution_options={"synchronize_session": False})
    return cast("CursorResult[Any]", done).rowcount == 1
