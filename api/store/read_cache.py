"""A cache of values that were just read from the store.

Invariants: a value is returned for at most `seconds` after `put`. After `forget`, no earlier value is returned, also
none that was being read at that time. At most `capacity` values are kept. The cache is thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Fresh(Generic[V]):
    """Cached values by key."""

    def __init__(self, seconds: float, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._capacity, self._clock = seconds, capacity, clock
        self._lock = threading.Lock()
        self._values: dict[Hashable, tuple[float, V]] = {}
        self._forgotten = 0

    def get(self, key: Hashable) -> V | None:
        """Return the value if it is cached and fresh."""
        with self._lock:
            found = self._values.get(key)
        if found is None or self._clock() - found[0] >= self._seconds:
            return None
        return found[1]

    def before_reading(self) -> int:
        """Return the argument `before` for `put`; called before the value is read from the store."""
        return self._forgotten

    def put(self, key: Hashable, value: V, before: int) -> None:
        """Cache a value, unless `forget` was called since `before`."""
        with self._lock:
            if before != self._forgotten:
                return
            if len(self._values) >= self._capacity:
                self._values.clear()
            self._values[key] = (self._clock(), value)

    def forget(self) -> None:
        """Drop all values; called after a change is committed."""
        with self._lock:
            self._forgotten += 1
            self._values.clear()
