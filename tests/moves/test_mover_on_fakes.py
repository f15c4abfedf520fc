"""The real keeper and mover on faithful fakes of engines that die, fail and answer late, at random and in volume."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import Grown, Progress, SampleRequest
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover
from rhyme_openrlhf.scheduling.move import ENDED, KV_TRANSFER, RECOMPUTE, MoveRefused, Phase
from tests import virtual_time
from tests.moves.fakes import LATE_S, TIDYING, FakeEngine, expected

SCENARIOS = 30


async def scenario(chance: random.Random, folder: Path, ended: Counter[Phase]) -> None:
    """Samples on four engines, one of which never dies, moved at random until all are answered."""
    faulty = chance.random() < 0.8

    def fault(method: str) -> str:
        if not faulty or method in TIDYING or chance.random() < 0.75:
            return ""
        return chance.choice(["never", "late", "fails", "dies", "dies"])

    def lives(method: str) -> str:
        return fault(method).replace("dies", "")

    engines = [FakeEngine(fault if number else lives) for number in range(4)]
    keeper = SampleKeeper(dict(enumerate(engines)), 0.001)
    mover = Mover(
        keeper,
        KvBufferStore(folder),
        lambda *_: Choice(chance.choice([KV_TRANSFER, RECOMPUTE])),
        LATE_S,
        lambda record: ended.update([record.move.phase]),
    )
    keeper.start()
    asked = [
        SampleRequest((number,), SimpleNamespace(max_tokens=chance.randrange(5, 60), seed=chance.choice([None, 1])))
        for number in range(1, 7)
    ]
    running = [asyncio.create_task(keeper.generate(one, chance.randrange(4))) for one in asked]
    aborted: set[int] = set()
    moves: list[asyncio.Task[Any]] = []
    while not all(task.done() for task in running):
        samples = list(keeper._samples.values())
        for number in range(4):
            there = {one.name for one in keeper.samples(number)}
            assert there == {one.name for one in samples if one.engine == number}
        if samples:
            assert all(one.known.tokens == expected(one.request)[: len(one.known.tokens)] for one in samples)
            sample = chance.choice(samples)
            moves.append(asyncio.create_task(mover.move(sample, chance.randrange(4), "reallocation")))
        if chance.random() < 0.01:
            number = chance.randrange(len(running))
            if running[number].cancel():
                aborted.add(number)
        await asyncio.sleep(0.002)
    for move in await asyncio.gather(*moves, return_exceptions=True):
        assert not isinstance(move, BaseException) or isinstance(move, MoveRefused), move
    outputs = await asyncio.gather(*running, return_exceptions=True)
    for number, (output, one) in enumerate(zip(outputs, asked, strict=True)):
        assert number in aborted or output[0] == expected(one), output
    assert not list(folder.iterdir())
    assert not any(keeper.samples(number) for number in range(4))
    for engine in engines:
        assert not engine.alive or (not engine.here and not engine.rooms)
    keeper.stop()


def test_every_sample_is_answered_once_and_rightly(tmp_path: Path) -> None:
    ended: Counter[Phase] = Counter()
    for seed in range(SCENARIOS):
        virtual_time.run(scenario(random.Random(seed), tmp_path, ended), 60)
    # Every way a move can end was taken, and most moves of a good day succeed.
    assert set(ended) == ENDED and ended[Phase.RUNNING] >= SCENARIOS, ended


@pytest.mark.parametrize("method", ["export_kv", "stop_sample", "expect_sample", "start_sample"])
def test_an_order_whose_engine_dies_with_it_is_not_waited_for(tmp_path: Path, method: str) -> None:
    """vLLM never answers it. The limit is far off: what ends the wait is that its keeper hears of the engine's end."""

    async def main() -> None:
        hanging = asyncio.Event()

        class Silent(FakeEngine):
            async def call(self, called: Any, *arguments: Any) -> Any:
                if called.__name__ == method:
                    hanging.set()
                    await asyncio.sleep(3600)
                return await super().call(called, *arguments)

        lives, dies = FakeEngine(lambda _: ""), Silent(lambda _: "")
        at_source = method in ("export_kv", "stop_sample")
        engines = [dies, lives] if at_source else [lives, dies]
        keeper = SampleKeeper(dict(enumerate(engines)), 0.001)
        mover = Mover(keeper, KvBufferStore(tmp_path), lambda *_: Choice(KV_TRANSFER), 3600.0)
        keeper.start()
        asked = SampleRequest((1,), SimpleNamespace(max_tokens=400, seed=None))
        running = asyncio.create_task(keeper.generate(asked, 0))
        await asyncio.sleep(0.02)
        move = asyncio.create_task(mover.move(keeper.sample("0"), 1, "reallocation"))
        await hanging.wait()
        dies.alive = False
        record = await move
        assert record.move.phase is (Phase.RECOMPUTED if at_source else Phase.CANCELLED)
        assert (await running)[0] == expected(asked) and not list(tmp_path.iterdir())
        keeper.stop()

    virtual_time.run(main(), 30)


