"""Two real engines in one process, a keeper, a mover and a reallocator over them: what move.py measures on."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from movable_engines import LocalEngine

from rhyme_openrlhf.engine.calls import MeasuringCalls
from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.latency.measure import PrefillShape, StepShape
from rhyme_openrlhf.latency.profile import PrefillPoint, Profile, StepPoint
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.home import ASK_AFTER_SECONDS
from rhyme_openrlhf.moves.home_watch import Reallocator
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.scheduling.move import Phase
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import CpuSettings
from rhyme_openrlhf.settings.latency import EmulateSettings
from rhyme_openrlhf.settings.moves import AUTO, ReallocationSettings

LIMIT_S = 60.0


def settings(profile: str) -> RhymeSettings:
    """Return settings of the benchmark's engines: no drafts, so each sample is as long in steps as in tokens."""
    return dataclasses.replace(
        RhymeSettings(),
        histospec=HistoSpecSettings(own_output=False, siblings=False, shared_tokens=0),
        drafting=DraftingSettings(probe_share=0),
        emulate=EmulateSettings(profile=profile),
        cpu=CpuSettings(kv_cache_mb=256),
    )


class Bench:
    """Two engines, and a keeper, mover and reallocator over them."""

    def __init__(self, settings: RhymeSettings, length: int, seats: int, folder: Path) -> None:
        self.engines = [LocalEngine(number, settings, length, seats, engines=2) for number in range(2)]
        self.folder = folder
        self.chance = random.Random(1)

    def run(self, test: Callable[[Session], Awaitable[Any]], reallocation: ReallocationSettings) -> Any:
        """Return the test's result, run in an event loop of its own."""

        async def main() -> Any:
            session = Session(self, reallocation)
            session.keeper.start()
            try:
                return await asyncio.wait_for(test(session), 600)
            finally:
                session.reallocator.stop()
                session.reports.stop()
                session.keeper.stop()

        return asyncio.run(main())

    def stop(self) -> None:
        """End both engines."""
        for engine in self.engines:
            engine.stop()

    def profile(self, contexts: list[int], running: list[int]) -> Profile:
        """Plain decode steps and prefills of the first engine, as `rhyme profile` measures them."""
        engine = self.engines[0]

        async def main() -> Profile:
            steps, prefills = [], []
            for count in running:
                # Contexts are computed first, so that long ones of many samples take most of the time.
                for context in (contexts[0], min(contexts[-1], 1024)):
                    found = await engine.call(MeasuringCalls.decode_steps, StepShape(count, context, 0), 12)
                    took = statistics.median(step[3] for step in found)
                    tokens = round(statistics.fmean(step[1] for step in found))
                    steps.append(StepPoint(count, tokens, 0, took, 0.0, len(found)))
            for context in contexts:
                shape = PrefillShape(1, context)
                took = statistics.median([await engine.call(MeasuringCalls.prefill, shape) for _ in range(3)])
                prefills.append(PrefillPoint(1, context, took, 0.0, 3))
            return Profile(await engine.call(MeasuringCalls.subject), "measured", tuple(steps), tuple(prefills))

        return asyncio.run(main())

    def request(self, prompt: int, tokens: int) -> SampleRequest:
        """Return a sample with a random prompt and a response of exactly this many tokens."""
        from vllm import SamplingParams

        words = tuple(self.chance.randrange(5, 120) for _ in range(prompt))
        parameters = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        parameters.detokenize = False
        return SampleRequest(words, parameters)


class Session:
    """Objects that are made anew for each measurement."""

    def __init__(self, bench: Bench, reallocation: ReallocationSettings) -> None:
        self.bench = bench
        self.records: list[MoveRecord] = []
        self.keeper = SampleKeeper(dict(enumerate(bench.engines)), 0.05)
        self.carrier = ""
        store = KvBufferStore(bench.folder)
        self.mover = Mover(self.keeper, store, self.choose, LIMIT_S, self.moved, ASK_AFTER_SECONDS)
        self.reports = EngineReports(self.keeper, reallocation.status_s, print)
        self.reallocator = Reallocator(reallocation, self.keeper, self.mover, self.reports)
        self._interval_s = reallocation.status_s

    def install(self, profile: Profile) -> None:
        """Predict by this profile."""
        self.reports.install(profile)

    async def watch(self) -> None:
        """Watch the engines and reallocate, like the samples' home."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.reports.hear()
            self.reallocator.look()

    def choose(self, context: int, source: int, destination: int) -> Choice:
        """Return the carrier that is set, else the cheaper one, with its prediction."""
        known, costs = self.reports.destination(destination, context), self.reports.costs
        return Choice(*costs.choose(self.carrier or AUTO, context, known), known)

    def moved(self, record: MoveRecord) -> None:
        """Learn from a move, like the samples' home."""
        self.records.append(record)
        known = record.choice.destination
        if known is not None and record.downtime and record.move.phase is Phase.RUNNING:
            self.reports.costs.learn(record.move.carrier, record.tokens, known, record.downtime)

    async def grown(self, tokens: int, prompt: tuple[int, ...]) -> Any:
        """Return the sample of this prompt, once that many of its response tokens are known."""
        while True:
            for sample in self.keeper._samples.values():
                if sample.request.prompt == prompt and len(sample.known.tokens) >= tokens:
                    return sample
            await asyncio.sleep(0.01)
