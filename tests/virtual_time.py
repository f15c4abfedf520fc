"""An event loop whose clock jumps to the next timer: tests of fakes take no longer than their computing.

Invariants: callbacks run in the order of their times, as on a real loop; nothing runs in another thread, because a
thread's answer would come after the jump. A coroutine that waits for ever fails at its own time limit, at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves its clock on instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, *arguments: Any) -> Any:
        raise AssertionError("virtual time goes on while a thread works: use asyncio.run")


def run(main: Coroutine[Any, Any, Answer], limit_s: float) -> Answer:
    """Run `main` in virtual time; raise TimeoutError if it has not ended after `limit_s` virtual seconds."""

    async def limited() -> Answer:
        async with asyncio.timeout(limit_s):
            return await main

    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(limited())
