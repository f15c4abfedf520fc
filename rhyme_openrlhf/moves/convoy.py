"""Moves that go together, to engines on the same devices as those that they come from.

While some samples run at one of them and some at the other, both are slow. So none is stopped before all can be, and
their destination is told of no stop before all have been made: it begins with all of them in one step. Where the
devices hold the KV cache of one layout only, that is handed over in between (`between`).

Invariants: whoever is over, or never began, is waited for no more; nobody waits longer for a stop than STOP_SECONDS;
`between` is done once, after the stops and before the first start, and if it fails none is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from rhyme_openrlhf.scheduling.move import Move, Step

# Samples that are stopped generate nothing. A stop is made within a step of its engine; one that takes longer than any
# step does is of an engine that has failed, and the others go on without it.
STOP_SECONDS = 1.0
_STOPPING, _STOPPED, _OVER = range(1, 4)
_POINTS = {Step.STOP: _STOPPING, Step.START: _STOPPED}


class Convoy:
    """`samples` by name. `name`: what their destinations know it by. `between`: "" or why none can be started."""

    def __init__(self, name: str, samples: Iterable[str], between: Callable[[], Awaitable[str]] | None = None) -> None:
        self.name = name
        self._reached = dict.fromkeys(samples, 0)
        self._changed = asyncio.Event()
        self._between = between
        self._handing: asyncio.Future[str] | None = None

    @property
    def in_turns(self) -> bool:
        """Whether source and destination never have their KV caches at once."""
        return self._between is not None

    async def before(self, move: Move) -> str:
        """Wait for the others, where the next step of a move is one to be taken together; "" or why it cannot be."""
        point = _POINTS.get(move.step) if move.step is not None else None
        if point is None:
            return ""
        self._reach(move.sample, point)
        try:
            async with asyncio.timeout(STOP_SECONDS if point == _STOPPED else None):
                while min(self._reached.values()) < point:
                    await self._changed.wait()
        except TimeoutError:
            pass
        if point < _STOPPED or self._between is None:
            return ""
        if self._handing is None:
            self._handing = asyncio.ensure_future(self._between())
        # One that is aborted meanwhile does not end it for the others.
        return await asyncio.shield(self._handing)

    def leave(self, sample: str) -> None:
        """Its move is over, or was refused."""
        self._reach(sample, _OVER)

    def _reach(self, sample: str, point: int) -> None:
        self._reached[sample] = max(self._reached[sample], point)
        self._changed.set()
        self._changed = asyncio.Event()
