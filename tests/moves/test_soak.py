"""Hundreds of random moves on real engines, with drafts, preemptions and aborts: nothing is lost, changed or left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE, Phase
from tests.moves.engines import Engines, answer, request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]

ROUNDS = 4
SAMPLES = 28
MOVES = 300
# Of the pair's KV cache, in tokens: 16 MB at 2 KB each. So not all samples fit at once, and some are preempted.
CACHE_TOKENS = 8192


def test_hundreds_of_moves_change_nothing(pair: Engines, tmp_path: Path) -> None:
    pair.records.clear()
    finished = aborted = 0
    for seed in range(ROUNDS):
        chance = random.Random(100 + seed)
        prompts = [[chance.randrange(5, 100) for _ in range(chance.randrange(20, 120))] for _ in range(SAMPLES)]
        asked = [
            request(prompt, f"prompt {i % 5}" if i % 3 else None, max_tokens=chance.randrange(300, 500))
            for i, prompt in enumerate(prompts)
        ]
        assert sum(len(one.prompt) + one.parameters.max_tokens for one in asked) > 1.2 * CACHE_TOKENS

        async def unmoved(keeper: SampleKeeper, mover: Mover, asked: Any = asked) -> list[Any]:
            return await asyncio.gather(*(keeper.generate(one, i % 2) for i, one in enumerate(asked)))

        async def moved(keeper: SampleKeeper, mover: Mover, asked: Any = asked, chance: Any = chance) -> list[Any]:
            running = [asyncio.create_task(keeper.generate(one, 0)) for one in asked]
            moves: set[asyncio.Task[Any]] = set()
            while not all(task.done() for task in running):
                there = [s for s in keeper._samples.values() if s.engine is not None and not s.moving]
                if there and len(moves) < 4:
                    sample = chance.choice(there)
                    pair.carrier = chance.choice([RECOMPUTE, KV_TRANSFER])
                    moves.add(asyncio.create_task(mover.move(sample, 1 - (sample.engine or 0), "reallocation")))
                    if chance.random() < 0.03:
                        chance.choice(running).cancel()
                await asyncio.sleep(0.01)
                moves = {move for move in moves if not move.done()}
            await asyncio.gather(*moves)
            return await asyncio.gather(*running, return_exceptions=True)

        expected = [answer(output)[0] for output in pair.run(unmoved, tmp_path)]
        for output, want in zip(pair.run(moved, tmp_path), expected, strict=True):
            if isinstance(output, asyncio.CancelledError):
                aborted += 1
            else:
                assert answer(output)[0] == want
                finished += 1
        # No reservation, seat, request or block is left, round for round.
        for engine in pair.engines:
            assert engine.scheduler("output_lengths") == {} and engine.scheduler("rooms") == []
            assert engine.scheduler("read_counters")["kv_cache"] == 0
    ends = Counter(record.move.phase for record in pair.records)
    carried = Counter(record.move.carrier for record in pair.records if record.move.phase is Phase.RUNNING)
    print(f"{len(pair.records)} moves: {dict(ends)}, {dict(carried)}; {finished} finished, {aborted} aborted")
    assert len(pair.records) >= MOVES and min(carried[KV_TRANSFER], carried[RECOMPUTE]) >= MOVES // 10, (ends, carried)
    assert finished + aborted == ROUNDS * SAMPLES and aborted and Phase.LOST not in ends
