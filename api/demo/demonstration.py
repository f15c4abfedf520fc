"""Content of `rhyme serve --demo`: recorded runs, one of them replayed live, and a synthetic run; all are labelled.

The demo starts no runs and keeps nothing: all files are in a folder that the caller creates and removes.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from anyio.to_thread import run_sync
from sqlalchemy import select, update
from sqlalchemy.exc import SQLAlchemyError

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.access.service import Background, Service
from rhyme_openrlhf.api.demo.recording import move_run, unpack
from rhyme_openrlhf.api.demo.replay import SPEED, Replay
from rhyme_openrlhf.api.demo.synthetic_run import LABEL, SyntheticRun, write_run_directory
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.store.database import Database, DatabaseError
from rhyme_openrlhf.api.store.models import Experiment, Run, RunTag

# The recorded run that is replayed.
LIVE = "drafts-seed-1"
# Recorded one after the other: the same settings but for the seed, with drafts from history and without.
EXPERIMENT = "history drafts, three seeds"
IN_EXPERIMENT = re.compile(r"(no-)?drafts-seed-\d+")
EXPERIMENT_NOTE = (
    "Six recordings, made one after the other on one machine: three seeds with drafts from history and three without. "
    "Drafts do not change what is learned, so the rewards of both groups differ by chance alone. Seconds differ."
)
RECORDED_NOTE = (
    "A recording of `rhyme demo` on two CPU cores. Its events, logs and responses are original; only times, paths and "
    "machine names were changed. Nothing runs now."
)
REPLAYED_NOTE = (
    f"A recording that is replayed again and again at {SPEED:g} times its speed through the real ingestion; its first "
    "steps are there at once. Figures are those of the recording. Nothing runs now."
)
SYNTHETIC_NOTE = (
    f"{LABEL[0].upper()}{LABEL[1:]}. They are drawn from fixed distributions, so that the pages on moves, layout "
    "switches and rank groups have content. No figure here is a measurement."
)
SYNTHETIC = SyntheticRun(steps=60, engines=16, steps_per_epoch=12, name="synthetic (no such run was made)")
# Seconds between two past runs, and since the end of the newest one.
APART_SECONDS = 1800.0
STOP_SECONDS = 10.0

logger = logging.getLogger(__name__)


def demonstration(directory: Path) -> Background:
    """Return background work that shows the demo from the service's first response on; `directory` must exist."""

    @asynccontextmanager
    async def shown(service: Service) -> AsyncIterator[None]:
        replay = await run_sync(show, service, directory)
        stop = threading.Event()

        def play() -> None:
            try:
                replay.play(stop)
            except (OSError, SQLAlchemyError, DatabaseError):
                logger.exception("the recording is not played any further")

        thread = threading.Thread(target=play, name="replay", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            await run_sync(thread.join, STOP_SECONDS)

    return shown


def show(service: Service, directory: Path) -> Replay:
    """Import the past runs into the store and announce the run to replay. Raises RecordingError, OSError."""
    now = time.time()
    recorded = {path.name: path for path in unpack(embedded.RECORDING, directory)}
    # Before the recording's times are moved, because the replay moves them itself.
    replay = Replay(service, recorded[LIVE], directory / "replayed", f"{LIVE} (replayed recording)")
    synthetic = directory / "synthetic"
    write_run_directory(synthetic, SYNTHETIC)
    past = [(path, f"{name} (recording)", "recording", RECORDED_NOTE) for name, path in recorded.items()]
    past.append((synthetic, SYNTHETIC.name, "synthetic", SYNTHETIC_NOTE))
    compared = []
    # The oldest run first, as they would have arrived, so that the newest is on top.
    for number, (path, name, tag, note) in reversed(list(enumerate(past, start=1))):
        move_run(path, now - number * APART_SECONDS)
        uid = import_directory(service.database, path.resolve(), now).run_uid
        _label(service, uid, name, tag, note)
        if IN_EXPERIMENT.fullmatch(path.name):
            compared.append(uid)
    compare(service.database, compared, now)
    replay.announce()
    _label(service, replay.run_uid, f"{LIVE} (replayed recording)", "recording", REPLAYED_NOTE)
    replay.tick()
    return replay


def compare(database: Database, runs: Sequence[str], now: float) -> int:
    """Make the experiment of the runs with these uids, and return its id."""
    with database.writing() as session:
        experiment = Experiment(name=EXPERIMENT, description=EXPERIMENT_NOTE, created_at=now)
        session.add(experiment)
        session.flush()
        session.execute(update(Run).where(Run.uid.in_(runs)).values(experiment_id=experiment.id))
        return experiment.id


def _label(service: Service, uid: str, name: str, tag: str, note: str) -> None:
    with service.database.writing() as session:
        run = session.scalars(select(Run).where(Run.uid == uid)).one()
        run.name, run.notes, run.tags = name, note, [RunTag(tag=tag)]
