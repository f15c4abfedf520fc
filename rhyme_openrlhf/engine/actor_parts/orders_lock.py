"""Orders about samples beside each other, one at a time of each sample; and what excludes them all, a weight load.

Invariant: whoever wants all gets it when the orders that have begun are over; those that come later wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class OrdersLock:
    """Of one engine; used from one event loop."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._all_held = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def of(self, place: str) -> AsyncIterator[None]:
        """For an order about the sample of this place."""
        await self._until(lambda: not self._all_held and place not in self._held)
        self._held.add(place)
        try:
            yield
        finally:
            self._held.discard(place)
            self._tell()

    @asynccontextmanager
    async def all(self) -> AsyncIterator[None]:
        """Without any order under way."""
        await self._until(lambda: not self._all_held)
        self._all_held = True
        try:
            await self._until(lambda: not self._held)
            yield
        finally:
            self._all_held = False
            self._tell()

    async def _until(self, free: Callable[[], bool]) -> None:
        # Nothing runs between an answer that it is free and what the caller then notes.
        while not free():
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
