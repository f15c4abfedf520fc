"""Reallocation while a run generates: hears what engines report, asks the policy, and orders its moves.

A loop beside the samples' home. Invariants: it waits for no engine (one that does not answer is left out until it
does, and asked nothing more); one decision at a time, so an engine takes part in one migration; a move that fails
leaves its sample generating, which is the mover's promise; nothing it does can end the run: what goes wrong is told
once, as a sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rhyme_openrlhf.latency.predictor import Predictor
from rhyme_openrlhf.latency.profile import ProfileError, parse
from rhyme_openrlhf.latency.step_model import StepModel
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.rollout.moves.engine_port import EngineLost, OrderFailed
from rhyme_openrlhf.rollout.moves.keeper import SampleKeeper
from rhyme_openrlhf.scheduling.engine_status import EngineStatus
from rhyme_openrlhf.scheduling.move import MoveRefused
from rhyme_openrlhf.scheduling.move_costs import Destination, MoveCosts
from rhyme_openrlhf.scheduling.reallocation_policy import ReallocationPolicy
from rhyme_openrlhf.scheduling.reallocation_settings import ReallocationSettings

CAUSE = "reallocation"
# A report that is older is of no engine as it is now.
STALE_REPORTS = 4


class Reallocator:
    """That of one home. `move(sample, destination, cause)` orders a move; `say` tells a person a sentence."""

    def __init__(
        self,
        settings: ReallocationSettings,
        keeper: SampleKeeper,
        move: Callable[[int, int, str], Awaitable[Any]],
        say: Callable[[str], None],
    ) -> None:
        self._interval_s = settings.status_s
        self._keeper = keeper
        self._move = move
        self._say = say
        self._said: set[str] = set()
        self.policy = ReallocationPolicy(settings.threshold, settings.cooldown_steps)
        self.costs = MoveCosts()
        self.statuses: dict[int, EngineStatus] = {}
        """The newest report of each engine."""
        self._heard: dict[int, float] = {}
        self._asked: dict[int, asyncio.Task[EngineStatus | None]] = {}
        self._moves: set[asyncio.Task[None]] = set()
        self._needs_profile = True
        self.decisions = 0
        """Decisions that ordered moves."""

    async def run(self) -> None:
        """Look at the engines for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            if any(self._keeper.samples(number) for number in self._keeper.engines):
                await self.look()

    def stop(self) -> None:
        """Order nothing more."""
        for task in (*self._asked.values(), *self._moves):
            task.cancel()

    async def look(self) -> None:
        """Hear the engines once, and begin what is decided."""
        await self._hear()
        now = asyncio.get_running_loop().time()
        # One that loads weights answers late, and one that is lost never.
        fresh = [
            status
            for number, status in self.statuses.items()
            if self._keeper.engines[number].alive and now - self._heard[number] < STALE_REPORTS * self._interval_s
        ]
        if self._moves or len(fresh) < 2:
            return
        numbers = {
            s.place: int(s.name) for engine in self.statuses for s in self._keeper.samples(engine) if not s.moving
        }
        orders = self.policy.decide(fresh, numbers)
        self.decisions += bool(orders)
        for order in orders:
            for sample in order.samples:
                task = asyncio.create_task(self._carry_out(sample, order.destination))
                self._moves.add(task)
                task.add_done_callback(self._moves.discard)

    async def _hear(self) -> None:
        for number, known in self._keeper.engines.items():
            if known.alive and number not in self._asked:
                self._asked[number] = asyncio.create_task(self._ask(number))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._interval_s)
        answered = [number for number, task in self._asked.items() if task.done()]
        came = [status for number in answered if (status := self._asked.pop(number).result()) is not None]
        for status in came:
            self.statuses[status.engine] = status
            self._heard[status.engine] = asyncio.get_running_loop().time()
        self.policy.learn(came)

    async def _ask(self, number: int) -> EngineStatus | None:
        port = self._keeper.engines[number].port
        try:
            if self._needs_profile:
                await self._take_profile(port)
            status: EngineStatus = await port.call("status")
        except (EngineLost, OrderFailed, TimeoutError) as error:
            # A lost engine is its keeper's matter.
            if not isinstance(error, EngineLost):
                self._tell(f"engine {number} does not report for reallocation: {error}")
            return None
        return status

    async def _take_profile(self, port: Any) -> None:
        """The step times that engines were given before the first rollout, once they are there."""
        text = await port.call("step_times")
        if not text:
            return
        self._needs_profile = False
        try:
            profile = parse(text, "the profile")
        except ProfileError as error:
            self._tell(str(error))
            return
        self.policy.predictor = Predictor(StepModel(profile), self._tell)
        self.costs.transfer = TransferModel(profile)

    async def _carry_out(self, sample: int, destination: int) -> None:
        try:
            await self._move(sample, destination, CAUSE)
        except KeyError:
            # It has ended since the report.
            return
        except MoveRefused as refused:
            self._tell(f"reallocation: {refused}")

    def destination(self, number: int, context: int) -> Destination | None:
        """What its last report says an engine's next steps take, with one sample more; None before there is one."""
        status = self.statuses.get(number)
        if status is None:
            return None
        running = sum(not sample.waiting for sample in status.samples)
        mean, predictor = status.decode, self.policy.predictor
        if predictor is not None:
            there = sum(sample.context for sample in status.samples)
            each = mean.drafts / mean.running if mean is not None and mean.running else 0.0
            now = predictor.step_seconds(running, there, round(running * each)) if running else 0.0
            after = predictor.step_seconds(running + 1, there + context, round((running + 1) * each))
            return Destination(now, after, status.step_tokens)
        if mean is None:
            return None
        return Destination(mean.seconds if running else 0.0, mean.seconds, status.step_tokens)

    def _tell(self, sentence: str) -> None:
        # A refused move names its sample: the kind of sentence counts.
        kind = "".join(letter for letter in sentence if not letter.isdigit())
        if kind not in self._said:
            self._said.add(kind)
            self._say(sentence)
