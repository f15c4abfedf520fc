"""A queue of work for one thread, the most urgent first, and equally urgent work in the order it was given.

Invariant: the caller that gave work awaits its result or gets its exception. Cancelling the wait does not stop the
work.
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
    """The reason for a piece of work, the most urgent first."""

    ASKED = 0
    """An engine waits for it."""
    KEPT = 1
    """Responses arrived: they must not be lost, and later work must see them."""
    COMING = 2
    """A prompt was sent to an engine, which will ask."""
    LATER = 3
    """Nobody asks before the next epoch."""


class WorkQueue:
    """A queue that runs functions in one thread of its own, used from one event loop."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: asyncio.PriorityQueue[tuple[Urgency, int, Callable[[], Any], asyncio.Future[Any]]] = (
            asyncio.PriorityQueue()
        )
        self._numbers = itertools.count()
        self._worker: asyncio.Task[None] | None = None

    def give(self, urgency: Urgency, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `work`; return a future of its result or exception."""
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
