"""Reallocation while a run generates: asks the policy about what engines report, and orders its moves.

Beside the samples' home. Invariants: one decision at a time, so an engine takes part in one migration; only engines of
the first layout are evened out; a move that fails leaves its sample generating, which is the mover's promise; nothing
it does can end the run: what goes wrong is told once, as a sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.scheduling.move import MoveRefused, NotYet
from rhyme_openrlhf.scheduling.reallocation import ReallocationPolicy
from rhyme_openrlhf.settings.moves import ReallocationSettings

CAUSE = "reallocation"


class Reallocator:
    """That of one home. `move(sample, destination, cause)` orders a move."""

    def __init__(
        self,
        settings: ReallocationSettings,
        keeper: SampleKeeper,
        move: Callable[[int, int, str], Awaitable[Any]],
        reports: EngineReports,
    ) -> None:
        self._keeper = keeper
        self._move = move
        self._reports = reports
        self.policy = ReallocationPolicy(settings.threshold, settings.cooldown_steps)
        self._moves: set[asyncio.Task[None]] = set()
        self.decisions = 0
        """Decisions that ordered moves."""

    @property
    def busy(self) -> bool:
        """Whether moves of a decision are under way."""
        return bool(self._moves)

    def stop(self) -> None:
        """Order nothing more."""
        for task in self._moves:
            task.cancel()

    def look(self) -> None:
        """Begin what the newest reports make worth it."""
        self.policy.predictor = self._reports.predictors.get(0)
        fresh = self._reports.fresh()
        if self._moves or len(fresh) < 2:
            return
        numbers = {
            s.place: int(s.name) for status in fresh for s in self._keeper.samples(status.engine) if not s.moving
        }
        orders = self.policy.decide(fresh, numbers)
        self.decisions += bool(orders)
        for order in orders:
            for sample in order.samples:
                task = asyncio.create_task(self._carry_out(sample, order.destination))
                self._moves.add(task)
                task.add_done_callback(self._moves.discard)

    async def _carry_out(self, sample: int, destination: int) -> None:
        try:
            await self._move(sample, destination, CAUSE)
        except (KeyError, NotYet):
            # It has ended since the report; or an engine has other weights since, and a later look asks again.
            return
        except MoveRefused as refused:
            self._reports.tell(f"reallocation: {refused}")
