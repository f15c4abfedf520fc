"""An engine whose samples can move tells its weights when a sample starts, and when they change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.engine.actor_parts.moves import LOOK_SECONDS, Moves
from rhyme_openrlhf.engine.messages import Progress, SampleRequest, Started
from rhyme_openrlhf.engine_errors import EngineCoreError
from tests import virtual_time


class Engine(NS):
    """The part of an engine that tells of weights."""

    weight_version = 0

    def __init__(self) -> None:
        super().__init__(index=0, opened=asyncio.Event(), is_dead=False)

    @property
    def is_open(self) -> bool:
        return self.opened.is_set()

    async def until_open(self) -> None:
        await self.opened.wait()

    async def alive(self) -> None:
        if self.is_dead:
            raise EngineCoreError("vLLM's process is gone")

    def loads(self, version: int, part: Moves) -> None:
        self.weight_version = version
        self.opened.set()
        part.opened()


def test_a_keeper_hears_of_new_weights_at_once() -> None:
    async def main() -> None:
        engine: Any = Engine()
        part, now = Moves(engine), asyncio.get_running_loop().time
        first = await part.collect(60)
        assert first.open is False
        began = now()
        waiting = asyncio.create_task(part.collect(60, first.number))
        await asyncio.sleep(1)
        engine.loads(1, part)
        news = await waiting
        assert (news.weight_version, news.open) == (1, True) and now() - began == pytest.approx(1, abs=0.1)
        # While the keeper takes in the last news, too.
        engine.loads(2, part)
        second = await part.collect(60, news.number)
        assert second.weight_version == 2 and now() - began == pytest.approx(1, abs=0.1)
        last = await part.collect(60, second.number)
        assert last.weight_version == 2 and now() - began == pytest.approx(61, abs=0.1)
        # What was not heard is told again.
        assert await part.collect(60, second.number) == last and now() - began == pytest.approx(61, abs=0.1)

    virtual_time.run(main(), 200)


def that_starts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Moves:
    """The part of an engine at which every sample starts."""

    async def start(*_: Any) -> Started:
        return Started()

    part = Moves(engine)
    monkeypatch.setattr(part, "_start", start)
    return part


def test_a_sample_starts_with_the_weights_that_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine: Any = Engine()
        part = that_starts(engine, monkeypatch)
        request = SampleRequest((1,), NS(max_tokens=4, seed=None))
        waiting = asyncio.create_task(part.start_sample("1.0", request))
        # One that comes from elsewhere has its weights already.
        assert (await part.start_sample("2.1", request, Progress((3,)))).weight_version == 0
        await asyncio.sleep(1)
        assert not waiting.done()
        engine.loads(1, part)
        assert (await waiting).weight_version == 1

    virtual_time.run(main(), 60)


def test_a_sample_waits_for_no_weights_of_an_engine_whose_vllm_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine: Any = Engine()
        part = that_starts(engine, monkeypatch)
        waiting = asyncio.create_task(part.start_sample("1.0", SampleRequest((1,), NS(max_tokens=4, seed=None))))
        await asyncio.sleep(3)
        assert not waiting.done()
        engine.is_dead = True
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert isinstance(waiting.exception(), EngineCoreError)

    virtual_time.run(main(), 60)