@pytest.mark.parametrize("carrier", [KV_TRANSFER, RECOMPUTE])
def test_what_is_told_before_a_move_is_known_to_be_over_is_not_lost(tmp_path: Path, carrier: str) -> None:
    """News is told once: a gap would never close, and all that came after it would stay unknown."""

    async def main() -> None:
        class SlowToSay(FakeEngine):
            async def call(self, called: Any, *arguments: Any) -> Any:
                answer = await super().call(called, *arguments)
                if called.__name__ == "start_sample":
                    await asyncio.sleep(0.02)
                return answer

        keeper = SampleKeeper(dict(enumerate([FakeEngine(lambda _: ""), SlowToSay(lambda _: "")])), 0.001)
        mover = Mover(keeper, KvBufferStore(tmp_path), lambda *_: Choice(carrier), 10.0)
        keeper.start()
        asked = SampleRequest((1,), SimpleNamespace(max_tokens=400, seed=None))
        running = asyncio.create_task(keeper.generate(asked, 0))
        await asyncio.sleep(0.02)
        sample = keeper.sample("0")
        record = await mover.move(sample, 1, "reallocation")
        assert record.move.phase is Phase.RUNNING
        known = record.tokens
        while len(sample.known.tokens) < known + 50:
            assert not running.done(), f"{len(sample.known.tokens)} tokens are known of a sample that has ended"
            await asyncio.sleep(0.001)
        assert sample.known.tokens == expected(asked)[: len(sample.known.tokens)]
        assert (await running)[0] == expected(asked)
        keeper.stop()

    virtual_time.run(main(), 30)


def test_samples_are_told_when_no_engine_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        engine = FakeEngine(lambda method: "")
        keeper = SampleKeeper({0: engine}, 0.001)
        keeper.start()
        running = asyncio.create_task(
            keeper.generate(SampleRequest((1,), SimpleNamespace(max_tokens=50, seed=None)), 0)
        )
        await asyncio.sleep(0.01)
        engine.alive = False
        with pytest.raises(EngineLost, match="no engine is left"):
            await asyncio.wait_for(running, 5)
        keeper.stop()

    asyncio.run(main())


def test_news_that_overlap_or_leave_a_gap_add_no_wrong_token() -> None:
    loop = asyncio.new_event_loop()

    def grown(*news: Grown) -> KeptSample:
        sample = KeptSample("0", SampleRequest((1,), None), loop.create_future())
        sample.known = Progress((1, 2, 3), [{1: 0}, {2: 0}, {3: 0}])
        for one in news:
            sample.grow(one)
        return sample

    four = Progress((1, 2, 3, 4), [{1: 0}, {2: 0}, {3: 0}, {4: 0}])
    assert grown(Grown(3, (4,), [{4: 0}])).known == four
    assert grown(Grown(1, (2, 3, 4), [{2: 0}, {3: 0}, {4: 0}])).known == four
    for old in (Grown(4, (5,), [{5: 0}]), Grown(0, (1, 2), [{1: 0}, {2: 0}]), Grown(3, (), [])):
        assert grown(old).known == grown().known and grown(old).known_tokens == 3
    # News after news, also of tokens that are known already.
    sample = grown(Grown(3, (4,), [{4: 0}]), Grown(3, (4, 5), [{4: 0}, {5: 0}]), Grown(6, (7,), [{7: 0}]))
    assert sample.known_tokens == 5
    assert sample.known == Progress((1, 2, 3, 4, 5), [{1: 0}, {2: 0}, {3: 0}, {4: 0}, {5: 0}])
    sample.grow(Grown(5, (6,), [{6: 0}]))
    assert sample.known_tokens == 6 == len(sample.known.tokens)
    loop.close()
