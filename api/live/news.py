"""The news of events that this service has stored: wakes live streams at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


class News:
    """Wakes those who wait for events of a run. A hint only: whoever waits looks into the database anyway, later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, set[Callable[[], object]]] = {}

    def publish(self, run_id: int) -> None:
        """Events of this run were committed. Any thread may call it."""
        with self._lock:
            callbacks = list(self._waiting.get(run_id, ()))
        for callback in callbacks:
            callback()

    def subscribe(self, run_id: int, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback`, from any thread, at every publish; what is returned ends that."""
        with self._lock:
            self._waiting.setdefault(run_id, set()).add(callback)

        def unsubscribe() -> None:
            with self._lock:
                waiting = self._waiting.get(run_id, set())
                waiting.discard(callback)
                if not waiting:
                    self._waiting.pop(run_id, None)

        return unsubscribe
