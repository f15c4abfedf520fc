"""Brings a prompt's draft index from its history worker into the engine-core process.

The engine core is not a Ray worker, so the index goes through a file on tmpfs that it maps; the file is removed as
soon as it is mapped. Invariant: no failure here reaches the sample: it is noted, and the prompt has no drafts.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray.exceptions

from rhyme_openrlhf.history.keys import owner

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rhyme-index-"
# More would say the same again; the count of lost prompts is what matters then.
KEPT_PROBLEMS = 20


class HistoryFeed:
    """Installs and forgets draft indexes of one engine."""

    def __init__(self, workers: list[Any], call_scheduler: Callable[..., Awaitable[Any]], timeout_s: float) -> None:
        self._workers = workers
        self._call_scheduler = call_scheduler
        self._timeout_s = timeout_s
        self._installed: set[str] = set()
        self._problems: list[str] = []

    async def install(self, key: str) -> None:
        """Fetch the index of prompt `key` and hand it to the scheduler, unless it is there or there is none."""
        if not self._workers or key in self._installed:
            return
        number = owner(key, len(self._workers))
        try:
            buffer = await asyncio.wait_for(self._ask(number, key), self._timeout_s)
        except TimeoutError:
            self._note(f"history worker {number} did not answer within {self._timeout_s:g} s")
            return
        except ray.exceptions.RayError as error:
            self._note(f"history worker {number} failed: {str(error).splitlines()[0]}")
            return
        if buffer is not None:
            # Marked first: if this call is cancelled half-way, `forget` still drops what the scheduler may have got.
            self._installed.add(key)
            refused = await self.hand_over(key, buffer)
            if refused:
                self._note(refused)

    async def _ask(self, number: int, key: str) -> np.ndarray | None:
        return await self._workers[number].index.remote(key)

    async def hand_over(self, key: str, buffer: np.ndarray) -> str:
        """Give the scheduler the draft index of prompt `key`; returns "" or one sentence that says why it has none."""
        descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=SHARED_MEMORY)
        try:
            with os.fdopen(descriptor, "wb") as file:
                buffer.tofile(file)
            return await self._call_scheduler("install_history", key, path)
        except OSError as error:
            return f"draft index of {buffer.nbytes} bytes could not be written to {SHARED_MEMORY}: {error.strerror}"
        finally:
            Path(path).unlink(missing_ok=True)

    async def forget(self, key: str) -> None:
        """Drop the index of a prompt that has no sample left on this engine."""
        if key in self._installed:
            self._installed.discard(key)
            await self._call_scheduler("forget_history", key)

    def _note(self, problem: str) -> None:
        if len(self._problems) < KEPT_PROBLEMS:
            self._problems.append(problem)

    def take_problems(self) -> list[str]:
        """What went wrong since the last call, as sentences."""
        problems, self._problems = self._problems, []
        return problems
