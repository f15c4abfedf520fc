"""Keeps the samples of a run: each one's caller, its place, and its tokens as far as they are known.

A keeper outlives engines. It hears from each engine about once a second and hands outputs to their callers. It restarts
the samples of a lost engine on the engine with the fewest samples, from the tokens it last heard of. A seeded sample is
restarted from its beginning, because the state of its random numbers is lost. In a pipelined run it restarts none; the
callers of a lost engine's samples get an error.

Invariants:
- Each sample is answered once.
- News of a sample counts only from its present place, or from the one it is being handed to. So a result of an engine
  that was given up is thrown away.
- A sample waits for ever only if its engine answers and generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.engine.calls import EnginePort, SampleCalls
from rhyme_openrlhf.engine.messages import Grown, News, Progress, SampleRequest
from rhyme_openrlhf.engine.port import LivePort
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.engine_losses import EngineLosses

# To hear from more engines would take the home most of a processor.
NEWS_A_SECOND = 256


@dataclass(eq=False)
class KeptSample:
    """One sample. `engine` and `place`: where it is; None, "": nowhere at the moment; `incoming`: where it may be soon.

    `ahead`: what was heard from where it may be soon. `on_settled(sample, engine before)`: told of each stay;
    `on_begun(engine, weight version)`: told of each beginning from nothing.
    """

    name: str
    request: SampleRequest
    answer: asyncio.Future[Any]
    engine: int | None = None
    place: str = ""
    incoming: str = ""
    ahead: list[Grown] = field(default_factory=list)
    moving: bool = False
    stays: itertools.count[int] = field(default_factory=itertools.count)
    on_settled: Callable[[KeptSample, int | None], None] = lambda sample, before: None
    on_begun: Callable[[int, int], None] = lambda engine, version: None
    # What it has generated, as far as was heard: joined, and what came since. Thousands of samples grow each second;
    # their tokens are hardly ever read.
    _joined: Progress = field(default_factory=Progress, init=False)
    _since: list[Grown] = field(default_factory=list, init=False)

    @property
    def known(self) -> Progress:
        """The sample's progress, as far as was heard."""
        if self._since:
            self._joined, self._since = joined(self._joined, self._since), []
        return self._joined

    @known.setter
    def known(self, progress: Progress) -> None:
        self._joined, self._since = progress, []

    @property
    def known_tokens(self) -> int:
        """The number of known response tokens."""
        last = self._since[-1] if self._since else None
        return len(self._joined.tokens) if last is None else last.first + len(last.tokens)

    def grow(self, grown: Grown) -> None:
        """Add what is new in the news; nothing if it leaves a gap."""
        have, first = self.known_tokens, grown.first
        if first == have and grown.tokens:
            self._since.append(grown)
        elif first < have < first + len(grown.tokens):
            log_probs = None if grown.log_probs is None else grown.log_probs[have - first :]
            self._since.append(Grown(have, grown.tokens[have - first :], log_probs))

    def new_place(self) -> str:
        """Return a name for its next stay at an engine, never used before."""
        return f"{self.name}.{next(self.stays)}"

    def settle(self, engine: int | None, place: str) -> None:
        """Note that it is there now, and nowhere else."""
        # News is told once: what its new engine told before its move was known to be over is not told again.
        grown = self.ahead if place and place == self.incoming else ()
        before, self.engine, self.place, self.incoming, self.ahead = self.engine, engine, place, "", []
        self.on_settled(self, before)
        for news in grown:
            self.grow(news)


class KnownEngine(LivePort):
    """The way to call an engine, with what its keeper knows from its last news, of number `heard`."""

    weight_version: int = 0
    open: bool = True
    heard: int = 0


