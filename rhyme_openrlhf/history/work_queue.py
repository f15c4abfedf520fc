"""One thread's work, most urgent first, given from an asyncio loop.

Invariants: one piece of work runs at a time; of those that wait, the most urgent starts first, and among equals the one
given first; whoever gave it awaits its result or gets its exception; cancelling the wait does not stop the work.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Urgency(enum.IntEnum):
    """Why something is done, the most urgent first."""

    ASKED = 0
    """An engine waits for it."""
    KEPT = 1
    """Responses arrived: they must not be lost, and what comes after must see them."""
    COMING = 2
    """A prompt was sent to an engine, which will ask."""
    LATER = 3
    """Nobody asks before the next epoch."""


class WorkQueue:
    """Runs functions in one thread of its own. Used from one event loop."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: asyncio.PriorityQueue[tuple[Urgency, int, Callable[[], Any], asyncio.Future[Any]]] = (
            asyncio.PriorityQueue()
        )
        self._numbers = itertools.count()
        self._worker: asyncio.Task[None] | None = None

    def give(self, urgency: Urgency, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work`; the future has what it returns or raises."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((urgency, next(self._numbers), work, done))
        if self._worker is None:
            self._worker = asyncio.create_task(self._run())
        return done

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            _, _, work, done = await self._waiting.get()
            running = loop.run_in_executor(self._thread, work)
            await asyncio.wait([running])
            if done.cancelled():
                continue
            error = running.exception()
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(running.result())
