"""Moves that go together: what they wait for, what they do not, and that real engines begin with all in one step."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.moves import mover as movers
from rhyme_openrlhf.moves.mover import Convoy
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Move, Phase, Step
from tests.moves.engines import TIMEOUT_S, Engines, answer, grown_to, request


def at(sample: str, step: Step) -> Move:
    return dataclasses.replace(Move(sample, 0, 1, KV_TRANSFER, KV_TRANSFER), step=step)


def test_none_goes_before_all_can() -> None:
    async def main() -> None:
        convoy = Convoy("c", "abc")
        await convoy.before(at("a", Step.RESERVE))
        first = asyncio.create_task(convoy.before(at("a", Step.STOP)))
        # One that has nothing to stop, because its engine is gone, comes later in its move.
        second = asyncio.create_task(convoy.before(at("b", Step.START)))
        await asyncio.sleep(0.01)
        assert not first.done() and not second.done()
        convoy.leave("c")
        await first
        await asyncio.sleep(0.01)
        assert not second.done()
        third = asyncio.create_task(convoy.before(at("a", Step.START)))
        await asyncio.gather(second, third)
        await convoy.before(at("b", Step.WITHDRAW))

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_stopped_sample_does_not_wait_for_an_engine_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers, "STOP_SECONDS", 0.05)

    async def main() -> None:
        convoy = Convoy("c", "ab")
        running = asyncio.create_task(convoy.before(at("a", Step.STOP)))
        await asyncio.sleep(0.1)
        # What still generates can wait.
        assert not running.done()
        await convoy.before(at("b", Step.STOP))
        await running
        await convoy.before(at("a", Step.START))

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize("problem", ["", "no memory"])
def test_devices_are_handed_over_once_between_the_stops_and_the_starts(problem: str) -> None:
    async def main() -> None:
        handed: list[int] = []

        async def between() -> str:
            handed.append(1)
            await asyncio.sleep(0.02)
            return problem

        convoy = Convoy("c", "abc", between)
        assert convoy.in_turns and not Convoy("d", "ab").in_turns
        for sample in "ab":
            stops = asyncio.create_task(convoy.before(at(sample, Step.STOP)))
            await asyncio.sleep(0)
        convoy.leave("c")
        assert await stops == ""
        starts = [asyncio.create_task(convoy.before(at(sample, Step.START))) for sample in "ab"]
        await asyncio.sleep(0.01)
        assert handed == [1] and not any(start.done() for start in starts)
        # One whose caller gave it up does not end it for the others.
        starts[0].cancel()
        assert await starts[1] == problem and handed == [1]

    asyncio.run(asyncio.wait_for(main(), 10))


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
        convoy = Convoy("convoy", [sample.name for sample in samples])
        pair.engines[0].before = delay
        moves = [mover.move(sample, 1, "tp_switch", convoy=convoy) for sample in samples]
        for record in await asyncio.gather(*moves):
            assert record.move.phase is Phase.RUNNING, record.move.reason
        return await asyncio.gather(*running)

    try:
        outputs = pair.run(test, tmp_path)
    finally:
        pair.engines[0].before = None
    assert [answer(output)[0] for output in outputs] == expected
    assert any(meanwhile) == fails and (len(meanwhile) == 4 or (fails and len(meanwhile) > 4))
    assert (len(busy) > 1) == fails
