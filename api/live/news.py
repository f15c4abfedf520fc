"""News of events that this service has stored; it wakes live streams at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
