"""The real keeper and mover on faithful fakes of engines that die, fail and answer late, at random and in volume."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import Exported, Grown, News, Progress, Rest, SampleRequest, Started, Stopped
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.kv import handover
from rhyme_openrlhf.kv.buffer import KvBufferStore, KvLayout
from rhyme_openrlhf.moves.keeper import SampleKeeper, longer
from rhyme_openrlhf.moves.mover import Choice, Mover
from rhyme_openrlhf.scheduling.move import ENDED, KV_TRANSFER, RECOMPUTE, MoveRefused, Phase
from tests import virtual_time

LAYOUT = KvLayout(1, 1, 4, 2, "float32")
SEATS = 3
LATE_S = 0.02
SCENARIOS = 30
# A fault of these is tidied by nobody: that engine is as good as lost.
TIDYING = ("collect", "kv_layout", "release_room", "discard_sample", "first_token_at")


def expected(request: SampleRequest) -> tuple[int, ...]:
    """Return a sample's response, which is the same on every engine."""
    return tuple((request.prompt[0] * 7 + number * number) % 101 for number in range(request.parameters.max_tokens))


@dataclass
class _Running:
    request: SampleRequest
    tokens: list[int]
    told: int
    stopped: bool = False
    # Until it is handed over in this buffer; and then until its keeper says with what.
    expected: Any = None
    held: bool = False


@dataclass
class FakeEngine:
    """The part of an engine that keeper and mover use; `fault(method)` decides how a call ends."""

    fault: Any
    alive: bool = True
    here: dict[str, _Running] = field(default_factory=dict)
    finished: dict[str, Any] = field(default_factory=dict)
    rooms: dict[str, int] = field(default_factory=dict)
    weights: int = 0

    async def call(self, called: Any, *arguments: Any) -> Any:
        method = called.__name__
        fault = self.fault(method)
        if method == "start_sample" and len(arguments) < 4 and fault != "dies":
            # From the keeper, which hands what an engine raises to the sample's caller.
            fault = ""
        await asyncio.sleep(0)
        if fault == "dies":
            self.alive = False
        if fault == "never" and self.alive:
            await asyncio.sleep(10 * LATE_S)
        if not self.alive:
            raise EngineLost("it is dead")
        if fault == "fails":
            raise OrderFailed("it raised")
        answer = getattr(self, method)(*arguments)
        if fault == "late":
            await asyncio.sleep(10 * LATE_S)
        return await answer if asyncio.iscoroutine(answer) else answer

    def generate(self) -> None:
        for place, sample in list(self.here.items()):
            self.take(sample)
            if not sample.stopped and sample.expected is None:
                if len(sample.tokens) < sample.request.parameters.max_tokens:
                    sample.tokens.append(expected(sample.request)[len(sample.tokens)])
                if len(sample.tokens) == sample.request.parameters.max_tokens and not sample.held:
                    self.finished[place] = tuple(sample.tokens)
                    del self.here[place]

    @staticmethod
    def take(sample: _Running) -> None:
        buffer = sample.expected
        came = None if buffer is None else handover.read(buffer.path, buffer.handover_offset)
        if came is not None:
            sample.tokens, sample.expected = list(came.tokens), None
            sample.told = len(sample.tokens)

    async def collect(self, wait_s: float) -> News:
        await asyncio.sleep(0.001)
        self.generate()
        finished, self.finished = self.finished, {}
        grown = {}
        for place, sample in self.here.items():
            if sample.held:
                continue
            grown[place] = Grown(sample.told, tuple(sample.tokens[sample.told :]))
            sample.told = len(sample.tokens)
        return News(finished, grown, self.weights, True)

    def start_sample(
        self, place: str, request: SampleRequest, progress: Progress | None = None, room: str = "", computed: int = 0,
        rest: Rest | None = None,
    ) -> Started:  # fmt: skip
        waiting = self.here.get(place)
        if waiting is not None and waiting.held:
            self.take(waiting)
            if waiting.expected is None and progress is not None and waiting.told == len(progress.tokens):
                waiting.held = False
                return Started()
            del self.here[place]
        if place not in self.here and place not in self.finished:
            tokens = list(progress.tokens) if progress else []
            assert tuple(tokens) == expected(request)[: len(tokens)]
            self.here[place] = _Running(request, tokens, len(tokens))
            self.rooms.pop(room, None)
        gone = rest is not None and not Path(rest.buffer.path).exists()
        return Started(not_carried="the buffer is gone" if gone else "")

    def first_token_at(self, place: str, wait_s: float) -> float | None:
        return time.time() if place in self.here else None

    def hold_room(self, room: str, tokens: int) -> str:
        if room not in self.rooms and len(self.here) + len(self.rooms) >= SEATS:
            return "all seats are taken"
        self.rooms[room] = max(tokens, self.rooms.get(room, 0))
        return ""

    def release_room(self, room: str) -> None:
        self.rooms.pop(room, None)
        self.discard_sample(room)

    def discard_sample(self, place: str) -> None:
        self.here.pop(place, None)
        self.finished.pop(place, None)

    def withdraw_sample(self, place: str) -> bool:
        if place in self.finished:
            return False
        self.discard_sample(place)
        return True

    def expect_sample(
        self, place: str, request: SampleRequest, buffer: Any, first: int, weight_version: int, convoy: str
    ) -> str:
        if place not in self.here:
            self.here[place] = _Running(request, [], 0, expected=buffer, held=True)
            self.rooms.pop(place, None)
        return ""

    def stop_sample(self, place: str, buffer: Any = None, first: int = 0, hand_over: bool = False) -> Stopped | None:
        if place not in self.here:
            return None
        sample = self.here[place]
        sample.stopped = True
        blocks = -(-len(sample.tokens) // LAYOUT.block_size)
        if hand_over:
            handed = handover.Handover(list(sample.tokens), len(sample.tokens), blocks)
            handover.write(buffer.path, buffer.handover_offset, handed)
        return Stopped(Progress(tuple(sample.tokens)), len(sample.tokens), blocks, at=time.time())

    def resume_sample(self, place: str) -> bool:
        if place in self.here:
            self.here[place].stopped = False
        return place in self.here

    def kv_layout(self) -> KvLayout:
        return LAYOUT

    def export_kv(self, place: str, buffer: Any) -> Exported | None:
        if place not in self.here:
            return None
        gone = "" if Path(buffer.path).exists() else "the buffer is gone"
        return Exported(len(self.here[place].tokens) // LAYOUT.block_size, gone)

    def import_kv(self, room: str, buffer: Any, first: int, end: int) -> str:
        return "" if room in self.rooms and Path(buffer.path).exists() else "nothing to copy into"


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
                if called.__name__ == method and (method != "start_sample" or len(arguments) > 3):
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
    known = Progress((1, 2, 3), [{1: 0}, {2: 0}, {3: 0}])
    assert longer(known, Grown(3, (4,), [{4: 0}])) == Progress((1, 2, 3, 4), [{1: 0}, {2: 0}, {3: 0}, {4: 0}])
    assert longer(known, Grown(1, (2, 3, 4), [{2: 0}, {3: 0}, {4: 0}])).tokens == (1, 2, 3, 4)
    assert longer(known, Grown(4, (5,), [{5: 0}])) == known
    assert longer(known, Grown(0, (1, 2), [{1: 0}, {2: 0}])) == known
