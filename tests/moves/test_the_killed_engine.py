"""The end of one of the pair: so this file's name is the last of its folder, and nothing may use the pair behind it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from tests.moves.engines import Engines, answer, grown_to, request

PROMPT = list(range(10, 60)) * 2


def test_a_killed_engine_core_costs_no_sample(pair: Engines, tmp_path: Path) -> None:
    """Samples go on from what was heard of them, or (with a seed) from their beginning, and come out the same."""
    plain, seeded = request(PROMPT, max_tokens=250), request(PROMPT, temperature=1.0, seed=3, max_tokens=250)
    expected = []
    for asked in (plain, seeded):
        unmoved = pair.run(lambda keeper, mover, asked=asked: keeper.generate(asked, 0), tmp_path)
        expected.append(answer(unmoved)[0])
    dying = pair.engines[1]

    async def test(keeper: SampleKeeper, mover: Mover) -> list[Any]:
        # Neither ends before the kill, however late that comes.
        dying.hold_at(30)
        running = [asyncio.create_task(keeper.generate(asked, 1)) for asked in (plain, seeded)]
        await grown_to(keeper, 30, 0)
        await grown_to(keeper, 30, 1)
        for process in dying.raw.llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        return await asyncio.gather(*running)

    outputs = pair.run(test, tmp_path)
    assert [answer(output)[0] for output in outputs] == expected
    pair.engines.remove(dying)
