"""Stores for the tests: a real SQLite file, and a real PostgreSQL server where its programs are installed."""

import functools
import random
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, select, text

from rhyme_openrlhf.api.store.base import Base
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.telemetry.event_json import to_json
from rhyme_openrlhf.telemetry.events import (
    CheckpointSaved,
    DraftBudget,
    EngineInterval,
    EngineSample,
    EngineStep,
    Evaluation,
    Event,
    LayoutSwitched,
    OffPolicyness,
    RankGroups,
    RankStability,
    RolloutFinished,
    RolloutStarted,
    RunFinished,
    RunStarted,
    SampleMoved,
    SystemSample,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests.api.http_service import api, make_api, numbered, record, reported, store  # noqa: F401 (fixtures)
from tests.api.launch_service import launched  # noqa: F401 (a fixture)
from tests.stores import place_upgraded

SERVER = Path(__file__).parents[2] / "scripts" / "temporary_postgresql.py"
NOT_INSTALLED = 3


@pytest.fixture(scope="session")
def postgresql_server(starts_postgresql: None) -> Iterator[str]:
    """URL of a temporary server's own database, in which a database `migrated` is the template of all others."""
    server = subprocess.Popen([sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    url = server.stdout.readline().strip()
    if not url:
        if server.wait(timeout=60) == NOT_INSTALLED:
            pytest.skip("PostgreSQL is not installed")
        pytest.fail("the temporary PostgreSQL server did not start")
    _execute(url, "CREATE DATABASE migrated")
    template = Database(_named(url, "migrated"))
    template.upgrade()
    template.dispose()
    yield url
    _administration(url).dispose()
    server.stdin.close()
    server.wait(timeout=60)


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """URL of a database of this test's own, with this version's schema."""
    name = f"test_{uuid.uuid4().hex}"
    _execute(postgresql_server, f"CREATE DATABASE {name} TEMPLATE migrated")
    yield _named(postgresql_server, name)
    _execute(postgresql_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_postgresql_url(postgresql_server: str) -> Iterator[str]:
    """URL of an empty database."""
    name = f"test_{uuid.uuid4().hex}"
    _execute(postgresql_server, f"CREATE DATABASE {name}")
    yield _named(postgresql_server, name)
    _execute(postgresql_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    url: str = request.getfixturevalue("empty_postgresql_url")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A store of each kind, with this version's schema and no rows."""
    if request.param == "sqlite":
        place_upgraded(tmp_path / "store.db")
        store = Database(f"sqlite:///{tmp_path}/store.db")
    else:
        store = Database(request.getfixturevalue("postgresql_url"))
    yield store
    store.dispose()


def _named(url: str, name: str) -> str:
    return make_url(url).set(database=name).render_as_string(hide_password=False)


@functools.cache
def _administration(url: str) -> Engine:
    """Return a server's engine for databases. It keeps its connection: a new one takes as long as a database."""
    return create_engine(url, isolation_level="AUTOCOMMIT")


def _execute(url: str, statement: str) -> None:
    with _administration(url).connect() as connection:
        connection.execute(text(statement))


EventRows = list[dict[str, Any]]


def _make_run(seed: int, steps: Sequence[int] = (1, 2, 3, 4), engines: int = 3, end: str = "succeeded") -> EventRows:
    """The JSON events of a made-up run, in the order of its log: every kind, several sources, odd numbers."""
    rng = random.Random(seed)
    now = 1_700_000_000.0 + 1000 * seed
    rows: EventRows = []
    following: dict[str, int] = {}

    def write(event: Event, source: str) -> None:
        nonlocal now
        now += rng.random()
        sequence = following.get(source, 0)
        following[source] = sequence + 1
        rows.append(to_json(event, now, source, sequence))

    write(RunStarted(1, "made up", ["rhyme"], engines, 1, 2, len(steps), 4, 8, False), "driver")
    for step in steps:
        epoch = 1 + step // 3
        begin = now
        write(RolloutStarted(step, epoch, 4, 32), "rollout")
        for engine in range(engines):
            source = f"engine-{engine}"
            cuts = sorted(now + rng.uniform(-1, 6) for _ in range(4))
            states = [("sync", ""), ("generate", ""), ("idle", rng.choice(["tail", "weights", "trainer", ""]))]
            for (state, cause), start, stop in zip(states, cuts, cuts[1:], strict=False):
                write(EngineInterval(engine, state, start, stop, step, step - 1, cause), source)
            kv_cache = None if step == 1 else 0.25
            write(EngineSample(step, engine, rng.randrange(9), rng.choice([0.0, 1.3]), 700, 90, 30, kv_cache), source)
            counters = EngineCounters(
                response_tokens=rng.randrange(1, 9000),
                decode_tokens=rng.randrange(9000),
                decode_steps=rng.randrange(900),
                sample_steps=rng.randrange(9000),
                drafts=20,
                drafted=rng.randrange(900),
                accepted=rng.randrange(500),
                busy_seconds=rng.random() * 9,
                draft_seconds=rng.random(),
                finished_samples=8,
            )
            write(EngineStep(step, engine, counters, rng.choice([None, step])), source)
        write(SampleMoved(step, "p1/3", 0, 1, "reallocation", "recompute", "moved", 0.25, 300), "rollout")
        write(LayoutSwitched(step, "node-a", 1, 2, 3, rng.choice([0.5, float("nan")])), "rollout")
        reward = rng.choice([None, rng.random()])
        rollout = RolloutFinished(step, epoch, now - begin, 32, 9000, reward, 90.5, 88.0, 180.25, 256, 2)
        write(rollout, "rollout")
        metrics = {"reward": rng.random(), "loss": rng.choice([0.1, float("nan"), float("inf")])}
        write(
            TrainStep(step, epoch, {"rollout": 1.0, "experience": 2.0, "train": 3.5, "sync": 0.25}, metrics), "trainer"
        )
        write(WeightsPublished(step, 0.5, 1000, 2), "trainer")
        if step % 2 == 0:
            write(Evaluation(step, {"pass1": rng.random()}), "trainer")
            write(CheckpointSaved(step, f"checkpoints/step-{step}"), "trainer")
        write(RankStability(epoch, rng.random(), 4), "history")
        write(OffPolicyness(step, [0, 2], [30, 2]), "trainer")
        write(RankGroups(step, [3, 1], [2, 1], [90.0, 400.0], [88.5, float("nan")]), "rollout")
        write(DraftBudget(step, 0, [1, 8], [20, 300], [16.0, 4.0], [3.0, 4.0], [3.1, 4.5]), "rollout")
        write(
            SystemSample(
                "node-a", 0.5, 1.5, 2**35, 2**36, 2**40, None, 2**33, [0.25, float("nan")], [2**34, 0], [2**36, 2**36],
                {"engine 0": 1.25}, {"engine 0": 2**31},
            ),
            "system",
        )  # fmt: skip
    rows.append({"kind": "from_the_future", "time": now, "source": "driver", "sequence": following["driver"], "x": [1]})
    following["driver"] += 1
    if end:
        write(RunFinished(end, "", now - 1_700_000_000.0), "driver")  # type: ignore[arg-type]
    return rows


def _stored_rows(
    database: Database, run_uid: str, renumbered: Mapping[int, int] | None = None
) -> dict[str, list[tuple[Any, ...]]]:
    """Everything stored of a run, without row numbers and without what only a clock decides, in a fixed order.

    `renumbered` gives attempts other numbers.
    """
    hidden = {"id", "heartbeat_at", "queued_at", "created_at", "origin", "uid", "run_directory", "name"}
    # What an import brought in of events that a reporter gave up before: that there was a reporter shows in it.
    hidden.add("filled")
    found = {}
    with database.reading() as session:
        run = session.execute(select(Run).where(Run.uid == run_uid)).scalar_one()
        names = renumbered or {}
        numbers = {attempt.id: names.get(attempt.number, attempt.number) for attempt in run.attempts}
        for table in Base.metadata.sorted_tables:
            if table.name == "runs":
                query = select(table).where(table.c.id == run.id)
            elif "run_id" in table.c:
                query = select(table).where(table.c.run_id == run.id)
            elif "attempt_id" in table.c:
                query = select(table).where(table.c.attempt_id.in_(numbers))
            else:
                continue
            rows = [
                tuple(
                    numbers[value] if name == "attempt_id" else value
                    for name, value in row.items()
                    if name != "run_id" and (name not in hidden)
                )
                for row in session.execute(query).mappings()
            ]
            found[table.name] = sorted(rows, key=repr)
    return found


@pytest.fixture(scope="session")
def make_run() -> Callable[..., EventRows]:
    """`_make_run`."""
    return _make_run


@pytest.fixture(scope="session")
def stored_rows() -> Callable[..., dict[str, list[tuple[Any, ...]]]]:
    """`_stored_rows`."""
    return _stored_rows
