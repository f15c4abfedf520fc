"""Two ways to wake live streams: news of this service's own events, and one polling on behalf of many watchers.

A `SharedLook` reads the values of all watched keys at once, in one thread, and notifies each watcher when its key's
value has changed. A live stream waits on a `Sleeper` in between.

Invariants:

- Nothing is read without a watcher.
- A value that changes after `watch` began is reported.
- A failed query ends all its watchers, whose clients reconnect by themselves.

Everything but `News` belongs to one event loop; only `look` runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

logger = logging.getLogger(__name__)


class Sleeper:
    """The waiting state of one stream. It begins with a query that is due."""

    def __init__(self) -> None:
        self._due = asyncio.Event()
        self._due.set()
        self._over = False

    def wake(self) -> None:
        """Make the stream query again."""
        self._due.set()

    def end(self) -> None:
        """Make the stream end."""
        self._over = True
        self._due.set()

    async def look_due(self) -> bool:
        """Wait until a query is due; return False when the stream is over."""
        await self._due.wait()
        # Cleared before the query, so that an event stored during the query makes the next one due.
        self._due.clear()
        return not self._over


@dataclass(eq=False, frozen=True)
class _Watcher(Generic[V]):
    changed: Callable[[V], object]
    failed: Callable[[], object]


class SharedLook(Generic[K, V]):
    """The values of all watched keys, read again every `seconds`."""

    def __init__(self, look: Callable[[Set[K]], Mapping[K, V]], seconds: float) -> None:
        """Set `look`, which returns the value of each key that has one; it runs in a thread."""
        self.seconds = seconds
        self._look = look
        self._watchers: dict[K, set[_Watcher[V]]] = {}
        self._values: dict[K, V] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, key: K, changed: Callable[[V], object], failed: Callable[[], object]) -> Iterator[None]:
        """Call `changed` when the key's value changes, and `failed` when a query fails."""
        watcher = _Watcher(changed, failed)
        self._watchers.setdefault(key, set()).add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_looking())
        try:
            yield
        finally:
            self._forget(key, watcher)

    def value(self, key: K) -> V | None:
        """Return the value of the last query, None before the first one."""
        return self._values.get(key)

    def _forget(self, key: K, watcher: _Watcher[V]) -> None:
        watchers = self._watchers[key]
        watchers.discard(watcher)
        if not watchers:
            del self._watchers[key]
            self._values.pop(key, None)
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _keep_looking(self) -> None:
        while True:
            try:
                found = await run_sync(self._look, frozenset(self._watchers))
            except SQLAlchemyError as error:
                logger.warning("live streams end because the database does not respond: %s", type(error).__name__)
                for watcher in [one for watchers in self._watchers.values() for one in watchers]:
                    watcher.failed()
                return
            for key, value in found.items():
                self._tell(key, value)
            await asyncio.sleep(self.seconds)

    def _tell(self, key: K, value: V) -> None:
        # A key whose last watcher left during the query has no value to keep.
        if key not in self._watchers or (key in self._values and self._values[key] == value):
            return
        self._values[key] = value
        for watcher in list(self._watchers[key]):
            watcher.changed(value)


class News:
    """A registry that wakes streams waiting for events of a run. It is only a hint: streams poll the database
    anyway.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, set[Callable[[], object]]] = {}

    def publish(self, run_id: int) -> None:
        """Announce that events of this run were committed; thread-safe."""
        with self._lock:
            callbacks = list(self._waiting.get(run_id, ()))
        for callback in callbacks:
            callback()

    def subscribe(self, run_id: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback`, from any thread, at every publish; return a function that ends this."""
        with self._lock:
            self._waiting.setdefault(run_id, set()).add(callback)

        def unsubscribe() -> None:
            with self._lock:
                waiting = self._waiting.get(run_id, set())
                waiting.discard(callback)
                if not waiting:
                    self._waiting.pop(run_id, None)

        return unsubscribe
