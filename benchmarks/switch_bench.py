"""One rollout stage over engines of two layouts in one process, with the product's keeper, mover and switcher."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from movable_engines import LocalEngine
from msgspec import structs

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.home import ASK_AFTER_SECONDS
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.moves.tp_switcher import TpSwitcher
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.scheduling.move import KV_TRANSFER
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings

LIMIT_S = 60.0


class TimedMover(Mover):
    """The product's; adds up how long each of its orders takes to be answered."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.took: dict[str, list[float]] = defaultdict(list)

    async def _call(self, engine: int, method: Any, *arguments: Any) -> Any:
        began = time.monotonic()
        try:
            return await super()._call(engine, method, *arguments)
        finally:
            self.took[method.__name__].append(time.monotonic() - began)


class Switcher(TpSwitcher):
    """The product's, which is not told by what ends a sample here how long the rest may become."""

    allowed = 0

    def longest_allowed(self, samples: Any) -> int:
        """Return more tokens than any sample needs, as in a run."""
        return self.allowed


class Stage:
    """One rollout stage: keeper, mover and switcher over the engines."""

    def __init__(
        self,
        engines: list[LocalEngine],
        plan: LayoutPlan,
        folder: Path,
        asked: TpSwitchSettings,
        profiles: tuple[Profile, Profile],
        nodes: Mapping[int, str] | None = None,
    ) -> None:
        """`nodes`: on which node each engine is; None: all are on one."""
        self._plan = plan
        self.keeper = SampleKeeper(dict(enumerate(engines)), 0.2, spare=range(plan.engines, len(engines)))
        self.records: list[MoveRecord] = []
        self.switches: list[Any] = []
        store = KvBufferStore(folder)
        self.mover = TimedMover(
            self.keeper, store, lambda *_: Choice(KV_TRANSFER), LIMIT_S, self.records.append, ASK_AFTER_SECONDS
        )
        self.reports = EngineReports(self.keeper, asked.status_s, print, plan.layouts())
        for layout, profile in enumerate(profiles):
            self.reports.install(profile, layout)
        self.switcher = Switcher(
            asked, plan, self.keeper, self.reports, self.mover, self.switches.append, lambda: 1,
            lambda: self.came,
        )  # fmt: skip
        self.switcher.place(nodes or dict.fromkeys(range(len(engines)), "here"))
        self.came = False
        self._interval_s = asked.status_s if asked.enable else 0.0

    async def watch(self) -> None:
        """Watch the engines, like the samples' home."""
        while self._interval_s:
            await asyncio.sleep(self._interval_s)
            await self.reports.hear()
            self.switcher.look()

    async def run(
        self,
        requests: list[SampleRequest],
        before: dict[str, tuple[int, ...]],
        engines: Callable[[TpSwitcher], Awaitable[list[int]]] | None = None,
    ) -> dict[str, Any]:
        """Generate all; seconds and switches. `engines`: at which each request begins; None: at each in turn."""
        self.keeper.start()
        await self.mover.open()
        self.switcher.know_lengths(before)
        self.switcher.allowed = 2 * max(length for known in before.values() for length in known)
        if engines is None:
            chosen = [place % self._plan.engines for place in range(len(requests))]
        else:
            chosen = await engines(self.switcher)
        loop = asyncio.create_task(self.watch())
        began = time.monotonic()
        running = [
            asyncio.create_task(self.keeper.generate(one, engine)) for one, engine in zip(requests, chosen, strict=True)
        ]
        await asyncio.sleep(0.3)
        self.came = True
        outputs = await asyncio.gather(*running)
        seconds = time.monotonic() - began
        loop.cancel()
        self.switcher.stop()
        self.reports.stop()
        self.keeper.stop()
        return {
            "seconds": seconds, "switches": [structs.asdict(event) for event in self.switches],
            "orders_s": {method: statistics.median(took) for method, took in self.mover.took.items()},
            "moves": [(record.downtime, record.seconds) for record in self.records],
            "tokens": [list(output.outputs[0].token_ids) for output, _ in outputs],
        }  # fmt: skip
