"""What was read from the store a moment ago, and need not be asked again at once.

Invariants: a value is given for `seconds` after it was put, never longer; after `forget` none of before is given, also
not one that was being read meanwhile; no more than `capacity` values are kept. All of it is thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Fresh(Generic[V]):
    """Values by key."""

    def __init__(self, seconds: float, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._capacity, self._clock = seconds, capacity, clock
        self._lock = threading.Lock()
        self._values: dict[Hashable, tuple[float, V]] = {}
        self._forgotten = 0

    def get(self, key: Hashable) -> V | None:
        """The value, if it is there and fresh."""
        with self._lock:
            found = self._values.get(key)
        if found is None or self._clock() - found[0] >= self._seconds:
            return None
        return found[1]

    def before_reading(self) -> int:
        """For `put`: asked before the value is read from the store."""
        return self._forgotten

    def put(self, key: Hashable, value: V, before: int) -> None:
        """Keep what was read, unless `forget` was called since `before`."""
        with self._lock:
            if before != self._forgotten:
                return
            if len(self._values) >= self._capacity:
                self._values.clear()
            self._values[key] = (self._clock(), value)

    def forget(self) -> None:
        """Called after the change of what was read is committed."""
        with self._lock:
            self._forgotten += 1
            self._values.clear()
