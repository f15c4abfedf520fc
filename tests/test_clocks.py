"""Clocks of nodes that are hours apart, set back and forth, fast or slow: what is decided and measured is the same."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.scheduling.move import Phase
from rhyme_openrlhf.scheduling.move_costs import KV_TRANSFER
from rhyme_openrlhf.telemetry.control_connection import _seconds
from rhyme_openrlhf.telemetry.events import Event, RolloutFinished
from tests import virtual_time
from tests.moves.fakes import FakeEngine
from tests.pipeline.test_features_composed import Composed, Likely, Sizes, trained

HOUR = 3600.0


class Jumping:
    """A wall clock that is set back and forth by up to three hours whenever it is read."""

    def __init__(self) -> None:
        self.chance, self.own = random.Random(5), time.time

    def __call__(self) -> float:
        return self.own() + self.chance.uniform(-3, 3) * HOUR


def fast(factor: float) -> Callable[[], float]:
    """Return a wall clock that goes this much faster, and began hours ago."""
    own, began = time.time, time.time()
    return lambda: began - 7 * HOUR + factor * (own() - began)


# A wall clock that stands still is a factor of 0.
CLOCKS = {"set back and forth": Jumping, "fast": lambda: fast(1000.0), "backwards": lambda: fast(-50.0)}
CLOCKS |= {"still": lambda: fast(0.0)}


def course() -> tuple[list[tuple[Any, ...]], list[Event]]:
    """Return what a pipelined run with all kinds of faults trained, and its record."""
    faults = Composed(random.Random(11), Likely(late=0.1, long=0.3, moved=0.1, lost=0.05))
    found, error = trained(Sizes(12, 3, 2, 12), faults)
    assert error == ""
    told = [(step.step, step.rows, step.excluded, step.state.deferred, step.state.used) for step in found]
    return told, faults.run.events


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_pipelined_run_is_the_same_by_any_wall_clock(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, events = course()
    monkeypatch.setattr(time, "time", CLOCKS[clock]())
    others, recorded = course()
    assert others == found
    assert [type(event) for event in recorded] == [type(event) for event in events]
    # Durations are measured by a clock that nobody sets: a stage here takes well below a minute.
    seconds = [event.seconds for event in recorded if isinstance(event, RolloutFinished)]
    assert len(seconds) == len(found) and all(0 <= one < 60 for one in seconds)


def moved(folder: Path) -> MoveRecord:
    """Move a sample between two nodes, which say how long ago it stopped and had its first token."""

    async def main() -> MoveRecord:
        source, destination = (FakeEngine(lambda _: "") for _ in range(2))
        source.stop_age, destination.token_age = 2.0, 0.5
        keeper = SampleKeeper(dict(enumerate([source, destination])), 0.001)
        mover = Mover(keeper, KvBufferStore(folder), lambda *_: Choice(KV_TRANSFER), 10.0)
        keeper.start()
        asked = SampleRequest((1,), SimpleNamespace(max_tokens=400, seed=None))
        running = asyncio.create_task(keeper.generate(asked, 0))
        await asyncio.sleep(0.02)
        record = await mover.move(keeper.sample("0"), 1, "reallocation")
        await running
        keeper.stop()
        return record

    return virtual_time.run(main(), 30)


def test_a_server_asks_for_a_pause_by_its_own_clock() -> None:
    """A Retry-After may be a date; the answer that brings it says what time it is there."""
    assert _seconds("Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:27:30 GMT") == 30
    assert _seconds(" 7 ", "Wed, 21 Oct 2015 07:27:30 GMT") == 7
    assert _seconds("soon", None) is None and _seconds(None, None) is None


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_move_is_measured_without_comparing_clocks(
    clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs of moves are learnt from it. They decide how later samples are carried, and when layouts switch."""
    monkeypatch.setattr(time, "time", CLOCKS[clock]())
    record = moved(tmp_path)
    # It stopped two seconds before that was told, and had its token half a second before that was.
    assert record.move.phase is Phase.RUNNING and record.downtime is not None
    assert 1.5 <= record.downtime <= 1.5 + record.seconds
