"""Reports of engines while they generate, kept for decisions on moves: newest status, and predicted step times.

Invariants:
- No engine is waited for longer than the interval. An engine that does not answer is left out until it does, and gets
  no further request.
- A report is taken once, for all policies.
- Step times are of engines of one tensor-parallel size, corrected by the steps that those engines report.

`LayoutReports` is made once for all nodes, so a look at them takes time in proportion to engines, not to nodes times
engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from rhyme_openrlhf.engine.calls import EnginePort, MeasuringCalls, SampleCalls
from rhyme_openrlhf.engine_errors import EngineLost, OrderFailed
from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import Profile, ProfileError, parse
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.scheduling.engine_status import EngineStatus, learn, reported_speculation
from rhyme_openrlhf.scheduling.move_costs import Destination, MoveCosts


class LayoutReports:
    """`statuses`: those of one layout that are fresh (`EngineReports.fresh`)."""

    def __init__(self, statuses: Sequence[EngineStatus]) -> None:
        self._by_engine = {status.engine: status for status in statuses}

    def of(self, engines: Sequence[int]) -> list[EngineStatus]:
        """Return the reports of these engines that are alive, keeping their order."""
        return [self._by_engine[engine] for engine in engines if engine in self._by_engine]

    @cached_property
    def contexts(self) -> dict[str, int]:
        """Return each sample's context, by its place."""
        return {sample.place: sample.context for status in self._by_engine.values() for sample in status.samples}

    @cached_property
    def speculation(self) -> tuple[float, float]:
        """Return tokens and draft tokens of a sample's decode step, on those of the engines that have samples."""
        return reported_speculation(status for status in self._by_engine.values() if status.samples)


# A report that is older is of no engine as it is now.
STALE_REPORTS = 4


class EngineReports:
    """The reports of one home's engines.

    `layouts`: the layout of each engine, by number, 0 where none is named; `say` shows a person a sentence.
    """

    def __init__(
        self,
        keeper: SampleKeeper,
        interval_s: float,
        say: Callable[[str], None],
        layouts: Mapping[int, int] | None = None,
    ) -> None:
        self._keeper = keeper
        self._interval_s = interval_s
        self._say = say
        self._said: set[str] = set()
        self._layouts = dict(layouts or {})
        self.costs = MoveCosts()
        self.statuses: dict[int, EngineStatus] = {}
        """The newest report of each engine."""
        self.predictors: dict[int, Predictor] = {}
        """Step times by layout."""
        self.transfers: dict[int, TransferModel] = {}
        """Prefills and KV transfers by layout."""
        self._heard: dict[int, float] = {}
        self._asked: dict[int, asyncio.Task[EngineStatus | None]] = {}
        self._profiled: set[int] = set()
        self.lent: frozenset[int] = frozenset()
        """Engines whose devices another layout has: they look idle, and are none to send samples to."""

    def stop(self) -> None:
        """Ask nothing more."""
        for task in self._asked.values():
            task.cancel()

    def layout(self, engine: int) -> int:
        """Return the layout that an engine belongs to."""
        return self._layouts.get(engine, 0)

    def fresh(self, layout: int = 0) -> list[EngineStatus]:
        """Return the newest reports of a layout's engines. Weight loads delay reports, and lost engines send none."""
        now = asyncio.get_running_loop().time()
        return [
            status
            for number, status in self.statuses.items()
            if self.layout(number) == layout
            and number not in self.lent
            and self._keeper.engines[number].alive
            and now - self._heard[number] < STALE_REPORTS * self._interval_s
        ]

    async def hear(self) -> None:
        """Ask all engines once, and learn from what they answer within the interval."""
        for number, known in self._keeper.engines.items():
            if known.alive and number not in self._asked:
                self._asked[number] = asyncio.create_task(self._ask(number))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._interval_s)
        for number in [number for number, task in self._asked.items() if task.done()]:
            status = self._asked.pop(number).result()
            if status is not None:
                self.statuses[status.engine] = status
                self._heard[status.engine] = asyncio.get_running_loop().time()
                if (predictor := self.predictors.get(self.layout(status.engine))) is not None:
                    learn(predictor, status)

    async def _ask(self, number: int) -> EngineStatus | None:
        port = self._keeper.engines[number]
        try:
            if self.layout(number) not in self._profiled:
                await self._take_profile(port, self.layout(number))
            return await port.call(SampleCalls.status)
        except EngineLost:
            # Its keeper's matter.
            return None
        except (OrderFailed, TimeoutError) as error:
            self.tell(f"engine {number} does not report for reallocation: {error}")
            return None

    async def _take_profile(self, port: EnginePort, layout: int) -> None:
        """Take the step times that engines were given before the first rollout, once they are there."""
        text = await port.call(MeasuringCalls.step_times)
        if not text:
            return
        self._profiled.add(layout)
        try:
            profile = parse(text, "the profile")
        except ProfileError as error:
            self.tell(str(error))
            return
        self.install(profile, layout)

    def install(self, profile: Profile, layout: int = 0) -> None:
        """Predict the steps of a layout's engines by this profile; prefills by that of the first one."""
        self._profiled.add(layout)
        self.predictors[layout] = Predictor(StepModel(profile), self.tell)
        self.transfers[layout] = TransferModel(profile)
        if self.costs.transfer is None or layout == 0:
            self.costs.transfer = self.transfers[layout]

    def destination(self, number: int, context: int, near: bool = True) -> Destination | None:
        """Return what an engine's next steps take with one sample more, by its last report; None before there is one.

        `near`: it is on the node that the sample is to leave.
        """
        status = self.statuses.get(number)
        if status is None:
            return None
        running = sum(not sample.waiting for sample in status.samples)
        mean, predictor = status.decode, self.predictors.get(self.layout(number))
        if predictor is not None:
            held = sum(sample.context for sample in status.samples)
            each = mean.drafts / mean.running if mean is not None and mean.running else 0.0
            return Destination.predicted(predictor, running, held, context, each, status.step_tokens, near)
        if mean is None:
            return None
        return Destination(mean.seconds if running else 0.0, mean.seconds, status.step_tokens, near)

    def tell(self, sentence: str) -> None:
        """Tell a person once a sentence of its kind: of refused moves, each names its sample."""
        kind = "".join(letter for letter in sentence if not letter.isdigit())
        if kind not in self._said:
            self._said.add(kind)
            self._say(sentence)
