"""Moves that go together, to engines on the same devices as those that they come from.

While some samples run at one of them and some at the other, both are slow. So none is stopped before all can be, and
their destination is told of no stop before all have been made: it begins with all of them in one step.

Invariants: whoever is over, or never began, is waited for no more; nobody waits longer for a stop than STOP_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rhyme_openrlhf.scheduling.move import Move, Step

# Samples that are stopped generate nothing. A stop is made within a step of its engine; one that takes longer than any
# step does is of an engine that has failed, and the others go on without it.
STOP_SECONDS = 1.0
_STOPPING, _STOPPED, _OVER = range(1, 4)
_POINTS = {Step.STOP: _STOPPING, Step.START: _STOPPED}


class Convoy:
    """`samples` by name. `name`: what their destinations know it by."""

    def __init__(self, name: str, samples: Iterable[str]) -> None:
        self.name = name
        self._reached = dict.fromkeys(samples, 0)
        self._changed = asyncio.Event()

    async def before(self, move: Move) -> None:
        """Wait for the others, where the next step of a move is one to be taken together."""
        point = _POINTS.get(move.step) if move.step is not None else None
        if point is None:
            return
        self._reach(move.sample, point)
        try:
            async with asyncio.timeout(STOP_SECONDS if point == _STOPPED else None):
                while min(self._reached.values()) < point:
                    await self._changed.wait()
        except TimeoutError:
            return

    def leave(self, sample: str) -> None:
        """Its move is over, or was refused."""
        self._reach(sample, _OVER)

    def _reach(self, sample: str, point: int) -> None:
        self._reached[sample] = max(self._reached[sample], point)
        self._changed.set()
        self._changed = asyncio.Event()
