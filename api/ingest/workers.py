"""Ingestion of batches in the service's own threads, or in worker processes.

`rhyme serve` uses processes. A batch takes tens of milliseconds of Python. In a thread of the service, it would delay
every page's query, because the interpreter runs one thread at a time.

Invariants:

- A worker that dies breaks nothing: its transaction is rolled back, its sender has to retry, and new workers start.
- Workers end with the service's process, however it ends.
- The response to a batch is sent after its commit, never before.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NamedTuple, Protocol

from anyio.to_thread import run_sync
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from rhyme_openrlhf.api.ingest.announce import Sender
from rhyme_openrlhf.api.ingest.decoding import parse_batch, unpack
from rhyme_openrlhf.api.ingest.store_batch import Receipt, ReplacingError, UnknownAttemptError, ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.store.database import BUSY_SECONDS, BusyError, Database
from rhyme_openrlhf.api.store.models import Attempt
from rhyme_openrlhf.api.store.races import again_if_raced

# One batch is prepared while another is written; more would only wait for each other. SQLite has one writer, and
# waiters for its lock sleep and poll.
WORKERS_SQLITE, WORKERS_POSTGRESQL = 1, 2
# A batch waits for the ones before it, and each of them waits at most `BUSY_SECONDS` for a lock.
ANSWER_SECONDS = 60.0
# A worker that does not end in this time is killed, and its transaction is rolled back.
GOODBYE_SECONDS = BUSY_SECONDS
# Retry delay after a worker died; a new one takes a second or two to start.
RESTART_RETRY_S = 2.0
# Pages have priority if processors are scarce: about three times a worker's share.
NICENESS = 5
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sent:
    """One request. `limit`: most bytes of the unpacked body; `sender` None: the service itself."""

    attempt_uid: str
    body: bytes
    encoding: str | None
    limit: int
    sender: Sender | None


class Taken(NamedTuple):
    """The result of a stored batch."""

    run_id: int
    receipt: Receipt


class IngestionInterruptedError(Exception):
    """The batch could not be stored now; the message asks the sender to send it again."""


class Intake(Protocol):
    """Interface for ingesting a batch.

    Raises BatchError, UnknownAttemptError, ForeignRunError, IngestionInterruptedError and database errors.
    """

    async def __call__(self, sent: Sent) -> Taken: ...


def take(database: Database, sent: Sent) -> Taken:
    """Unpack, check and store a batch. Raises the same errors as `Intake`."""
    batch = parse_batch(unpack(sent.body, sent.encoding, sent.limit))
    arrived = prepare(batch.events)
    alive = batch.heartbeat.alive if batch.heartbeat else None
    uid = sent.attempt_uid
    with database.reading(snapshot=False) as session:
        run_id = session.scalar(select(Attempt.run_id).where(Attempt.uid == uid))
    if run_id is None:
        raise UnknownAttemptError(f"attempt {uid} is unknown: announce it first")

    def store() -> Receipt:
        with database.writing() as session:
            now = time.time()
            return ingest(session, uid, arrived, now, alive, batch.dropped, batch.known, sent.sender)

    try:
        # A webhook may be deleted while the run's end is stored, which has a message for it.
        return Taken(run_id, again_if_raced(store))
    except ReplacingError as error:
        raise IngestionInterruptedError(str(error)) from error


class ThreadIntake:
    """Ingestion in threads of this process."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def __call__(self, sent: Sent) -> Taken:
        return await run_sync(take, self._database, sent)


class WorkerIntake:
    """Ingestion in worker processes. All methods run on the event loop's thread."""

    def __init__(self, database_url: str, workers: int) -> None:
        self._url = database_url
        self._workers = workers
        self._pool = self._start()

    async def __call__(self, sent: Sent) -> Taken:
        pool = self._pool
        try:
            future = asyncio.wrap_future(pool.submit(_work, sent))
            return await asyncio.wait_for(future, ANSWER_SECONDS)
        except BrokenProcessPool as error:
            if self._pool is pool:
                logger.error("an ingestion worker has died: starting new ones")
                pool.shutdown(wait=False)
                self._pool = self._start()
            raise IngestionInterruptedError("the ingestion was interrupted: send the batch again") from error
        except TimeoutError as error:
            detail = f"the ingestion has not responded for {ANSWER_SECONDS:g} s: send the batch again"
            raise IngestionInterruptedError(detail) from error

    def close(self) -> None:
        """End the workers; blocks for `GOODBYE_SECONDS` at most."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + GOODBYE_SECONDS
        # The service starts no other processes in this way. The loop repeats, because the pool may just be starting
        # one.
        while children := multiprocessing.active_children():
            for process in children:
                process.join(max(0.0, end - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join(GOODBYE_SECONDS)

    def _start(self) -> ProcessPoolExecutor:
        # A fork would copy locks that other threads hold.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=_begin, initargs=(self._url,))
        for _ in range(self._workers):  # starts them now, because a start takes a second and the first batch would wait
            pool.submit(_ready)
        return pool


# State of a worker process.

_database: Database | None = None


def _begin(database_url: str) -> None:
    global _database
    # Ctrl-C reaches every process of the terminal; the service ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _database = Database(database_url)
    # Loaded modules stay, so the garbage collector needs to search only the objects of batches.
    gc.collect()
    gc.freeze()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _ready() -> None:
    """Do nothing: that the call returns shows that a worker is ready."""


def _work(sent: Sent) -> Taken:
    assert _database is not None
    try:
        return take(_database, sent)
    except (OperationalError, PoolTimeoutError) as error:
        # The cause is a driver's object, which cannot be sent to another process.
        raise BusyError(f"the database did not respond: {error}") from None
