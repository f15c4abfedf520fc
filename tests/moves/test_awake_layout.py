"""KV caches that take turns, and switches over several layouts: on faithful fakes of engines, with their faults.

Real engines whose KV caches lose what is in them: test_tensor_parallel_moves.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.moves.tp_switcher import AwakeLayouts, TpSwitcher
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.telemetry.events import LayoutSwitched
from tests import virtual_time
from tests.moves.fakes import OnDevices, expected, profile

LATE_S = 0.5


@pytest.fixture(autouse=True)
def seats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tests.moves.fakes.SEATS", 50)
    yield


class TakingTurns(OnDevices):
    """A fake with a KV cache that may sleep; `engines`: all of the node."""

    asleep = False
    engines: list[TakingTurns]
    layouts: Mapping[int, int]

    def sleep_kv(self) -> None:
        self.asleep = True

    def wake_kv(self) -> None:
        # What is dead has no memory.
        have = {self.layouts[one.number] for one in self.engines if one.alive and not one.asleep}
        assert have <= {self.layouts[self.number]}, f"engine {self.number} takes memory that layouts {have} have"
        self.asleep = False

    def generate(self) -> None:
        # Frozen where it is; a real one would compute it again.
        if not self.asleep:
            super().generate()

    def import_kv(self, *arguments: Any) -> str:
        assert not self.asleep, "blocks are copied into a KV cache that sleeps"
        return super().import_kv(*arguments)

    def start_sample(self, *arguments: Any) -> Any:
        assert len(arguments) < 4 or not self.asleep, "a sample is to go on without KV cache"
        return super().start_sample(*arguments)


class Node:
    """One node's engines of some layouts, a keeper and what switches them."""

    def __init__(self, folder: Path, plan: LayoutPlan, fault: Callable[[int, str], str], **settings: Any) -> None:
        self.plan = plan
        self.layouts = plan.layouts()
        self.engines = [TakingTurns(lambda method, n=number: fault(n, method)) for number in self.layouts]
        for number, engine in enumerate(self.engines):
            engine.number, engine.told, engine.engines, engine.layouts = number, [], self.engines, self.layouts
            engine.asleep = not plan.both_awake and number not in plan.numbers(0)
        tails = [number for number, layout in self.layouts.items() if layout]
        self.keeper = SampleKeeper(dict(enumerate(self.engines)), 0.001, spare=tails)
        self.moved: list[MoveRecord] = []
        self.carrier = settings.pop("carrier", KV_TRANSFER)
        self.mover = Mover(
            self.keeper, KvBufferStore(folder), lambda *_: Choice(self.carrier), LATE_S, self.moved.append
        )
        self.events: list[LayoutSwitched] = []
        self.said: list[str] = []
        asked = TpSwitchSettings(enable=True, status_s=0.02, **settings)
        self.reports = EngineReports(self.keeper, asked.status_s, self.said.append, self.layouts)
        self.came = False
        self.switcher = TpSwitcher(
            asked, plan, self.keeper, self.reports, self.mover, self.events.append, lambda: 1,
            lambda: self.came, LATE_S,
        )  # fmt: skip
        self.switcher.place(dict.fromkeys(self.layouts, "here"))

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            if any(self.keeper.samples(number) for number in self.layouts):
                await self.reports.hear()
            self.switcher.look()

    async def step(self, lengths: list[int]) -> None:
        """Samples of these lengths, which are all answered rightly."""
        self.came = False
        asked = [SampleRequest((n + 1,), SimpleNamespace(max_tokens=m, seed=None)) for n, m in enumerate(lengths)]
        tasks = []
        for place, one in enumerate(asked):
            begins = self.switcher.begins_at(place % self.plan.engines)
            tasks.append(asyncio.create_task(self.keeper.generate(one, begins)))
        self.came = True
        for one, task in zip(asked, tasks, strict=True):
            assert (await task)[0] == expected(one)

    @asynccontextmanager
    async def switched(self, lengths: list[int]) -> AsyncIterator[asyncio.Task[None]]:
        """Within it, from a switch on; gives what ends with the samples."""
        self.keeper.start()
        loop = asyncio.create_task(self.watch())
        step = asyncio.create_task(self.step(lengths))
        while not self.events:
            await asyncio.sleep(0.01)
        yield step
        loop.cancel()
        self.keeper.stop()

    async def run(self, *steps: list[int]) -> None:
        self.keeper.start()
        loop = asyncio.create_task(self.watch())
        try:
            for lengths in steps:
                await self.step(lengths)
                await asyncio.sleep(0.1)
            assert not loop.done()
        finally:
            loop.cancel()
            self.switcher.stop()
            self.reports.stop()
            self.keeper.stop()


def healthy(number: int, method: str) -> str:
    return ""


def run(node: Node, *steps: list[int]) -> None:
    virtual_time.run(node.run(*steps), 15)


TWO = LayoutPlan(2, 1, (Tail(1, 2),), both_awake=False)
THREE = LayoutPlan(4, 1, (Tail(2, 2), Tail(1, 4)))


