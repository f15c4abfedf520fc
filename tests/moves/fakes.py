"""Faithful fakes of engines, as far as keeper, mover, reallocator and TP switcher see them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhyme_openrlhf.engine.messages import Exported, Grown, News, Progress, Rest, SampleRequest, Started, Stopped
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.kv.buffer import Handover, KvLayout, read_handover, write_handover
from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject
from rhyme_openrlhf.scheduling.engine_status import EngineStatus, SampleStatus

LAYOUT = KvLayout(1, 1, 4, 2, "float32")
SEATS = 3
LATE_S = 0.02
# A fault of these is tidied by nobody: that engine is as good as lost.
TIDYING = ("collect", "kv_layout", "release_room", "discard_sample", "first_token_age")


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
    told_news: News = field(default_factory=lambda: News({}, {}, 0, True))
    # Seconds from a stop, or a first token, to the answer that tells of it.
    stop_age: float = 0.0
    token_age: float = 0.0

    async def call(self, called: Any, *arguments: Any) -> Any:
        method = called.__name__
        fault = self.fault(method)
        if method == "start_samples" and fault != "dies":
            # From the keeper, which hands what an engine raises to the samples' callers.
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
        came = None if buffer is None else read_handover(buffer)
        if came is not None:
            sample.tokens, sample.expected = list(came.tokens), None
            sample.told = len(sample.tokens)

    async def collect(self, wait_s: float, heard: int = 0) -> News:
        await asyncio.sleep(0.001)
        if self.told_news.number > heard:
            return self.told_news
        self.generate()
        finished, self.finished = self.finished, {}
        grown = {}
        for place, sample in self.here.items():
            if sample.held:
                continue
            grown[place] = Grown(sample.told, tuple(sample.tokens[sample.told :]))
            sample.told = len(sample.tokens)
        self.told_news = News(finished, grown, self.weights, True, heard + 1)
        return self.told_news

    def start_sample(
        self, place: str, request: SampleRequest, progress: Progress | None = None, room: str = "", computed: int = 0,
        rest: Rest | None = None,
    ) -> Started:  # fmt: skip
        waiting = self.here.get(place)
        if waiting is not None and waiting.held:
            self.take(waiting)
            if waiting.expected is None and progress is not None and waiting.told == len(progress.tokens):
                waiting.held = False
                return Started(weight_version=self.weights)
            del self.here[place]
        if place not in self.here and place not in self.finished:
            tokens = list(progress.tokens) if progress else []
            assert tuple(tokens) == expected(request)[: len(tokens)]
            self.here[place] = _Running(request, tokens, len(tokens))
            self.rooms.pop(room, None)
        gone = rest is not None and not Path(rest.buffer.path).exists()
        return Started(not_carried="the buffer is gone" if gone else "", weight_version=self.weights)

    def start_samples(self, samples: Mapping[str, tuple[SampleRequest, Progress | None]]) -> list[Started]:
        return [self.start_sample(place, *one) for place, one in samples.items()]

    def first_token_age(self, place: str, wait_s: float) -> float | None:
        return self.token_age if place in self.here else None

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
            write_handover(buffer, Handover(list(sample.tokens), len(sample.tokens), blocks))
        return Stopped(Progress(tuple(sample.tokens)), len(sample.tokens), blocks, age=self.stop_age)

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


class Reporting(FakeEngine):
    """A fake that reports; `silent`: its reports never come."""

    number = 0
    silent = False
    fails = False

    def status(self) -> Any:
        if self.fails:
            raise OrderFailed("no such method")
        if self.silent:
            return asyncio.sleep(60)
        samples = tuple(SampleStatus(place, 1 + len(one.tokens)) for place, one in self.here.items())
        return EngineStatus(self.number, samples, 10**6, 50, 0, True, 1000, 2048)

    def step_times(self) -> str:
        return ""


class OnDevices(Reporting):
    """A fake engine that records switches in its timeline."""

    told: list[str]

    def hear_of(self, what: str) -> None:
        self.told.append(what)

    def begin_switch(self) -> None:
        self.hear_of("begin_switch")

    def end_switch(self) -> None:
        self.hear_of("end_switch")

    def lend_devices(self) -> None:
        self.hear_of("lend_devices")


def profile(seconds: float) -> Profile:
    steps = tuple(StepPoint(running, context, 0, seconds, 0.0, 1) for running in (1, 50) for context in (0, 100_000))
    return Profile(Subject("m", "h", "float32", 1), "derived", steps)
