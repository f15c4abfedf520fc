"""Moves between engines of other tensor-parallel sizes: KV blocks are resharded over heads on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.rollout.moves.keeper import SampleKeeper
from rhyme_openrlhf.rollout.moves.mover import Mover
from rhyme_openrlhf.scheduling.move import Phase
from tests.rollout.moves.engines import Engines, LocalEngine, grown_to, request, variables

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def unlike() -> Iterator[Engines]:
    """One engine of one rank and one of two, started one after the other: their threads are bound by a variable."""
    engines = []
    with variables():
        for ranks in (1, 2):
            engines.append(LocalEngine(len(engines), ranks))
            assert engines[-1].raw
    yield Engines(engines)
    for engine in engines:
        engine.stop()


def test_a_sample_goes_from_one_rank_to_two_and_back(unlike: Engines, tmp_path: Path) -> None:
    asked = request(list(range(10, 60)) * 2, max_tokens=300)

    async def unmoved(keeper: SampleKeeper, mover: Mover) -> Any:
        return await keeper.generate(asked, 0)

    async def moved(keeper: SampleKeeper, mover: Mover) -> Any:
        running = asyncio.create_task(keeper.generate(asked, 0))
        for tokens, to in ((60, 1), (160, 0)):
            record = await mover.move(await grown_to(keeper, tokens), to, "tp_switch")
            assert record.move.phase is Phase.RUNNING, record.move.reason
        return await running

    expected, _ = unlike.run(unmoved, tmp_path)
    output, last = unlike.run(moved, tmp_path)
    assert last == 0
    assert list(output.outputs[0].token_ids) == list(expected.outputs[0].token_ids)
    for engine in unlike.engines:
        assert engine.scheduler("rooms") == [] and engine.scheduler("read_counters")["kv_cache"] == 0
