"""An engine core that is killed in the middle of a move, at each state of it, loses no sample and leaves nothing.

Real engines, killed by SIGKILL. The moved sample is greedy in fp32 with drafts; a seeded one runs beside it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Phase
from tests.moves.engines import Engines, LocalEngine, answer, grown_to, request
from tests.moves.steered_engines import DyingEngine

PROMPT = list(range(10, 60)) * 2
SLOW = pytest.mark.slow
# What becomes of the move. A destination takes the sample with it only once it is known to run there.
OF_DESTINATIONS = [
    pytest.param("room is held", Phase.CANCELLED, marks=SLOW),
    pytest.param("blocks are staged", Phase.CANCELLED, marks=SLOW),
    pytest.param("sample is expected", Phase.CANCELLED, marks=SLOW),
    ("sample is handed over to it", Phase.CANCELLED),
    ("sample has gone on", Phase.CANCELLED),
    pytest.param("sample has a token", Phase.RUNNING, marks=SLOW),
]
# Once room is held, the destination goes on from what was heard of the sample.
OF_SOURCES = [
    pytest.param("blocks are copied out", Phase.RECOMPUTED, marks=SLOW),
    pytest.param("sample is to stop", Phase.RECOMPUTED, marks=SLOW),
    ("sample is handed over", Phase.RECOMPUTED),
]


@pytest.fixture(autouse=True)
def dying_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Can be imported by the engine's process, which is started with this one's path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def play(pair: Engines, folder: Path, moment: str, dies: str, phase: Phase) -> None:
    """Move a sample between an engine of the pair and one that dies; every answer is that of a run without moves."""
    asked = [request(PROMPT, "own text drafts", max_tokens=500), request(PROMPT, temperature=1.0, seed=3)]

    async def unmoved(keeper: SampleKeeper, mover: Mover) -> list[Any]:
        return await asyncio.gather(*(keeper.generate(one, 0) for one in asked))

    if "dying" not in pair.unmoved:
        pair.unmoved["dying"] = [answer(output)[0] for output in pair.run(unmoved, folder)]
    victim = LocalEngine(1, kind=DyingEngine)
    both = Engines([pair.engines[0], victim])
    both.carrier = KV_TRANSFER
    source, destination = (1, 0) if dies == "source" else (0, 1)
    ended: list[int] = []

    async def generate(keeper: SampleKeeper, number: int, engine: int) -> Any:
        output = await keeper.generate(asked[number], engine)
        ended.append(number)
        return output

    async def moved(keeper: SampleKeeper, mover: Mover) -> tuple[Any, list[Any]]:
        # Held where they are, so that neither ends before the move on a busy machine.
        both.engines[source].hold_at(60)
        running = [asyncio.create_task(generate(keeper, number, source)) for number in range(len(asked))]
        # Drafts make the first one the faster of the two.
        sample, _ = await grown_to(keeper, 60, 0), await grown_to(keeper, 5, 1)
        victim.scheduler("die_at", moment)
        record = await mover.move(sample, destination, "reallocation")
        pair.engines[0].hold_at(0)
        outputs = await asyncio.gather(*running)
        assert not keeper.engines[1].alive and keeper.engines[0].alive
        # Nothing is left that could be answered again.
        assert not keeper._samples
        return record, outputs

    try:
        assert victim.raw
        record, outputs = both.run(moved, folder)
    finally:
        victim.stop()
    assert record.move.phase is phase, (record.move.phase, record.move.reason)
    assert [answer(output)[0] for output in outputs] == pair.unmoved["dying"]
    assert sorted(ended) == [0, 1] and not list(folder.iterdir())


@pytest.mark.parametrize(("moment", "phase"), OF_SOURCES)
def test_a_source_that_is_killed(pair: Engines, tmp_path: Path, moment: str, phase: Phase) -> None:
    play(pair, tmp_path, moment, "source", phase)


@pytest.mark.parametrize(("moment", "phase"), OF_DESTINATIONS)
def test_a_destination_that_is_killed(pair: Engines, tmp_path: Path, moment: str, phase: Phase) -> None:
    play(pair, tmp_path, moment, "destination", phase)
