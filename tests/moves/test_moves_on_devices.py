"""KV transfer through memory that the source's worker shares (on a CPU torch's shared memory): real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Phase
from tests.moves.engines import Engines, answer, grown_to, moved_at, request

PROMPT = list(range(10, 60)) * 2


@pytest.fixture
def sharing(pair: Engines) -> Iterator[Engines]:
    pair.carrier, pair.on_device = KV_TRANSFER, True
    yield pair
    pair.on_device = False
    pair.engines[1].before = None


def test_a_sample_goes_there_and_back(sharing: Engines, tmp_path: Path) -> None:
    asked = request(PROMPT, max_tokens=500)
    expected = answer(sharing.run(lambda keeper, mover: keeper.generate(asked, 0), tmp_path))

    records, output = moved_at(sharing, tmp_path, asked, (40, 1), (150, 0))
    assert [record.move.phase for record in records] == [Phase.RUNNING] * 2, [r.move.reason for r in records]
    assert answer(output)[0] == expected[0] and not list(tmp_path.iterdir())


def test_pieces_that_are_not_there_are_computed_again(sharing: Engines, tmp_path: Path) -> None:
    asked = request([*PROMPT, 97], max_tokens=500)
    expected = answer(sharing.run(lambda keeper, mover: keeper.generate(asked, 0), tmp_path))
    removed = []

    async def remove(method: str) -> None:
        if method == "import_kv":
            for piece in tmp_path.glob("*.0.*"):
                removed.append(piece)
                piece.unlink()

    async def test(keeper: SampleKeeper, mover: Mover) -> Any:
        sharing.engines[0].hold_at(120)
        running = asyncio.create_task(keeper.generate(asked, 0))
        record = await mover.move(await grown_to(keeper, 120), 1, "reallocation")
        return record, await running

    sharing.engines[1].before = remove
    record, output = sharing.run(test, tmp_path)
    assert len(removed) == 1 and record.move.phase is Phase.RECOMPUTED and "heads" in record.move.reason
    assert answer(output)[0] == expected[0] and not list(tmp_path.iterdir())
