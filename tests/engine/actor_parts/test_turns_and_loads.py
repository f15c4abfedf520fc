"""Turns, weights and news of one engine, without vLLM: what comes in between, and what is told twice."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine.actor_parts.moves import Moves
from rhyme_openrlhf.engine.actor_parts.part import OrdersLock
from rhyme_openrlhf.engine.actor_parts.turns import Turns
from rhyme_openrlhf.engine_errors import EngineCoreError
from rhyme_openrlhf.scheduling.turns import training_turn
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from tests import virtual_time

FIRST, SECOND, THIRD = (training_turn(step, 0) for step in (1, 2, 3))
SCORED = [5, 6, 7]


class StandIn:
    """An engine that loads weights at once; `scoring` is awaited while it scores."""

    def __init__(self) -> None:
        self.rhyme, self.orders, self.index, self.weight_version = RhymeSettings(), OrdersLock(), 0, 0
        self.running: set[str] = set()
        self.loaded: list[tuple[int, int]] = []
        self.turns = Turns(self)  # type: ignore[arg-type]
        self.timeline = NS(because=lambda *_: None, enter=lambda *_: None, state="")
        self.histories = NS(feed=NS(take_problems=list))
        self.scoring: Any = None
        self.failure: Exception | None = None
        self.is_open, self.core_died, self.traced = True, "its core is dead", frozenset()

    async def totals(self) -> EngineCounters:
        if self.failure is not None:
            raise self.failure
        return EngineCounters()

    async def planning(self) -> Any:
        return {}, {}, []

    async def alive(self) -> None:
        pass

    async def score(self, tokens: list[int]) -> list[float]:
        if self.scoring is not None:
            scoring, self.scoring = self.scoring, None
            await scoring()
        return [0.0] * (len(tokens) - 1)

    async def load_weights(self, segment: Any) -> float:
        self.loaded.append((segment.version, len(self.turns._stays)))
        self.weight_version = segment.version
        return 0.1


def test_a_sample_that_comes_while_weights_are_scored_ends_before_they_are_loaded() -> None:
    """Else it would span two versions, as only deferred samples may."""

    async def main() -> None:
        engine = StandIn()
        turns = engine.turns

        async def comes() -> None:
            turns.comes("9.1", (FIRST.number, 4), begins=False)

        await turns.extend_turn(FIRST, [(0, 0)], 1, [])
        await asyncio.sleep(0.1)
        turns.comes("1.0", (FIRST.number, 0), begins=False)
        await turns.extend_turn(SECOND, [(0, 0)], 1, [])
        engine.scoring = comes
        offered = asyncio.create_task(turns.offer_weights(NS(version=1), SCORED))  # type: ignore[arg-type]
        turns.goes("1.0")
        turns._turns.ended(FIRST.number)
        turns._advance()
        await asyncio.sleep(1)
        assert engine.loaded == [] and not offered.done()
        turns.goes("9.1")
        loaded = await offered
        # It is asked for before and after, all the same.
        assert engine.loaded == [(1, 0)] and loaded is not None and loaded.before and loaded.after

    virtual_time.run(main(), 10)


def test_a_sample_that_comes_to_a_tail_engine_while_weights_are_scored_stays_below_its_own() -> None:
    async def main() -> None:
        engine = StandIn()
        turns = engine.turns
        turns.is_tail()

        async def comes() -> None:
            turns.comes("9.1", (FIRST.number, 4), begins=False)

        offered = asyncio.create_task(turns.offer_weights(NS(version=1), SCORED))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        engine.scoring = comes
        await turns.take_weights(1)
        assert engine.loaded == []
        turns.goes("9.1")
        await turns.take_weights(1)
        assert engine.loaded == [(1, 0)] and (await offered) is not None

    virtual_time.run(main(), 10)


def test_a_tail_engine_that_never_loads_keeps_no_more_than_two_offers() -> None:
    async def main() -> None:
        engine = StandIn()
        engine.turns.is_tail()
        offers = [asyncio.create_task(engine.turns.offer_weights(NS(version=n), [])) for n in range(1, 6)]  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert [offer.done() for offer in offers] == [True] * 3 + [False] * 2 and offers[0].result() is None
        assert len(engine.turns._segments) == len(engine.turns._loads) == 2
        for offer in offers:
            offer.cancel()

    virtual_time.run(main(), 10)


def test_a_core_that_dies_between_two_turns_is_told_as_a_dead_core() -> None:
    """vLLM's own error is one that nobody takes for the loss of an engine."""

    async def main() -> None:
        engine = StandIn()
        await engine.turns.extend_turn(FIRST, [(0, 0)], 1, [])
        await asyncio.sleep(0.1)
        engine.failure = EngineDeadError()
        engine.turns._turns.ended(FIRST.number)
        engine.turns._advance()
        with pytest.raises(EngineCoreError, match="its core is dead"):
            await engine.turns.turn_report(FIRST.number)

    virtual_time.run(main(), 10)


def test_a_turn_that_is_entered_twice_over_a_broken_connection_is_entered_once() -> None:
    async def main() -> None:
        engine = StandIn()
        turns = engine.turns
        await turns.extend_turn(FIRST, [(0, 0)], 2, [])
        for _ in range(2):
            await turns.enter_turn(FIRST.number, 0, 2)
        assert len(turns._calls) == 1
        for place in ("1.0", "2.0"):
            turns.comes(place, (FIRST.number, 0), begins=True)
        # Its prompt group is generated once more, while samples of the first attempt are still here.
        await turns.extend_turn(FIRST, [(0, 1)], 2, [])
        await turns.enter_turn(FIRST.number, 0, 2)
        assert len(turns._calls) == 2 and not turns._turns.over

    virtual_time.run(main(), 10)


def test_news_that_did_not_arrive_is_told_again() -> None:
    async def main() -> None:
        moves = Moves(StandIn())  # type: ignore[arg-type]
        moves.finished = {"1.0": "output"}
        first = await moves.collect(0.1)
        assert first.finished == {"1.0": "output"} and first.number == pickle.loads(pickle.dumps(first)).number == 1
        moves.finished = {"2.0": "other"}
        assert await moves.collect(0.1) is first
        assert (await moves.collect(0.1, 1)).finished == {"2.0": "other"}

    virtual_time.run(main(), 10)
