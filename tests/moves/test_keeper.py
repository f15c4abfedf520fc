"""The keeper's calls to engines: which go together, and what an abort leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.moves.keeper import NEWS_A_SECOND, SampleKeeper
from tests import virtual_time
from tests.moves import fakes
from tests.moves.fakes import FakeEngine, expected

SAMPLES = 16


class Way(FakeEngine):
    """A fake engine to which a call takes `seconds`; `calls`: the number of samples in each that starts some."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda _: "")
        self.seconds = seconds
        self.calls: list[int] = []
        self.waits: list[float] = []

    async def call(self, called: Any, *arguments: Any) -> Any:
        if called.__name__ == "collect":
            self.waits.append(arguments[0])
        if called.__name__ == "start_samples":
            self.calls.append(len(arguments[0]))
            await asyncio.sleep(self.seconds)
        return await super().call(called, *arguments)


def request(number: int, tokens: int = 5) -> SampleRequest:
    return SampleRequest((number,), SimpleNamespace(max_tokens=tokens, seed=None))


@pytest.fixture(autouse=True)
def seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "SEATS", SAMPLES)


def test_samples_that_come_together_start_in_one_call() -> None:

    async def main() -> None:
        engine = Way(0.01)
        keeper = SampleKeeper({0: engine}, 0.001)
        keeper.start()
        async with asyncio.TaskGroup() as tasks:
            first = [tasks.create_task(keeper.generate(request(number), 0)) for number in range(SAMPLES)]
            # Meanwhile that call is under way.
            await asyncio.sleep(0.005)
            later = [tasks.create_task(keeper.generate(request(number), 0)) for number in range(3)]
        keeper.stop()
        assert engine.calls == [SAMPLES, 3]
        assert [task.result()[0] for task in first] == [expected(request(number)) for number in range(SAMPLES)]
        assert [task.result()[0] for task in later] == [expected(request(number)) for number in range(3)]

    virtual_time.run(main(), 30)


def test_a_sample_that_is_aborted_while_it_starts_is_not_kept_by_its_engine() -> None:
    """The order to end it waits: before, it could come to the engine first."""

    async def main() -> None:
        engine = Way(1.0)
        keeper = SampleKeeper({0: engine}, 0.001)
        keeper.start()
        aborted = asyncio.create_task(keeper.generate(request(1, 500), 0))
        other = asyncio.create_task(keeper.generate(request(2), 0))
        await asyncio.sleep(0.5)
        aborted.cancel()
        assert (await other)[0] == expected(request(2))
        await asyncio.wait([aborted])
        keeper.stop()
        assert engine.calls == [2] and engine.here == {} and engine.finished == {}

    virtual_time.run(main(), 30)


def test_a_start_that_fails_with_its_engine_restarts_all_that_go_together() -> None:

    async def main() -> None:
        dies, lives = Way(0.5), Way(0.01)
        keeper = SampleKeeper({0: dies, 1: lives}, 0.001)
        keeper.start()
        tasks = [asyncio.create_task(keeper.generate(request(number), 0)) for number in range(SAMPLES)]
        await asyncio.sleep(0.1)
        dies.alive = False
        assert [await task for task in tasks] == [(expected(request(number)), 1) for number in range(SAMPLES)]
        assert lives.calls == [SAMPLES]
        with pytest.raises(EngineLost):
            await keeper.engines[0].discard("0.0")
        keeper.stop()

    virtual_time.run(main(), 30)


@pytest.mark.parametrize(("engines", "seconds"), [(2, 1.0), (3 * NEWS_A_SECOND, 3.0)])
def test_a_home_of_many_engines_hears_less_often_of_each(engines: int, seconds: float) -> None:

    async def main() -> set[float]:
        ways = {number: Way(0.01) for number in range(engines)}
        keeper = SampleKeeper(ways, 1.0)
        keeper.start()
        await asyncio.sleep(0.0005)
        keeper.stop()
        return {wait for way in ways.values() for wait in way.waits}

    assert virtual_time.run(main(), 30) == {seconds}
