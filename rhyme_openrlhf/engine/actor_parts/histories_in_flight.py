"""Which prompts and rounds an engine is answering, and so which draft indexes its scheduler holds.

A conversation's rounds have a history each (prompt_keys.py). That of the first is fetched when the prompt arrives, that
of a later one when the first of the prompt's samples gets there. Invariants: an index is fetched once however many
samples want it, and forgotten when the prompt's last call has ended; a fetch that is not over by then is given up.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from rhyme_openrlhf.engine.actor_parts.history_feed import HistoryFeed
from rhyme_openrlhf.prompt_keys import round_key


class HistoriesInFlight:
    """The histories of one engine's running samples. Used from one event loop."""

    def __init__(self, feed: HistoryFeed) -> None:
        self._feed = feed
        self._calls: Counter[str] = Counter()
        self._fetches: dict[str, dict[int, asyncio.Task[None]]] = {}

    def begin(self, key: str) -> asyncio.Task[None]:
        """A call for the samples of prompt `key` begins; returns the fetch of its first round's index."""
        self._calls[key] += 1
        return self._fetch(key, 0)

    def round(self, key: str, number: int) -> tuple[str, asyncio.Task[None] | None]:
        """The key of round `number` (from 0), which a sample of prompt `key` begins, and the fetch of its index.

        For a request outside of a call (a check of ours) nothing is fetched.
        """
        return round_key(key, number), self._fetch(key, number) if key in self._calls else None

    def _fetch(self, key: str, number: int) -> asyncio.Task[None]:
        fetches = self._fetches.setdefault(key, {})
        if number not in fetches:
            fetches[number] = asyncio.create_task(self._feed.install(round_key(key, number)))
        return fetches[number]

    async def end(self, key: str) -> None:
        """A call for prompt `key` has ended."""
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
                await self._feed.forget(round_key(key, number))
