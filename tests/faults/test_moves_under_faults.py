"""Moves and convoys under schedules of faults: the product's keeper, mover and port over engines behind broken ways.

Each sample is answered once and rightly, or one sentence says that no engine is left. Nothing is kept at an engine that
lives: no seat, no sample, no buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import ray

from rhyme_openrlhf.engine.messages import News, SampleRequest, Started
from rhyme_openrlhf.engine.port import RayEngine
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.engine_losses import UNREACHED_SECONDS
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE, MoveRefused
from tests import virtual_time
from tests.faults.schedule import Schedule, core_dead, unreachable
from tests.moves.fakes import FakeEngine, expected

ENGINES, SAMPLES, LIMIT_S, IDLE_S = 4, 6, 1.0, 10.0
COURSES = 10
KINDS = ("core killed", "actor killed", "node lost", "broken", "cut off", "slow", "paused", "clock", "aborted")


class Engine(FakeEngine):
    """A fake engine that has nothing to tell until a sample comes: hours of waiting take no computing."""

    async def collect(self, wait_s: float, heard: int = 0) -> News:
        if not self.here and not self.finished and self.told_news.number <= heard:
            self.comes.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.comes.wait(), IDLE_S)
        return await super().collect(wait_s, heard)

    @functools.cached_property
    def comes(self) -> asyncio.Event:
        return asyncio.Event()

    def start_sample(self, *arguments: Any) -> Started:
        self.comes.set()
        return super().start_sample(*arguments)

    def expect_sample(self, *arguments: Any) -> str:
        self.comes.set()
        return super().expect_sample(*arguments)


class World:
    """Engines on two nodes, behind handles as Ray has them."""

    def __init__(self, schedule: Schedule, chance: random.Random) -> None:
        self.schedule, self.chance = schedule, chance
        self.engines = [Engine(lambda _: "") for _ in range(ENGINES)]
        self.handles = [Handle(self, number) for number in range(ENGINES)]
        self.running: list[asyncio.Task[Any]] = []
        self.aborted: set[int] = set()
        self.clock_step = 0.0

    def point(self, number: int) -> float:
        """Pass an await point of a call to an engine; return the seconds by which it is late."""
        now, handle = asyncio.get_running_loop().time(), self.handles[number]
        match self.schedule.next():
            case "core killed":
                handle.core_dead = True
            case "actor killed":
                handle.kill()
            case "node lost":
                for other in self.handles[number // 2 * 2 :][:2]:
                    other.kill()
            case "broken":
                handle.broken_until = now + self.chance.choice([0.01, 2.0])
            case "cut off":
                handle.broken_until = now + 3 * UNREACHED_SECONDS
            case "slow":
                return 1.5 * LIMIT_S
            case "paused":
                handle.paused_until = now + 5.0
            case "clock":
                self.clock_step += self.chance.uniform(-1, 1) * 1e5
            case "aborted":
                sample = self.chance.randrange(SAMPLES)
                if self.running and self.running[sample].cancel():
                    self.aborted.add(sample)
        return 0.0


class Handle:
    """One engine's actor; each call passes an await point before it is followed, and one before it is answered."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self._number = world, number
        self.core_dead = self.dead = False
        self.broken_until = self.paused_until = 0.0

    @property
    def lives(self) -> bool:
        return not self.dead and not self.core_dead

    def kill(self) -> None:
        self.dead = True

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, *arguments))

    async def _call(self, name: str, *arguments: Any) -> Any:
        await self._way()
        if self.core_dead:
            if name == "collect":
                raise core_dead()
            # As vLLM: nobody ever answers.
            await asyncio.Event().wait()
        answer = getattr(self._world.engines[self._number], name)(*arguments)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        await self._way()
        return answer

    async def _way(self) -> None:
        late, clock = self._world.point(self._number), asyncio.get_running_loop().time
        await asyncio.sleep(max(late, self.paused_until - clock()))
        if self.dead:
            raise ray.exceptions.ActorDiedError
        if clock() < self.broken_until:
            raise unreachable()


