"""The loop that watches the engines while a home's samples generate, for every policy that moves samples by itself.

`Reallocator` asks the policy which samples go from full to empty engines (scheduling/reallocation_policy.py).
tp_switcher.py decides which node's samples go to engines of more devices.

Invariants:
- Engines are queried once for all policies.
- Reallocation comes before a switch of layouts, which takes the samples that it left.
- Reallocation makes one decision at a time, so an engine takes part in one migration. It balances engines of the first
  layout only.
- A move that fails leaves its sample generating, as the mover promises.
- A failure ends a look, never the loop or the run, and is reported once: devices are always handed back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from rhyme_openrlhf.engine.calls import DeviceCalls
from rhyme_openrlhf.engine_errors import EngineLost
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Mover
from rhyme_openrlhf.moves.tp_switcher import TpSwitcher, TurnHolds
from rhyme_openrlhf.scheduling.layouts import ALIGNED, LayoutPlan
from rhyme_openrlhf.scheduling.move import MoveRefused, NotYet
from rhyme_openrlhf.scheduling.reallocation import ReallocationPolicy
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.moves import ReallocationSettings
from rhyme_openrlhf.telemetry.events import Event, Note

CAUSE = "reallocation"


class Reallocator:
    """Balances the load of one home."""

    def __init__(
        self,
        settings: ReallocationSettings,
        keeper: SampleKeeper,
        mover: Mover,
        reports: EngineReports,
    ) -> None:
        self._keeper = keeper
        self._mover = mover
        self._reports = reports
        self.policy = ReallocationPolicy(settings.threshold, settings.cooldown_steps)
        self._moves: set[asyncio.Task[None]] = set()
        self.decisions = 0
        """Decisions that ordered moves."""

    @property
    def busy(self) -> bool:
        """True while moves of a decision are under way."""
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
            await self._mover.move(self._keeper.sample(str(sample)), destination, CAUSE)
        except (KeyError, NotYet):
            # It has ended since the report; or an engine has other weights since, and a later look asks again.
            return
        except MoveRefused as refused:
            self._reports.tell(f"reallocation: {refused}")


class HomeWatch:
    """Watches the engines of one home.

    `step()`: the training step; `admitted()`: whether all its prompts have come. Others as in TpSwitcher.
    """

    def __init__(
        self,
        rhyme: RhymeSettings,
        plan: LayoutPlan | None,
        keeper: SampleKeeper,
        mover: Mover,
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
            self._reallocator = Reallocator(rhyme.reallocation, keeper, mover, self.reports)
        self.switcher: TpSwitcher | None = None
        """None if layouts are not switched."""
        if plan is not None and rhyme.tp_switch.enable:
            holds = TurnHolds(keeper, self.reports) if rhyme.histopipe.enable else None
            limit_s = rhyme.move.timeout_s
            self.switcher = TpSwitcher(
                rhyme.tp_switch, plan, keeper, self.reports, mover, record, step, admitted, limit_s, holds
            )
        self._loop: asyncio.Task[None] | None = None

    @staticmethod
    def is_needed(rhyme: RhymeSettings) -> bool:
        """Return whether anything moves samples by itself."""
        return rhyme.reallocation.enable or rhyme.tp_switch.enable

    async def open(self, nodes: Mapping[int, str]) -> None:
        """Begin to look; `nodes`: on which each engine is."""
        if self.switcher is not None:
            self.switcher.place(nodes)
            for number in nodes:
                if self.reports.layout(number) != ALIGNED:
                    with contextlib.suppress(EngineLost):
                        await self._keeper.engines[number].call(DeviceCalls.stand_by)
        self._loop = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            for look in (self._reallocate, self._switch):
                (error,) = await asyncio.gather(look(), return_exceptions=True)
                if error is not None:
                    self.reports.tell(f"no sample was moved by itself in this look: {type(error).__name__}: {error}")

    async def _reallocate(self) -> None:
        if any(self._keeper.samples(number) for number in self._keeper.engines):
            await self.reports.hear()
            if self._reallocator is not None:
                self._reallocator.look()

    async def _switch(self) -> None:
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

    def _warn(self, sentence: str) -> None:
        self._record(Note("warning", sentence))