@pytest.mark.parametrize("carrier", [KV_TRANSFER, RECOMPUTE])
def test_memory_goes_to_the_tail_and_comes_back_for_the_next_step(tmp_path: Path, carrier: str) -> None:
    """The fakes see to it that no engine takes memory which others have, and that nothing is copied into none."""
    node = Node(tmp_path, TWO, healthy, samples=2, carrier=carrier)
    run(node, [100, 100, 1500, 1500], [100, 100, 1500, 1500])
    assert [(event.from_tp, event.to_tp, event.samples) for event in node.events] == [(1, 2, 2)] * 2
    assert all(record.move.carrier == carrier and not record.move.expected for record in node.moved)
    assert [engine.asleep for engine in node.engines] == [False, False, True] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "method"),
    [(0, "sleep_kv"), (1, "sleep_kv"), (2, "wake_kv"), (2, "hold_room"), (2, "start_sample"), (1, "stop_sample")],
)
@pytest.mark.parametrize("what", ["fails", "dies", "never"])
def test_no_sample_is_lost_or_waits_for_ever_when_memory_is_not_handed_over(
    tmp_path: Path, number: int, method: str, what: str
) -> None:
    once = []

    def fault(of: int, called: str) -> str:
        if (of, called) != (number, method) or once:
            return ""
        once.append(called)
        return what

    node = Node(tmp_path, TWO, fault, samples=3)
    run(node, [900, 900, 900], [300, 300])
    assert once
    for layout in range(2):
        lives = [e for e in node.engines if e.alive and node.layouts[e.number] == layout]
        assert all(engine.asleep == bool(layout) for engine in lives)
    if what == "fails" and method != "stop_sample":
        # Where its memory is not handed over, or one cannot go along, all stay; those of the next step go.
        assert [event.samples for event in node.events] == [2] or method == "start_sample"


def test_all_of_a_node_go_or_none(tmp_path: Path) -> None:
    """One that had to stay would have no KV cache until the others have ended."""

    def fault(number: int, method: str) -> str:
        if method != "hold_room":
            return ""
        asked.append(method)
        return "fails" if len(asked) == 2 else ""

    asked: list[str] = []
    node = Node(tmp_path, TWO, fault, samples=3)
    run(node, [900, 900, 900])
    assert node.events == [] and not any(engine.asleep for engine in node.engines[:2])
    assert node.said == [] and len(node.moved) == 3


def test_what_begins_while_the_tail_has_the_devices_begins_there(tmp_path: Path) -> None:
    """A conversation's next round; at an engine without KV cache it would wait for the end of all others."""
    node = Node(tmp_path, TWO, healthy, samples=2)

    async def main() -> None:
        async with node.switched([3000, 3000]) as step:
            assert node.switcher.begins_at(0) == node.switcher.begins_at(2) == 2
            turn = SampleRequest((50,), SimpleNamespace(max_tokens=5, seed=None))
            assert (await node.keeper.generate(turn, node.switcher.begins_at(0)))[1] == 2
            # One that has come all the same gets the devices when the others have ended.
            late = asyncio.create_task(node.keeper.generate(turn, 0))
            await step
            assert (await late)[0] == expected(turn)
            assert node.switcher.begins_at(1) == 1

    virtual_time.run(main(), 60)


def test_a_node_switches_as_often_as_it_pays(tmp_path: Path) -> None:
    """Few samples are quicker on two devices each, the last one on four."""
    for both_awake in (True, False):
        plan = LayoutPlan(4, 1, (Tail(2, 2), Tail(1, 4)), both_awake=both_awake)
        node = Node(tmp_path, plan, healthy, rule="maximum")
        node.reports.install(profile(0.1), 0)
        node.reports.install(profile(0.03), 1)
        # Quick with one sample only.
        node.reports.install(steep(), 2)
        run(node, [200, 200, 1400, 1500, 3500])
        assert [(event.from_tp, event.to_tp) for event in node.events] == [(1, 2), (2, 4)], node.said
        assert node.events[-1].samples == 1


def steep() -> Any:
    flat = profile(0.001)
    return dataclasses.replace(
        flat, steps=tuple(dataclasses.replace(p, seconds=0.001 if p.running == 1 else 2.0) for p in flat.steps)
    )


def test_devices_that_others_have_are_no_place_for_reallocation(tmp_path: Path) -> None:
    node = Node(tmp_path, THREE, healthy, samples=2)

    async def main() -> None:
        async with node.switched([3000, 3000]) as step:
            await asyncio.sleep(0.1)
            assert node.events[0].to_tp == 4
            assert node.reports.fresh(0) == node.reports.fresh(1) == [] and len(node.reports.fresh(2)) == 1
            await step
            await asyncio.sleep(0.1)
            assert node.reports.lent == frozenset()

    virtual_time.run(main(), 60)


def test_a_device_never_has_two_kv_caches(tmp_path: Path) -> None:
    """Handings in any order and beside each other, with engines that fail and die."""

    async def main(seed: int) -> None:
        chance = random.Random(seed)
        faulty = {"on": True}

        def fault(number: int, method: str) -> str:
            return chance.choice(["fails", ""]) if faulty["on"] and method == "wake_kv" and number >= 4 else ""

        node = Node(tmp_path, LayoutPlan(4, 1, (Tail(2, 2), Tail(1, 4)), both_awake=False), fault)
        node.keeper.start()
        nodes = {"here": {layout: list(node.plan.numbers(layout)) for layout in range(3)}}
        turns = AwakeLayouts(node.keeper, nodes, LATE_S)
        for _ in range(10):
            asked = [chance.randrange(3) for _ in range(3)]
            problems = await asyncio.gather(*(turns.hand("here", layout) for layout in asked))
            awake = turns.awake("here")
            have, whole = {n for n in node.layouts if not node.engines[n].asleep}, set(node.plan.numbers(awake))
            assert have < whole if turns.partly("here") else have == whole
            assert problems[-1] or (awake == asked[-1] and have == whole)
        faulty["on"] = False
        assert await turns.hand("here", 2) == "" and turns.awake("here") == 2
        node.keeper.stop()

    for seed in range(10):
        virtual_time.run(main(seed), 60)
