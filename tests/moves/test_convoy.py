"""Moves that go together: what they wait for, what they do not, and that real engines begin with all in one step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves import mover as movers
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Phase
from tests import virtual_time
from tests.moves.engines import TIMEOUT_S, Engines, answer, grown_to, request
from tests.moves.fakes import FakeEngine, expected


class Noting(FakeEngine):
    """A fake that notes when it was ordered what, by the number of the sample; `slow`: it stops these late."""

    def __init__(self, noted: list[tuple[str, str]], slow: dict[str, float]) -> None:
        super().__init__(lambda _: "")
        self.noted, self.slow = noted, slow

    async def call(self, called: Any, *arguments: Any) -> Any:
        method = called.__name__
        if method in ("hold_room", "stop_sample", "start_sample"):
            sample = arguments[0].partition(".")[0]
            if method == "stop_sample":
                await asyncio.sleep(self.slow.get(sample, 0))
            self.noted.append((method, sample))
        return await super().call(called, *arguments)


@dataclass
class Convoys:
    """A keeper and a mover over a source and a destination, with samples that run at the source."""

    folder: Path
    count: int = 3
    slow: dict[str, float] = field(default_factory=dict)
    length: int = 20_000

    def __post_init__(self) -> None:
        self.noted: list[tuple[str, str]] = []
        self.engines = [Noting(self.noted, self.slow) for _ in range(2)]
        self.keeper = SampleKeeper(dict(enumerate(self.engines)), 0.001)
        self.records: list[MoveRecord] = []
        store, choice = KvBufferStore(self.folder), Choice(KV_TRANSFER)
        self.mover = Mover(self.keeper, store, lambda *_: choice, 30.0, self.records.append)

    async def begun(self) -> list[tuple[KeptSample, int]]:
        """Begin the samples; return the orders to move them all."""
        self.keeper.start()
        parameters = SimpleNamespace(max_tokens=self.length, seed=None)
        asked = [SampleRequest((number + 1,), parameters) for number in range(self.count)]
        self.running = [asyncio.create_task(self.keeper.generate(one, 0)) for one in asked]
        await asyncio.sleep(0.01)
        return [(sample, 1) for sample in self.keeper.samples(0)]

    def times(self, method: str) -> list[int]:
        return [at for at, (called, _) in enumerate(self.noted) if called == method]

    async def end(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        self.keeper.stop()
        for engine in self.engines:
            assert not engine.here and not engine.rooms
        assert not list(self.folder.iterdir())


@pytest.fixture(autouse=True)
def seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.moves.fakes.SEATS", 5000)


def test_all_are_prepared_then_all_stopped_then_all_started(tmp_path: Path) -> None:
    async def main() -> None:
        made = Convoys(tmp_path, slow={"1": 0.5})
        ended = await made.mover.move_together(await made.begun(), "tp_switch")
        assert [one.move.phase for one in made.records] == [Phase.RUNNING] * 3 and len(ended) == 3
        prepared, stopped, started = (made.times(name) for name in ("hold_room", "stop_sample", "start_sample"))
        assert max(prepared) < min(stopped) and max(stopped) < min(started)
        await made.end()

    virtual_time.run(main(), 60)


def test_a_stop_that_does_not_come_is_waited_for_no_longer_than_any_step(tmp_path: Path) -> None:
    async def main() -> None:
        made = Convoys(tmp_path, slow={"1": 9 * movers.STOP_SECONDS})
        clock = asyncio.get_running_loop().time
        began, orders = clock(), await made.begun()
        moving = asyncio.create_task(made.mover.move_together(orders, "tp_switch"))
        while len(made.keeper.samples(1)) < 2:
            await asyncio.sleep(0.01)
        assert clock() - began < 2 * movers.STOP_SECONDS
        # It follows when it can.
        assert all(isinstance(one, MoveRecord) and one.move.phase is Phase.RUNNING for one in await moving)
        await made.end()

    virtual_time.run(main(), 60)


@pytest.mark.parametrize("problem", ["", "no memory"])
def test_devices_are_handed_over_once_between_the_stops_and_the_starts(tmp_path: Path, problem: str) -> None:
    async def main() -> None:
        made = Convoys(tmp_path)

        async def hand_over() -> str:
            made.noted.append(("hand_over", ""))
            await asyncio.sleep(0.02)
            return problem

        await made.mover.move_together(await made.begun(), "tp_switch", hand_over)
        (handed,) = made.times("hand_over")
        assert max(made.times("stop_sample")) < handed
        assert bool(made.times("start_sample")) == (not problem)
        assert all(handed < started for started in made.times("start_sample"))
        phase = Phase.CANCELLED if problem else Phase.RUNNING
        assert [one.move.phase for one in made.records] == [phase] * 3
        assert len(made.keeper.samples(0 if problem else 1)) == 3
        await made.end()

    virtual_time.run(main(), 60)


@pytest.mark.parametrize("method", ["hold_room", "export_kv", "expect_sample", "stop_sample", "start_sample"])
def test_a_plan_that_is_cancelled_leaves_its_samples_generating_and_nothing_else(tmp_path: Path, method: str) -> None:
    async def main() -> None:
        made = Convoys(tmp_path, length=2000)
        reached = asyncio.Event()
        orders = await made.begun()
        moving = asyncio.create_task(made.mover.move_together(orders, "tp_switch"))
        own = FakeEngine.call

        async def call(engine: Any, called: Any, *arguments: Any) -> Any:
            answer = await own(engine, called, *arguments)
            if called.__name__ == method:
                # It is followed, and the answer does not arrive any more.
                reached.set()
                await asyncio.sleep(0.1)
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeEngine, "call", call)
            await reached.wait()
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            outputs = await asyncio.gather(*made.running)
        assert [output for output, _ in outputs] == [expected(sample.request) for sample, _ in orders]
        await made.end()

    virtual_time.run(main(), 60)


def test_a_convoy_costs_in_proportion_to_its_members(tmp_path: Path) -> None:
    """Counted in steps of the event loop, which no busy machine changes."""

    def steps(members: int) -> int:
        counted = 0

        async def main() -> None:
            nonlocal counted
            made = Convoys(tmp_path, members)
            orders = await made.begun()
            loop: Any = asyncio.get_running_loop()
            own = loop.call_soon

            def counting(*arguments: Any, **named: Any) -> Any:
                nonlocal counted
                counted += 1
                return own(*arguments, **named)

            loop.call_soon = counting
            await made.mover.move_together(orders, "tp_switch")
            loop.call_soon = own
            assert len(made.keeper.samples(1)) == members
            await made.end()

        virtual_time.run(main(), 60)
        return counted

    few, many = steps(32), steps(256)
    assert many < 1.5 * 8 * few


@pytest.mark.parametrize("fails", [False, True])
def test_a_destination_begins_with_all_of_a_convoy(
    pair: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """One stop comes late: until then, or until it is waited for no more, nothing runs at the destination.

    Not even an empty step: the engine says no time of one. The samples are held at the source: on a busy machine they
    had ended before all of them were known to have 40 tokens. What comes late comes when the test has seen what it
    looks for, not after a time.
    """
    monkeypatch.setattr(movers, "STOP_SECONDS", 0.2 if fails else float(TIMEOUT_S))
    asked = [request([*range(10 + number, 60), number + 7], max_tokens=250) for number in range(3)]
    pair.carrier = KV_TRANSFER
    expected = [answer(pair.run(lambda keeper, mover, one=one: keeper.generate(one, 0), tmp_path))[0] for one in asked]
    stops = 0
    meanwhile: list[dict[str, int]] = []
    busy: set[float] = set()

    async def delay(method: str) -> None:
        nonlocal stops
        if method == "stop_sample":
            stops += 1
            if stops == 3:
                # Where it is waited for no more, until the others run.
                while len(meanwhile) < 4 or (fails and not (any(meanwhile) and len(busy) > 1)):
                    await asyncio.sleep(0.15)
                    meanwhile.append(await asyncio.to_thread(pair.engines[1].scheduler, "output_lengths"))
                    busy.add((await asyncio.to_thread(pair.engines[1].scheduler, "read_counters"))["busy_seconds"])

    async def test(keeper: Any, mover: Any) -> Any:
        pair.engines[0].hold_at(40)
        running = [asyncio.create_task(keeper.generate(one, 0)) for one in asked]
        for number in range(len(asked)):
            await grown_to(keeper, 40, number)
        samples = keeper.samples(0)
        pair.engines[0].before = delay
        for record in await mover.move_together([(sample, 1) for sample in samples], "tp_switch"):
            assert record.move.phase is Phase.RUNNING, record.move.reason
        return await asyncio.gather(*running)

    try:
        outputs = pair.run(test, tmp_path)
    finally:
        pair.engines[0].before = None
    assert [answer(output)[0] for output in outputs] == expected
    assert any(meanwhile) == fails and (len(meanwhile) == 4 or (fails and len(meanwhile) > 4))
    assert (len(busy) > 1) == fails
