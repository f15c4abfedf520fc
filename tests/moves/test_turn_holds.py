"""A node's engines wait for their tail layout, all or none, and are released after every outcome."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as NS
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.engine_losses import EngineLosses
from rhyme_openrlhf.moves.keeper import KeptSample, KnownEngine
from rhyme_openrlhf.moves.tp_switcher import TurnHolds
from tests import virtual_time

TURN = 6


class Port:
    """An engine that does as it is told, says no, fails or is gone."""

    def __init__(self, holds: Any = True) -> None:
        self.holds = holds
        self.told: list[tuple[Any, ...]] = []

    async def call(self, called: Any, *arguments: Any) -> Any:
        method = called.__name__
        self.told.append((method, *arguments))
        if isinstance(self.holds, Exception):
            raise self.holds
        return self.holds


def holds(ports: list[Port], versions: dict[int, int]) -> tuple[TurnHolds, list[str]]:
    said: list[str] = []
    losses = EngineLosses()
    keeper: Any = NS(engines={n: KnownEngine(n, port, losses) for n, port in enumerate(ports)})  # type: ignore[arg-type]
    statuses = {number: NS(weight_version=version) for number, version in versions.items()}
    return TurnHolds(keeper, NS(statuses=statuses, tell=said.append)), said  # type: ignore[arg-type]


def sample(engine: int, turn: int = TURN) -> KeptSample:
    request = SampleRequest((1,), NS(max_tokens=9), group=(turn, 0))
    return KeptSample("1", request, asyncio.get_running_loop().create_future(), engine=engine)


def in_loop(test: Any) -> None:
    virtual_time.run(test(), 10)


def test_samples_of_one_turn_and_one_version_may_go_once_the_tail_has_it() -> None:
    async def main() -> None:
        ports = [Port() for _ in range(3)]
        here = [sample(0), sample(1)]
        assert holds(ports, {0: 2, 1: 2, 2: 2})[0].may_go(here, [2])
        assert not holds(ports, {0: 2, 1: 3, 2: 2})[0].may_go(here, [2])
        assert not holds(ports, {0: 2, 1: 2, 2: 2})[0].may_go([sample(0), sample(1, TURN + 2)], [2])
        assert ports[2].told == []
        behind, _ = holds(ports, {0: 2, 1: 2, 2: 1})
        # Asked again while it loads, it is not told again.
        assert not behind.may_go(here, [2]) and not behind.may_go(here, [2])
        await asyncio.sleep(0.01)
        assert ports[2].told == [("take_weights", 2)]

    in_loop(main)


def test_engines_are_held_until_the_samples_have_ended() -> None:
    async def main() -> None:
        ports = [Port(), Port(EngineLost("it is gone"))]
        asked, said = holds(ports, {})
        there = [sample(0), sample(0)]
        # One that is gone begins no turn. A node that is held is not asked again.
        assert await asked.hold("node", there, [0, 1]) and await asked.hold("node", there[:1], [0, 1])
        assert not await asked.hold("node", [sample(0, TURN + 2)], [0, 1])
        there[0].answer.set_result(None)
        await asyncio.sleep(0.01)
        assert ports[0].told == [("hold_turns", TURN)]
        there[1].answer.set_exception(EngineLost("the tail engine is gone"))
        await asyncio.sleep(0.01)
        assert ports[0].told[1:] == [("release_turns",)] and said == []
        assert await asked.hold("node", [sample(0, TURN + 2)], [0])
        assert ports[0].told[2:] == [("hold_turns", TURN + 2)]

    in_loop(main)


@pytest.mark.parametrize("answer", [False, OrderFailed("it raised")])
def test_one_that_went_on_keeps_all_of_them_going(answer: Any) -> None:
    async def main() -> None:
        ports = [Port(), Port(answer), Port()]
        asked, said = holds(ports, {})
        assert not await asked.hold("node", [sample(0)], [0, 1, 2])
        assert [one[0] for one in ports[0].told] == ["hold_turns", "release_turns"]
        # What was not asked any more is let go all the same.
        assert [one[0] for one in ports[2].told] == ["release_turns"]
        assert len(said) == isinstance(answer, Exception)

    in_loop(main)


@pytest.mark.parametrize("end", ["let_go", "stop"])
def test_engines_are_let_go_when_nothing_moved_or_all_ends(end: str) -> None:
    async def main() -> None:
        ports = [Port()]
        asked, _ = holds(ports, {})
        assert await asked.hold("node", [sample(0)], [0])
        asked.let_go("node") if end == "let_go" else asked.stop()
        await asyncio.sleep(0.01)
        assert [one[0] for one in ports[0].told] == ["hold_turns", "release_turns"]

    in_loop(main)
