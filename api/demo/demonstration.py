"""What `rhyme serve --demo` shows: recorded runs, one of them played again, and a synthetic one; all say what they are.

Nothing is started and nothing is kept: everything lies in the folder that the caller makes and removes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from anyio.to_thread import run_sync
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from rhyme_openrlhf import embedded
from rhyme_openrlhf.api.access.service import Background, Service
from rhyme_openrlhf.api.demo.recording import move_run, unpack
from rhyme_openrlhf.api.demo.replay import SPEED, Replay
from rhyme_openrlhf.api.demo.synthetic_run import LABEL, SyntheticRun, write_run_directory
from rhyme_openrlhf.api.ingest.importer import import_directory
from rhyme_openrlhf.api.store.database import DatabaseError
from rhyme_openrlhf.api.store.models import Run, RunTag

# The recorded run that is played again.
LIVE = "sorting-and-arithmetic"
RECORDED_NOTE = (
    "A recording. This run was made with `rhyme demo` on two CPU cores; its events, logs and responses are shown as "
    "they were written, with paths and names of its machine replaced and its times moved. The machine did other work "
    "beside some of them, so their seconds cannot be compared. Nothing runs now."
)
REPLAYED_NOTE = (
    f"A recording that is played again, {SPEED:g} times as fast as it happened, through the real ingestion: its first "
    "steps at once, then to its end, once. Figures are those of the recording. Nothing runs now."
)
SYNTHETIC_NOTE = (
    f"{LABEL[0].upper()}{LABEL[1:]}. They are drawn from fixed distributions, so that views of moves, layout switches "
    "and rank groups have something to show. No figure here says anything about any machine."
)
SYNTHETIC = SyntheticRun(steps=60, engines=16, steps_per_epoch=12, name="synthetic (no such run was made)")
# How far apart the past runs lie, and how long the last one is over.
APART_SECONDS = 1800.0
STOP_SECONDS = 10.0

logger = logging.getLogger(__name__)


def demonstration(directory: Path) -> Background:
    """Background work of a service: shows everything from the moment the service answers. `directory` must exist."""

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
    """Bring the past runs into the store and announce the one to play. Raises RecordingError, OSError."""
    now = time.time()
    recorded = {path.name: path for path in unpack(embedded.RECORDING, directory)}
    # Before its times are moved: the replay moves them its own way.
    replay = Replay(service, recorded[LIVE], directory / "replayed", f"{LIVE} (replayed recording)")
    synthetic = directory / "synthetic"
    write_run_directory(synthetic, SYNTHETIC)
    past = [(path, f"{name} (recording)", "recording", RECORDED_NOTE) for name, path in recorded.items()]
    past.append((synthetic, SYNTHETIC.name, "synthetic", SYNTHETIC_NOTE))
    # The oldest first, as they would have come: the newest one is on top.
    for number, (path, name, tag, note) in reversed(list(enumerate(past, start=1))):
        move_run(path, now - number * APART_SECONDS)
        _label(service, import_directory(service.database, path, now).run_uid, name, tag, note)
    replay.announce()
    _label(service, replay.run_uid, f"{LIVE} (replayed recording)", "recording", REPLAYED_NOTE)
    replay.tick()
    return replay


def _label(service: Service, uid: str, name: str, tag: str, note: str) -> None:
    with service.database.writing() as session:
        run = session.scalars(select(Run).where(Run.uid == uid)).one()
        run.name, run.notes, run.tags = name, note, [RunTag(tag=tag)]