class SampleKeeper:
    """All samples of some engines. Used from one event loop; `start` before the first sample.

    `hear_s`: seconds between two news of an engine in which nothing finished, more with many engines. `spare`: engines
    that samples are restarted on only if there are no others. `on_restart(sample, lost engine, new engine)`: told of
    each sample that an engine's death has sent elsewhere.
    """

    def __init__(
        self,
        ports: Mapping[int, EnginePort],
        hear_s: float,
        on_restart: Callable[[KeptSample, int, int], None] = lambda sample, lost, new: None,
        restarts: bool = True,
        spare: Collection[int] = (),
    ) -> None:
        self.losses = EngineLosses()
        self.engines = {number: KnownEngine(number, port, self.losses) for number, port in ports.items()}
        self.losses.subscribe(self._lost)
        self._hear_s = max(hear_s, len(ports) / NEWS_A_SECOND)
        self._on_restart = on_restart
        self._restarting = restarts
        self._spare = frozenset(spare)
        self._samples: dict[str, KeptSample] = {}
        # The same by engine: with thousands of engines nobody can look through all samples for those of each.
        self._at: dict[int, dict[str, KeptSample]] = {number: {} for number in ports}
        self._numbers = itertools.count()
        self._ears: list[asyncio.Task[None]] = []
        self._restarts: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to listen to the engines."""
        for number in self.engines:
            ear = asyncio.create_task(self._listen(number))
            ear.add_done_callback(functools.partial(self._deaf, number))
            self._ears.append(ear)

    def stop(self) -> None:
        """Listen no more."""
        for task in (*self._ears, *self._restarts):
            task.cancel()

    def samples(self, engine: int) -> list[KeptSample]:
        """Return the unfinished samples that are at an engine."""
        return list(self._at[engine].values())

    def _settled(self, sample: KeptSample, before: int | None) -> None:
        if before is not None:
            self._at[before].pop(sample.name, None)
        # A move may be over later than its sample.
        if sample.engine is not None and sample.name in self._samples:
            self._at[sample.engine][sample.name] = sample

    def sample(self, name: str) -> KeptSample:
        """Return an unfinished sample. Raises KeyError."""
        return self._samples[name]

    async def generate(
        self, request: SampleRequest, engine: int, on_begun: Callable[[int, int], None] = lambda engine, version: None
    ) -> tuple[Any, int]:
        """vLLM's output for a sample that begins at `engine`, and the engine at which it ended.

        `on_begun(engine, weight version)`: told of each beginning from nothing. Raises what the engine raised for this
        request, and EngineLost when no engine is left.
        """
        answer = asyncio.get_running_loop().create_future()
        sample = KeptSample(str(next(self._numbers)), request, answer, on_settled=self._settled, on_begun=on_begun)
        self._samples[sample.name] = sample
        try:
            await self.begin(sample, engine)
            output = await sample.answer
            return output, engine if sample.engine is None else sample.engine
        finally:
            del self._samples[sample.name]
            if sample.engine is not None:
                del self._at[sample.engine][sample.name]
            if sample.engine is not None and (sample.answer.cancelled() or not sample.answer.done()):
                with contextlib.suppress(EngineLost):
                    await self.engines[sample.engine].discard(sample.place)

    async def begin(self, sample: KeptSample, engine: int | None) -> None:
        """Begin a sample, or go on with what is known of it, at `engine` or else at the next best that lives."""
        sample.moving = True
        try:
            while not sample.answer.done():
                lives = [number for number, other in self.engines.items() if other.alive]
                if not lives:
                    sample.answer.set_exception(EngineLost("no engine is left to go on with samples"))
                    return
                engine = min(lives, key=self._load) if engine is None else engine
                if await self._begin(sample, engine):
                    return
                sample.settle(None, "")
                if self.engines[engine].alive:
                    # It loads weights.
                    await asyncio.sleep(self._hear_s)
                elif not self._restarting:
                    self._give_up(sample, engine)
                engine = None
        finally:
            sample.moving = False

    def _load(self, engine: int) -> tuple[bool, int]:
        return engine in self._spare, len(self.samples(engine))

    async def _begin(self, sample: KeptSample, engine: int) -> bool:
        known = self.engines[engine]
        sample.settle(engine, sample.new_place())
        sample.known = self.restartable(sample)
        try:
            # Nothing to go on from: it may wait there for new weights.
            progress = sample.known if sample.known.tokens else None
            started = await known.start(sample.place, sample.request, progress)
        except EngineLost:
            return False
        if not started.refused:
            known.weight_version = started.weight_version
            if progress is None:
                sample.on_begun(engine, started.weight_version)
        return known.alive and not started.refused

    @staticmethod
    def restartable(sample: KeptSample) -> Progress:
        """Return the progress from which a sample can go on without its engine: the last known, or none."""
        if sample.request.parameters.seed is not None:
            return Progress()
        # On the weights of the remaining engine.
        return dataclasses.replace(sample.known, weight_version=None)

    async def _listen(self, number: int) -> None:
        known = self.engines[number]
        with contextlib.suppress(EngineLost):
            while True:
                self._hear(await known.call(SampleCalls.collect, self._hear_s, known.heard), known)

    def _deaf(self, number: int, ear: asyncio.Task[None]) -> None:
        """Listening to an engine ended: its samples must not wait for what nobody will hear, nor later ones."""
        error = None if ear.cancelled() else ear.exception()
        if error is not None:
            for sample in self.samples(number):
                if not sample.answer.done():
                    sample.answer.set_exception(error)
            self.losses.publish(number, f"engine {number} cannot be heard: {error}")

    def _hear(self, news: News, known: KnownEngine) -> None:
        known.weight_version, known.open, known.heard = news.weight_version, news.open, news.number
        for place, grown in news.grown.items():
            sample = self._at_place(place)
            if sample is None:
                continue
            if place == sample.place:
                sample.grow(grown)
            else:
                sample.ahead.append(grown)
        for place, outcome in news.finished.items():
            sample = self._at_place(place)
            if sample is None or sample.answer.done():
                continue
            if isinstance(outcome, BaseException):
                sample.answer.set_exception(outcome)
            else:
                sample.answer.set_result(outcome)

    def _at_place(self, place: str) -> KeptSample | None:
        sample = self._samples.get(sample_of(place))
        return sample if sample is not None and place in (sample.place, sample.incoming) else None

    def _lost(self, number: int, reason: str) -> None:
        """Restart the samples of a lost engine elsewhere, except those on a move, which their moves handle."""
        for sample in self.samples(number):
            if not sample.moving:
                self.restart(sample)

    def restart(self, sample: KeptSample) -> None:
        """Go on elsewhere with a sample whose engine is gone."""
        lost = sample.engine
        if not self._restarting:
            self._give_up(sample, lost)
            return
        sample.settle(None, "")
        task = asyncio.create_task(self._restart(sample, lost))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    @staticmethod
    def _give_up(sample: KeptSample, engine: int | None) -> None:
        sample.settle(None, "")
        if not sample.answer.done():
            sample.answer.set_exception(EngineLost(f"engine {engine} is gone, and sample {sample.name} with it"))

    async def _restart(self, sample: KeptSample, lost: int | None) -> None:
        await self.begin(sample, None)
        if sample.engine is not None and lost is not None:
            self._on_restart(sample, lost, sample.engine)


def sample_of(place: str) -> str:
    """Return the name of the sample whose stay at an engine this is."""
    return place.rpartition(".")[0]


def joined(known: Progress, since: Sequence[Grown]) -> Progress:
    """Return the progress with all that followed it."""
    tokens = tuple(itertools.chain(known.tokens, *(grown.tokens for grown in since)))
    if any(grown.log_probs is None for grown in since):
        return Progress(tokens)
    return Progress(tokens, list(itertools.chain(known.log_probs or (), *(grown.log_probs for grown in since))))
