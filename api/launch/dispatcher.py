"""The dispatcher: a loop that starts queued attempts and watches active ones, connecting the store and Ray.

One thread takes a turn every POLL_SECONDS while this service holds the lease (`lease.py`). A second thread renews the
lease while a turn waits for Ray.

Invariants:

- No transaction is open during a request to Ray.
- A change is made only if the attempt's status is still the one of the decision, and the lease is still that of this
  turn.
- The next turn repeats all work that failed because store or cluster did not respond.
- The dispatcher keeps no state that a restarted service would miss.

No attempt is started twice, even if a service freezes at any point. The transaction that makes an attempt "starting"
binds it to one cluster, and Ray accepts an id once. A service on another cluster does not know the job; it neither
starts nor ends the attempt, which becomes lost if nothing responds.

A service that takes over needs no file of the earlier holder. The job has its reporter's token in its environment. Each
try to start an attempt has a token of its own, because nothing tells which try Ray has taken. All of them are valid
until the attempt has ended.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.launch.actions import Launching
from rhyme_openrlhf.api.launch.job_file import remove_file, write_launch_file
from rhyme_openrlhf.api.launch.lease import BEAT_SECONDS, Lease, LeaseLost, not_dispatching
from rhyme_openrlhf.api.launch.queueing import Job, Queued, Waits, Watch, choose, decide, used_by_others
from rhyme_openrlhf.api.launch.ray_jobs import ClusterUnreachable, SubmitRefused
from rhyme_openrlhf.api.launch.spec import gpus_needed
from rhyme_openrlhf.api.store import credentials, run_status
from rhyme_openrlhf.api.store.database import Database, DatabaseError
from rhyme_openrlhf.api.store.models import Attempt, Run, Token
from rhyme_openrlhf.api.store.status import ACTIVE, ENDED, RunStatus

# A killed run is detected within this time plus Ray's own second; a turn costs one small request per run.
POLL_SECONDS = 2.0
# A lost run may report again; after a day, Ray is no longer asked about it.
LOST_SECONDS = 24 * 3600.0
# A reporter whose run has ended still sends events that waited while the service was down.
TOKEN_SECONDS = 3600.0
# Turns between two searches for tokens that are no longer needed: about a minute.
TIDY_TURNS = 30
# The turn in progress may wait for Ray (ray_jobs.CALL_SECONDS per request).
STOP_SECONDS = 30.0
TOKEN_NAME = "attempt {uid}"
# Number of active runs if the store does not respond.
UNKNOWN = -1

logger = logging.getLogger(__name__)
# Errors that may occur in a turn; the next turn tries again.
_PASSING = (SQLAlchemyError, DatabaseError, ClusterUnreachable, OSError, ValueError, LookupError)


@dataclass(frozen=True)
class _Row:
    """The data of an attempt in a turn, read at once."""

    attempt_id: int
    run_id: int
    uid: str
    launched: bool
    status: RunStatus
    heartbeat_at: float | None
    stop_requested: bool
    cluster: str | None
    spec: dict[str, Any] | None


class Dispatcher:
    """The dispatcher of one store and one cluster; without a launcher, it only watches attempts started elsewhere."""

    def __init__(
        self,
        database: Database,
        launching: Launching,
        lease: Lease,
        changed: Callable[[int], None],
        revoked: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """Set the callbacks and the clock.

        - `changed` gets the row number of a run whose status has changed.
        - `revoked` is called when a token has been revoked.
        - `clock` must be monotonic.
        - `say` gets a message when another service dispatches, or when this one takes over later.
        """
        self._database = database
        self._launching = launching
        self._lease = lease
        self._say = say
        # State of the turn in progress, and the last message.
        self._term = 0
        self._said = ""
        self._launcher = launching.launcher
        self._changed = changed
        self._revoked = revoked
        self._clock = clock
        self._waits = Waits(launching.settings.stop_grace_s, launching.settings.lost_after_s)
        self._watches: dict[int, Watch] = {}
        # Times at which ended attempts with an open token were first seen.
        self._ended: dict[str, float] = {}
        self._turns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._beats = threading.Thread(target=self._beat, name="dispatcher's lease", daemon=True)

    def start(self) -> None:
        """Start taking turns."""
        self._thread.start()
        self._beats.start()

    def stop(self) -> None:
        """Stop after the turn in progress, and release the lease. Runs continue."""
        self._stop.set()
        for thread in (self._thread, self._beats):
            if thread.ident is not None:
                thread.join(STOP_SECONDS)
        try:
            self._lease.release()
        except _PASSING:
            logger.exception("the lease was not released: another service takes over when it expires")

    def turn(self) -> None:
        """Check everything once and do what is due; do nothing while another service dispatches.

        Raises LeaseLost if another service has taken over during the turn.
        """
        term = self._lease.keep()
        self._tell(term)
        if term is None:
            return
        if term != self._term:
            # As after a restart, every waiting time begins again.
            self._term, self._turns = term, 0
            self._watches, self._ended = {}, {}
        rows = self._read()
        known = {row.attempt_id for row in rows}
        self._watches = {key: watch for key, watch in self._watches.items() if key in known}
        reachable = self._watch([row for row in rows if row.status != "queued"])
        if reachable:
            self._dispatch(rows)
        if self._turns % TIDY_TURNS == 0:
            self._tidy()
        self._turns += 1

    def active(self) -> int:
        """Return the number of active runs that were started on this service's cluster."""
        return sum(row.status in ACTIVE - {"queued"} for row in self._read() if row.launched and self._is_ours(row))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn()
            except LeaseLost as error:
                logger.warning("a turn of the dispatcher was aborted: %s", error)
            except _PASSING:
                logger.exception("the dispatcher's turn failed; the next one tries again")
            self._stop.wait(POLL_SECONDS)

    def _beat(self) -> None:
        """Renew the lease during long turns, because Ray may delay a turn by a minute."""
        while not self._stop.wait(BEAT_SECONDS):
            try:
                self._lease.keep()
            except _PASSING:
                logger.warning("the dispatcher's lease could not be renewed; the next beat tries again", exc_info=True)

    def _tell(self, term: int | None) -> None:
        """Announce which service dispatches, if that has changed since the last announcement."""
        if term is not None:
            now = "this service dispatches now: it starts and watches the runs in its database" if self._said else ""
        else:
            now = not_dispatching(self._lease.other, self._lease.me.uid)
        if now and now != self._said:
            self._said = now
            self._say(now)

    def _is_ours(self, row: _Row) -> bool:
        """Return True if no cluster other than this service's can have the attempt's job."""
        return row.cluster in (None, self._launching.cluster)

    def _read(self) -> list[_Row]:
        recent = Attempt.finished_at > time.time() - LOST_SECONDS
        lost = (Attempt.status == "lost") & or_(recent, Attempt.stop_requested_at.is_not(None))
        query = (
            select(Attempt, Run.spec)
            .join(Run, Run.id == Attempt.run_id)
            .where(Attempt.status.in_(ACTIVE) | lost)
            .order_by(Attempt.queued_at, Attempt.id)
        )
        with self._database.reading() as session:
            return [_row(attempt, spec) for attempt, spec in session.execute(query).tuples()]

    # --- Attempts that have started

    def _watch(self, rows: Sequence[_Row]) -> bool:
        """Check each attempt; return whether the cluster responds (as far as it was asked)."""
        reachable = self._launcher is not None
        for row in rows:
            job = None
            if row.launched and reachable and self._launcher is not None:
                try:
                    job = self._launcher.job(row.uid)
                except ClusterUnreachable as error:
                    # Asked only once per turn, because each request waits its full time.
                    reachable = False
                    logger.warning("%s", error)
            if job is not None and job.state == "missing" and not self._is_ours(row):
                job = None  # another cluster has the job, and that cluster was not asked
            self._look(row, job)
        return reachable

    def _look(self, row: _Row, job: Job | None) -> None:
        now = self._clock()
        watch = self._watches.setdefault(row.attempt_id, Watch(now))
        action = decide(watch.see(row.status, row.heartbeat_at, row.stop_requested, job, now), self._waits)
        if action.do == "set" and action.status is not None:
            self._set(row, action.status, action.message)
        elif action.do == "submit":
            self._submit(row)
        elif action.do == "stop_job":
            self._force(row, watch, now)

    def _force(self, row: _Row, watch: Watch, now: float) -> None:
        assert self._launcher is not None
        self._lease.confirm(self._term)
        try:
            self._launcher.stop(row.uid)
        except ClusterUnreachable as error:
            logger.warning("%s", error)
            return
        watch.forced(now)
        logger.info("attempt %s: Ray is told to stop its job", row.uid)

    def _set(self, row: _Row, status: RunStatus, message: str) -> None:
        """Set the attempt's status, unless it has changed since the decision."""
        now = time.time()
        with self._lease.changing(self._term) as session:
            run, attempts = run_status.lock_run(session, row.run_id)
            attempt = next((one for one in attempts if one.id == row.attempt_id), None)
            if attempt is None or attempt.status != row.status:
                return
            run_status.move(run, attempts, attempt, status, message, now)
        logger.info("attempt %s is %s%s", row.uid, status, f": {message}" if message else "")
        self._changed(row.run_id)

    # --- The queue

    def _dispatch(self, rows: Sequence[_Row]) -> None:
        waiting = [row for row in rows if row.status == "queued" and row.launched]
        if not waiting or self._launcher is None:
            return
        ours = [row for row in rows if row.launched and self._is_ours(row)]
        running = [_gpus(row) for row in ours if row.status in ACTIVE - {"queued"}]
        begun = [_gpus(row) for row in ours if row.status in ("running", "stopping")]
        queue = [Queued(row.attempt_id, _gpus(row)) for row in waiting]
        try:
            gpus = self._launcher.gpus()
            others = used_by_others(self._launcher.used_gpus(), begun)
        except ClusterUnreachable as error:
            logger.warning("%s", error)
            return
        start = choose(queue, running, gpus, self._launching.settings.max_runs, others)
        by_id = {row.attempt_id: row for row in waiting}
        for attempt_id, message in start.never:
            self._set(by_id[attempt_id], "failed", message)
        for attempt_id in start.now:
            self._submit(by_id[attempt_id])

    def _submit(self, row: _Row) -> None:
        """Start the attempt's job. If the outcome is unknown, a later turn checks and repeats the start."""
        assert self._launcher is not None
        with self._lease.changing(self._term) as session:
            run, attempts = run_status.lock_run(session, row.run_id)
            attempt = next((one for one in attempts if one.id == row.attempt_id), None)
            if attempt is None or attempt.status != row.status:
                return
            run_status.move(run, attempts, attempt, "starting", "", time.time())
            attempt.cluster = self._launching.cluster
            secret = self._new_token(session, run, attempt)
            session.refresh(run, ["uid", "spec"])  # needed after the transaction
        self._changed(row.run_id)
        started = dataclasses.replace(row, status="starting")
        try:
            content = self._launching.launch_file(run, attempt)
            content.argv()  # files or links may have changed since the spec was checked
            self._lease.confirm(self._term)
            self._launcher.submit(row.uid, write_launch_file(self._launching.data, content), secret)
        except (SubmitRefused, ValueError, OSError) as error:
            self._set(started, "failed", f"it could not be started: {error}")

    def _new_token(self, session: Session, run: Run, attempt: Attempt) -> str:
        """Issue a reporter's token for this run."""
        name = TOKEN_NAME.format(uid=attempt.uid)
        return credentials.issue_token(session, name, "reporter", time.time(), run.id).secret

    def _tidy(self) -> None:
        """Revoke tokens, delete the files and Ray's jobs of attempts that ended long enough ago."""
        open_tokens = select(Token.name).where(Token.role == "reporter", Token.revoked_at.is_(None))
        with self._database.reading() as session:
            # Only a few: attempts that are active or have ended within the hour.
            uids = [name.removeprefix(TOKEN_NAME.format(uid="")) for name in session.scalars(open_tokens)]
            ended = select(Attempt.uid).where(
                Attempt.submission_id.is_not(None), Attempt.status.in_(ENDED - {"lost"}), Attempt.uid.in_(uids)
            )
            found = set(session.scalars(ended))
        now = self._clock()
        self._ended = {uid: self._ended.get(uid, now) for uid in found}
        for uid in [uid for uid, since in self._ended.items() if now - since >= TOKEN_SECONDS]:
            with self._lease.changing(self._term) as session:
                for token in session.scalars(select(Token).where(Token.name == TOKEN_NAME.format(uid=uid))):
                    credentials.revoke_token(session, token, time.time())
            self._revoked()
            remove_file(self._launching.data, uid)
            if self._launcher is not None:
                self._launcher.delete(uid)


def _row(attempt: Attempt, spec: dict[str, Any] | None) -> _Row:
    return _Row(
        attempt_id=attempt.id,
        run_id=attempt.run_id,
        uid=attempt.uid,
        launched=attempt.submission_id is not None,
        status=cast(RunStatus, attempt.status),
        heartbeat_at=attempt.heartbeat_at,
        stop_requested=attempt.stop_requested_at is not None,
        cluster=attempt.cluster,
        spec=spec,
    )


def _gpus(row: _Row) -> int:
    return gpus_needed(row.spec["arguments"]) if row.spec is not None else 0
