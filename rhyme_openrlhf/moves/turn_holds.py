"""In a pipelined run: keeps a node's engines from their next turn while their samples are at its tail layout.

A synchronous run's engines have nothing to do once their samples have moved; a pipelined run's would begin the next
step on devices that the tail layout uses. So a node switches when all its engines are done with the same step but for
what moves, which is where they would wait for weights anyway, and its engines go on when the tail engines are done.

Invariants: what moves is of one turn, with one weight version, which the tail engines have too; engines that are held
begin no turn; whatever happens to the samples or to an engine, those that were held are let go.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from rhyme_openrlhf.engine.port import EngineLost, OrderFailed, problem_of
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.keeper import KeptSample, SampleKeeper

# An engine answers between two decode steps; a tail engine that is told to load weights when it has loaded them.
ANSWER_SECONDS = 60.0


class TurnHolds:
    """Those of one home."""

    def __init__(self, keeper: SampleKeeper, reports: EngineReports) -> None:
        self._keeper = keeper
        self._reports = reports
        self._loading: dict[int, asyncio.Task[None]] = {}
        # Of each node that is held: for which turn, what is set to let it go, and what does.
        self._held: dict[str, tuple[int, asyncio.Event, asyncio.Task[None]]] = {}

    def stop(self) -> None:
        """Let all engines go, and order nothing more."""
        for task in self._loading.values():
            task.cancel()
        for node in self._held:
            self.let_go(node)

    def may_go(self, samples: Sequence[KeptSample], tail: Sequence[int]) -> bool:
        """Whether samples of a node may go to these tail engines together; those are brought to their weights."""
        statuses = self._reports.statuses
        versions = {statuses[s.engine].weight_version for s in samples if s.engine in statuses}
        if len(versions) != 1 or len({turn_of(sample) for sample in samples}) != 1:
            return False
        (version,) = versions
        behind = [engine for engine in tail if engine in statuses and statuses[engine].weight_version != version]
        for engine in behind:
            if engine not in self._loading:
                task = self._loading[engine] = asyncio.create_task(self._tell(engine, "take_weights", version))
                task.add_done_callback(functools.partial(self._told, engine))
        return not behind

    def _told(self, engine: int, task: asyncio.Task[None]) -> None:
        del self._loading[engine]

    async def hold(self, node: str, samples: Sequence[KeptSample], engines: Sequence[int]) -> bool:
        """Have none of a node's `engines` go on behind the turn of these samples until they have ended; False: one
        already has. True for a node that is held for this turn."""
        turn = turn_of(samples[0])
        if node in self._held:
            return self._held[node][0] == turn
        ordered: list[int] = []
        try:
            agreed = True
            for engine in engines:
                ordered.append(engine)
                agreed = agreed and await self._hold(engine, turn)
        except asyncio.CancelledError:
            await self._release(ordered)
            raise
        if not agreed:
            await self._release(ordered)
            return False
        given_up = asyncio.Event()
        # Never cancelled: before its beginning it would let nobody go.
        task = asyncio.create_task(self._until_over(samples, given_up, ordered))
        self._held[node] = turn, given_up, task
        task.add_done_callback(functools.partial(self._over, node))
        return True

    def let_go(self, node: str) -> None:
        """Do not wait for the samples: none of them has moved."""
        if node in self._held:
            self._held[node][1].set()

    async def _until_over(self, samples: Sequence[KeptSample], given_up: asyncio.Event, engines: Sequence[int]) -> None:
        ended = asyncio.ensure_future(asyncio.wait([sample.answer for sample in samples]))
        waits = asyncio.ensure_future(given_up.wait())
        await asyncio.wait({ended, waits}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        waits.cancel()
        await self._release(engines)

    async def _release(self, engines: Sequence[int]) -> None:
        for engine in engines:
            await self._tell(engine, "release_turns")

    def _over(self, node: str, task: asyncio.Task[None]) -> None:
        del self._held[node]

    async def _hold(self, engine: int, turn: int) -> bool:
        """Whether it stays in the turn, or has ended it and begins none; so does one that is gone."""
        if not self._keeper.engines[engine].alive:
            return True
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return bool(await self._keeper.engines[engine].port.call("hold_turns", turn))
        except EngineLost:
            return True
        except (OrderFailed, TimeoutError):
            return False

    async def _tell(self, engine: int, method: str, *arguments: int) -> None:
        port = self._keeper.engines[engine].port
        if problem := await problem_of(port, engine, ANSWER_SECONDS, method, *arguments):
            self._reports.tell(f"adaptive tensor parallelism: {problem}")


def turn_of(sample: KeptSample) -> int:
    """The number of the turn that a pipelined run's sample belongs to."""
    assert sample.request.group is not None, "a sample of no prompt group in a pipelined run"
    return sample.request.group[0]
