"""Brings draft indexes of the prompts that an engine answers from history workers into its engine core.

The engine core is no Ray worker, so an index goes through a file on tmpfs that the core maps. The file is removed as
soon as it is mapped; after a kill in between, the next engine on the node removes it. Each round of a conversation has
its own history (prompt_keys.py). The first round's is fetched when the prompt arrives, a later one's when the prompt's
first sample gets there.

Invariants:
- An index is fetched once however many samples want it, and forgotten when the prompt's last call has ended. A fetch
  that is still running then is given up.
- No failure here reaches a sample; its prompt only has no drafts.
- A failing worker is noted at its first failure, and again only after it has answered.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from typing import Any

import numpy as np
import ray.exceptions

from rhyme_openrlhf.engine.calls import Caller, SchedulerDrafting
from rhyme_openrlhf.engine_errors import first_line
from rhyme_openrlhf.prompt_keys import owner, round_key
from rhyme_openrlhf.shared_files import SHARED_MEMORY, OwnedFiles

PREFIX = "rhyme-index"
# More would say the same again.
KEPT_PROBLEMS = 20


class HistoryFeed:
    """Installs and forgets draft indexes of one engine."""

    def __init__(self, workers: list[Any], scheduler: Caller, timeout_s: float) -> None:
        self._workers = workers
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._installed: set[str] = set()
        self._problems: list[str] = []
        self._failing: set[int] = set()
        self._files = OwnedFiles(PREFIX)

    async def install(self, key: str) -> None:
        """Fetch the index of `key` (a prompt's or round's) and hand it to the scheduler, if there is one."""
        if not self._workers or key in self._installed:
            return
        number = owner(key, len(self._workers))
        try:
            buffer = await asyncio.wait_for(self._ask(number, key), self._timeout_s)
        except TimeoutError:
            self._fails(number, f"did not answer within {self._timeout_s:g} s")
            return
        except ray.exceptions.RayError as error:
            self._fails(number, f"failed: {first_line(error)}")
            return
        self._failing.discard(number)
        if buffer is not None:
            # Marked first: if this call is cancelled half-way, `forget` still drops what the scheduler may have got.
            self._installed.add(key)
            refused = await self.hand_over(key, buffer)
            if refused:
                self._note(refused)

    def _fails(self, number: int, how: str) -> None:
        if number not in self._failing:
            self._failing.add(number)
            self._note(f"history worker {number} {how}: its prompts go on without drafts from history")

    async def _ask(self, number: int, key: str) -> np.ndarray | None:
        return await self._workers[number].index.remote(key)

    async def hand_over(self, key: str, buffer: np.ndarray) -> str:
        """Give the scheduler the draft index of prompt `key`; return "" or one sentence that says why it has none."""
        try:
            path = self._files.make(uuid.uuid4().hex)
            try:
                with open(path, "wb") as file:
                    buffer.tofile(file)
                return await self._scheduler(SchedulerDrafting.install_history, key, path)
            finally:
                self._files.remove(path)
        except OSError as error:
            return f"draft index of {buffer.nbytes} bytes could not be written to {SHARED_MEMORY}: {error.strerror}"

    async def forget(self, key: str) -> None:
        """Drop the index of a prompt that has no sample left on this engine."""
        if key in self._installed:
            self._installed.discard(key)
            await self._scheduler(SchedulerDrafting.forget_history, key)

    def _note(self, problem: str) -> None:
        if len(self._problems) < KEPT_PROBLEMS:
            self._problems.append(problem)

    def take_problems(self) -> list[str]:
        """Return what went wrong since the last call, as sentences."""
        problems, self._problems = self._problems, []
        return problems


class Histories:
    """The histories of one engine's running samples. Used from one event loop."""

    def __init__(self, feed: HistoryFeed) -> None:
        self.feed = feed
        self._calls: Counter[str] = Counter()
        self._fetches: dict[str, dict[int, asyncio.Task[None]]] = {}

    def begin(self, key: str) -> asyncio.Task[None]:
        """Note a call for the samples of prompt `key`; return the fetch of its first round's index."""
        self._calls[key] += 1
        return self._fetch(key, 0)

    def round(self, key: str, number: int) -> tuple[str, asyncio.Task[None] | None]:
        """Return the key of round `number` (from 0), which a sample of prompt `key` begins, and its index's fetch.

        For a request outside of a call (a check of ours) nothing is fetched.
        """
        return round_key(key, number), self._fetch(key, number) if key in self._calls else None

    def _fetch(self, key: str, number: int) -> asyncio.Task[None]:
        fetches = self._fetches.setdefault(key, {})
        if number not in fetches:
            fetches[number] = asyncio.create_task(self.feed.install(round_key(key, number)))
        return fetches[number]

    async def end(self, key: str) -> None:
        """Note that a call for prompt `key` has ended."""
        self._calls[key] -= 1
        if self._calls[key]:
            return
        del self._calls[key]
        fetches = self._fetches.pop(key)
        for fetch in fetches.values():
            fetch.cancel()
        await asyncio.wait(fetches.values())
        for number in fetches:
            # The prompt may have come again meanwhile.
            if number not in self._fetches.get(key, {}):
                await self.feed.forget(round_key(key, number))
