"""What looks at the engines while samples of a home generate: one loop for all that moves samples by itself.

Invariants: engines are asked once for all policies; of those that want the same sample, reallocation comes before a
switch of layouts, which takes what it left; what goes wrong ends the looking, never the run, and is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.reallocator import Reallocator
from rhyme_openrlhf.moves.tp_switcher import LayoutSwitcher
from rhyme_openrlhf.moves.turn_holds import TurnHolds
from rhyme_openrlhf.scheduling.layouts import ALIGNED, LayoutPlan
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import Event, Note


class HomeWatch:
    """That of one home.

    `step()`: the training step; `admitted()`: whether all its prompts have come. Others as in LayoutSwitcher.
    """

    def __init__(
        self,
        rhyme: RhymeSettings,
        plan: LayoutPlan | None,
        keeper: SampleKeeper,
        move: Any,
        record: Callable[[Event], None],
        step: Callable[[], int],
        admitted: Callable[[], bool],
    ) -> None:
        self._keeper = keeper
        self._record = record
        each, switch = rhyme.reallocation, rhyme.tp_switch
        self._interval_s = min(
            each.status_s if each.enable else switch.status_s, switch.status_s if switch.enable else each.status_s
        )
        layouts = plan.layouts() if plan is not None else {}
        self.reports = EngineReports(keeper, self._interval_s, self._warn, layouts)
        self._reallocator: Reallocator | None = None
        if rhyme.reallocation.enable:
            self._reallocator = Reallocator(rhyme.reallocation, keeper, move, self.reports)
        self.switcher: LayoutSwitcher | None = None
        """None if layouts are not switched."""
        if plan is not None and rhyme.tp_switch.enable:
            holds = TurnHolds(keeper, self.reports) if rhyme.histopipe.enable else None
            limit_s = rhyme.move.timeout_s
            self.switcher = LayoutSwitcher(
                rhyme.tp_switch, plan, keeper, self.reports, move, record, step, admitted, limit_s, holds
            )
        self._loop: asyncio.Task[None] | None = None

    @staticmethod
    def is_needed(rhyme: RhymeSettings) -> bool:
        """Whether anything moves samples by itself."""
        return rhyme.reallocation.enable or rhyme.tp_switch.enable

    async def open(self, nodes: Mapping[int, str]) -> None:
        """Begin to look; `nodes`: on which each engine is."""
        if self.switcher is not None:
            self.switcher.place(nodes)
            for number in nodes:
                if self.reports.layout(number) != ALIGNED:
                    await self._keeper.engines[number].port.call("stand_by")
        self._loop = asyncio.create_task(self._run())
        self._loop.add_done_callback(self._ended)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if any(self._keeper.samples(number) for number in self._keeper.engines):
                await self.reports.hear()
                if self._reallocator is not None:
                    self._reallocator.look()
            # Without samples too: devices go back to the engines of the next step.
            if self.switcher is not None and not (self._reallocator is not None and self._reallocator.busy):
                self.switcher.look()

    def close(self) -> None:
        """Look no more, and move nothing."""
        if self._loop is not None:
            self._loop.cancel()
        self.reports.stop()
        if self._reallocator is not None:
            self._reallocator.stop()
        if self.switcher is not None:
            self.switcher.stop()

    def _ended(self, loop: asyncio.Task[None]) -> None:
        error = None if loop.cancelled() else loop.exception()
        if error is not None:
            self._warn(f"no sample is moved by itself any more: {type(error).__name__}: {error}")

    def _warn(self, sentence: str) -> None:
        self._record(Note("warning", sentence))
