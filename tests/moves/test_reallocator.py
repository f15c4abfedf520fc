"""The reallocation loop over faithful fakes of engines: what it orders, and what cannot hold it up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.home_watch import Reallocator
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover
from rhyme_openrlhf.scheduling.move import KV_TRANSFER
from rhyme_openrlhf.settings.moves import ReallocationSettings
from tests import virtual_time
from tests.moves.fakes import Reporting, expected


async def generate(
    folder: Path, engines: list[Reporting], counts: list[int], length: int, newer: list[int]
) -> tuple[list[Any], Any, Any]:
    for number, engine in enumerate(engines):
        engine.number = number
    keeper = SampleKeeper(dict(enumerate(engines)), 0.001)
    for engine in newer:
        engines[engine].weights = 1
    moved: list[Any] = []
    mover = Mover(keeper, KvBufferStore(folder), lambda *_: Choice(KV_TRANSFER), 1.0, moved.append)
    said: list[str] = []
    settings = ReallocationSettings(enable=True, threshold=4, cooldown_steps=1, status_s=0.02)
    reports = EngineReports(keeper, settings.status_s, said.append)
    reallocator = Reallocator(settings, keeper, mover, reports)

    async def watch() -> None:
        while True:
            await asyncio.sleep(settings.status_s)
            await reports.hear()
            reallocator.look()

    keeper.start()
    loop = asyncio.create_task(watch())
    asked = [
        SampleRequest((number,), SimpleNamespace(max_tokens=length, seed=None)) for number in range(1, sum(counts) + 1)
    ]
    where = [engine for engine, count in enumerate(counts) for _ in range(count)]
    answers = await asyncio.gather(*(keeper.generate(one, at) for one, at in zip(asked, where, strict=True)))
    loop.cancel()
    reallocator.stop()
    reports.stop()
    keeper.stop()
    assert [answer for answer, _ in answers] == [expected(one) for one in asked]
    return moved, said, reallocator


@pytest.fixture(autouse=True)
def seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.moves.fakes.SEATS", 50)


def run(
    folder: Path, engines: list[Reporting], counts: list[int], length: int = 400, newer: list[int] | None = None
) -> Any:
    """`newer`: engines that have newer weights than they reported."""
    return virtual_time.run(generate(folder, engines, counts, length, newer or []), 60)


def healthy(_: str) -> str:
    return ""


def test_samples_go_from_the_full_engine_to_the_empty_one(tmp_path: Path) -> None:
    moved, said, reallocator = run(tmp_path, [Reporting(healthy), Reporting(healthy)], [10, 1])
    assert len(moved) >= 3 and said == []
    assert {(record.move.source, record.move.destination) for record in moved[:3]} == {(0, 1)}
    assert reallocator.decisions >= 1 and {record.cause for record in moved} == {"reallocation"}


def test_a_balanced_run_is_left_alone(tmp_path: Path) -> None:
    moved, said, reallocator = run(tmp_path, [Reporting(healthy), Reporting(healthy)], [5, 5])
    assert moved == [] == said and reallocator.decisions == 0


def test_an_engine_that_does_not_report_holds_nothing_up(tmp_path: Path) -> None:
    engines = [Reporting(healthy), Reporting(healthy), Reporting(healthy)]
    engines[2].silent = True
    moved, said, _ = run(tmp_path, engines, [10, 1, 1])
    assert len(moved) >= 3 and 2 not in {record.move.destination for record in moved} and said == []


def test_an_engine_that_cannot_report_is_told_of_once(tmp_path: Path) -> None:
    engines = [Reporting(healthy), Reporting(healthy)]
    engines[1].fails = True
    moved, said, _ = run(tmp_path, engines, [10, 1])
    assert moved == [] and said == ["engine 1 does not report for reallocation: no such method"]


def test_a_move_that_fails_leaves_its_sample_generating(tmp_path: Path) -> None:
    def refuses(method: str) -> str:
        return "fails" if method == "hold_room" else ""

    moved, _, _ = run(tmp_path, [Reporting(healthy), Reporting(refuses)], [10, 1])
    assert moved and {record.move.phase.value for record in moved} == {"cancelled"}


def test_engines_with_other_weights_since_they_reported_are_nothing_to_tell(tmp_path: Path) -> None:
    moved, said, reallocator = run(tmp_path, [Reporting(healthy), Reporting(healthy)], [10, 1], newer=[1])
    assert moved == [] == said and reallocator.decisions >= 1