async def scenario(schedule: Schedule, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Samples on four engines are moved one by one, and all of an engine together."""
    chance = random.Random(seed)
    world = World(schedule, random.Random(seed + 1))
    wall = time.time
    patch.setattr(time, "time", lambda: wall() + world.clock_step)
    patch.setattr(ray, "kill", lambda handle: handle.kill())
    keeper = SampleKeeper({n: RayEngine(n, world.handles[n]) for n in range(ENGINES)}, 0.001)
    records: list[MoveRecord] = []
    mover = Mover(
        keeper,
        KvBufferStore(folder),
        lambda *_: Choice(chance.choice([KV_TRANSFER, RECOMPUTE])),
        LIMIT_S,
        records.append,
    )
    keeper.start()
    asked = [
        SampleRequest((n + 1,), SimpleNamespace(max_tokens=40 + 9 * n, seed=n % 2 or None)) for n in range(SAMPLES)
    ]
    world.running = [asyncio.create_task(keeper.generate(one, n % 2)) for n, one in enumerate(asked)]
    moves: list[asyncio.Task[Any]] = []
    for turn in range(6):
        await asyncio.sleep(0.004)
        here = [sample for n in range(ENGINES) for sample in keeper.samples(n)]
        if turn % 3 == 2 and here:
            orders = [(sample, 2 + turn % 2) for sample in here if sample.engine != 2 + turn % 2]
            moves.append(asyncio.create_task(mover.move_together(orders, "tp_switch", lambda: asyncio.sleep(0.01, ""))))
        elif here:
            moves.append(
                asyncio.create_task(mover.move(chance.choice(here), chance.randrange(ENGINES), "reallocation"))
            )
    outputs = await asyncio.gather(*world.running, return_exceptions=True)
    for move in await asyncio.gather(*moves, return_exceptions=True):
        assert not isinstance(move, BaseException) or isinstance(move, MoveRefused), repr(move)
    left = [engine for engine, handle in zip(world.engines, world.handles, strict=True) if handle.lives]
    for number, (output, one) in enumerate(zip(outputs, asked, strict=True)):
        if number in world.aborted:
            continue
        if isinstance(output, EngineLost) and not left:
            assert "no engine is left" in str(output)
            continue
        assert not isinstance(output, BaseException), (number, repr(output))
        assert output[0] == expected(one)
    # What has to be tidied up at an engine that could not be reached is, as soon as it can.
    await asyncio.sleep(4 * UNREACHED_SECONDS)
    for engine, handle in zip(world.engines, world.handles, strict=True):
        assert not handle.lives or (not engine.here and not engine.rooms), (engine.here, engine.rooms)
    assert not list(folder.iterdir()) and not keeper._samples and not mover._tidying
    keeper.stop()


def run(schedule: Schedule, seed: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.moves.fakes.SEATS", 50)
        virtual_time.run(scenario(schedule, seed, folder, patch), 20 * UNREACHED_SECONDS)


def schedules(seeds: range, folder: Path) -> Counter[str]:
    """Run a schedule for each seed; return the faults that happened by kind."""
    found: Counter[str] = Counter()
    # What moves, too, is another thing with each course; what follows a sample's end is no part of it.
    courses = [Schedule() for _ in range(COURSES)]
    for seed, counted in enumerate(courses):
        run(counted, seed, folder)
    for seed in seeds:
        schedule = Schedule.of(seed, min(courses[seed % COURSES].points, 400), KINDS)
        try:
            run(schedule, seed % COURSES, folder)
        except BaseException as error:
            raise AssertionError(f"schedule {seed}: {schedule.faults}") from error
        found += schedule.hit
    return found


def test_no_sample_is_lost_or_kept(tmp_path: Path) -> None:
    assert set(schedules(range(60), tmp_path)) == set(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_sample_is_lost_or_kept_under_many_schedules(tmp_path: Path) -> None:
    assert set(schedules(range(60, 3000), tmp_path)) == set(KINDS)
