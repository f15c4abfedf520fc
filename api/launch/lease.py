"""The dispatch lease: of all services on one database, exactly one starts, watches and stops runs.

The lease is one row, the same on SQLite and PostgreSQL. The holder increments `beats` every `BEAT_SECONDS`. A service
that has seen the same term and beats for `LEASE_SECONDS` takes the lease and increments `term`.

Invariants:

- Two holders never both commit. Every change of the dispatcher runs inside `changing`, which ends with an update of
  this row for the holder's term. A frozen holder finds another term when it wakes, and its transaction is rolled back.
- Wall clocks decide nothing. Each service measures the time since it saw the row change, with its own monotonic clock.
  `since` is for readers only. A wrong measurement changes the holder, but never creates two.
- A holder that freezes inside a transaction does not keep the row on PostgreSQL, because the server ends such a
  transaction after `IDLE_SECONDS`. On SQLite, a process frozen inside a transaction locks the whole file.

An advisory lock of PostgreSQL would need a second mechanism for SQLite. It would also stay with a lost machine until
the server notices the dead connection, and it would not stop a holder that has lost its connection.
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

# Another service takes over at most 2 s (its next check) after this time, well within the promised 30 s.
LEASE_SECONDS = 15.0
PROMISED_SECONDS = 30.0
BEAT_SECONDS = 2.0
# Well below LEASE_SECONDS, so that the row is unlocked when another service may take it.
IDLE_SECONDS = 10.0
ROW = 1
NOBODY = ""


class LeaseLost(Exception):
    """Another service dispatches now; the change is not made."""


@dataclass(frozen=True)
class Candidate:
    """A service that may hold the lease. `uid`: unique per start of a service; `launches`: it has a cluster."""

    uid: str
    launches: bool
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class Holder:
    """The content of the row. `since`: unix seconds by the holder's clock."""

    service: str
    host: str
    pid: int
    since: float
    launches: bool
    term: int
    beats: int

    @property
    def mark(self) -> tuple[int, int]:
        """Values that change with every sign of life."""
        return self.term, self.beats


def may_take(holder: Holder | None, me: Candidate, unchanged: float, seconds: float) -> bool:
    """Return whether a service takes the lease after it has seen the row `unchanged` for this many seconds.

    A service with a cluster takes the lease at once from a service without one, which cannot start runs.
    """
    if holder is None or holder.service in (NOBODY, me.uid):
        return True
    return (me.launches and not holder.launches) or unchanged >= seconds


def find_holder(session: Session) -> Holder | None:
    """Return the lease's holder: None before the first service; `service` is NOBODY after a release."""
    row = session.get(DispatchLease, ROW)
    if row is None:
        return None
    return Holder(row.service, row.host, row.pid, row.since, row.launches, row.term, row.beats)


def not_dispatching(holder: Holder | None, uid: str) -> str:
    """Return the message of a service without the lease; "" for the `holder` itself."""
    if holder is None or holder.service == NOBODY:
        return "no service dispatches now: queued runs wait until a service takes over, within seconds"
    if holder.service == uid:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since))
    return (
        f"this service does not dispatch, because another service on its database does: process {holder.pid} on "
        f"{holder.host}, since {since}; runs started here wait in the queue for that service, and this one "
        f"takes over within {PROMISED_SECONDS:.0f} s when the other ends"
    )


class Lease:
    """The lease as one service uses it; thread-safe."""

    def __init__(
        self,
        database: Database,
        me: Candidate,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LEASE_SECONDS,
    ) -> None:
        """Set the monotonic `clock`, and `seconds`: the longest silence of a holder."""
        self.me = me
        self.seconds = seconds
        self._database = database
        self._clock = clock
        self._idle_ms = int(1000 * seconds * IDLE_SECONDS / LEASE_SECONDS)
        self._lock = threading.Lock()
        self._term: int | None = None
        self._seen: Holder | None = None
        # The time since which the row is unchanged, and the time of the last check.
        self._since = self._looked = -math.inf

    @property
    def other(self) -> Holder | None:
        """The holder at the last failed attempt to get the lease."""
        return self._seen

    def keep(self) -> int | None:
        """Renew the lease, or take it if due. Return its term while this service holds it, else None."""
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
        """Yield a writing session whose changes are committed only if the lease still has this term.

        Raises LeaseLost, and the errors of `Database.writing`.
        """
        with self._writing() as session:
            yield session
            # At the end, so that the row is locked for one statement only.
            if not _changed(session, DispatchLease.term == term, beats=DispatchLease.beats + 1):
                raise LeaseLost("another service on this database dispatches now")

    def confirm(self, term: int) -> None:
        """Raise LeaseLost if the lease no longer has this term; called right before a request to Ray."""
        with self.changing(term):
            pass

    def release(self) -> None:
        """Release the lease, so that another service takes it at its next check."""
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
        # After a long pause (database away, process frozen), the waiting time begins again. The holder could not renew
        # the lease either, or the row has changed many times.
        blind = now - self._looked > self.seconds / 2
        if blind or found is None or self._seen is None or found.mark != self._seen.mark:
            self._since = now
        self._seen, self._looked = found, now

    def _taken(self, seen: Holder | None) -> int | None:
        """Take the lease if the row is still as it was seen; return the new term."""
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
        except IntegrityError:  # another service has created the row
            return None

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """Open a transaction that a frozen process cannot hold forever."""
        with self._database.writing() as session:
            if not self._database.is_sqlite:
                session.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = {self._idle_ms}"))
            yield session


def _changed(session: Session, condition: Any, **values: Any) -> bool:
    """Update the row if it meets the condition; return whether it did."""
    statement = update(DispatchLease).where(DispatchLease.id == ROW, condition).values(**values)
    done = session.execute(statement, execution_options={"synchronize_session": False})
    return cast("CursorResult[Any]", done).rowcount == 1
