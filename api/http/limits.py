"""Who may ask how often, and how much at once: token buckets with bounded memory, counted slots, room for bodies.

Invariants: a bucket never lets more through than `burst` plus `rate` a second; no more than `capacity` buckets are
kept, and forgetting one (the longest unused) at most gives its owner a full bucket again. Buckets and slots are
thread-safe.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rhyme_openrlhf.api.http.problems import retry_later
from rhyme_openrlhf.api.settings import ServeSettings

# Addresses and tokens remembered at once: about 1 MB. Who wants to overflow it needs that many addresses.
BUCKETS = 10_000
# When to come again after finding all slots taken: a batch takes tens of milliseconds.
SLOT_RETRY_S = 1.0


class RateLimit:
    """Token buckets by key."""

    def __init__(
        self, rate: float, burst: float, capacity: int = BUCKETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rate` a second, at most `burst` at once."""
        self._rate = rate
        self._burst = burst
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one: 0.0 if it was there, else the seconds until it is (and nothing is taken)."""
        with self._lock:
            left = self._left(key)
            wait = 0.0 if left >= 1 else (1 - left) / self._rate
            self._keep(key, left - 1 if left >= 1 else left)
        return wait

    def wait(self, key: str) -> float:
        """What `take` would return, without taking."""
        with self._lock:
            left = self._left(key)
        return 0.0 if left >= 1 else (1 - left) / self._rate

    def __len__(self) -> int:
        return len(self._buckets)

    def _left(self, key: str) -> float:
        kept = self._buckets.get(key)
        if kept is None:
            return self._burst
        left, at = kept
        return min(self._burst, left + max(0.0, self._clock() - at) * self._rate)

    def _keep(self, key: str, left: float) -> None:
        self._buckets[key] = (left, self._clock())
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._capacity:
            self._buckets.popitem(last=False)


class Slots:
    """So many at once, and no queue: who finds none is told to come again."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._lock = threading.Lock()
        self.taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot. Raises ProblemError (503 with Retry-After) when none is free."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Take a slot, to be given back with `release`. Raises ProblemError when none is free."""
        with self._lock:
            self.check()
            self.taken += 1

    def check(self) -> None:
        """Raise ProblemError when no slot is free."""
        if self.taken >= self._count:
            raise retry_later(503, f"{self._count} {self._what} are open already: try again", SLOT_RETRY_S)

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            self.taken -= 1


@dataclass(eq=False)
class ComingBody:
    """A request's body of which a part is still to come; `deadline` is a time of the event loop."""

    deadline: float
    size: int = 0
    evicted: bool = False
    waiting: asyncio.Timeout | None = None

    def evict(self) -> None:
        """Make the task that reads this body give up."""
        self.evicted = True
        if self.waiting is not None and not self.waiting.expired():
            self.waiting.reschedule(-math.inf)


class BodyRoom:
    """The memory that all coming bodies share. The oldest body makes room for the others, so stuck bodies block nobody.

    One event loop uses it; no lock is needed.
    """

    def __init__(self, limit: int) -> None:
        """`limit` is in bytes."""
        self._limit = limit
        self._coming: dict[ComingBody, None] = {}
        self.size = 0

    def enter(self, deadline: float) -> ComingBody:
        """Count a new body."""
        body = ComingBody(deadline)
        self._coming[body] = None
        return body

    def grow(self, body: ComingBody, size: int) -> None:
        """Count `size` more bytes of a body; evict the oldest bodies while all of them are larger than the limit."""
        body.size += size
        self.size += size
        while self.size > self._limit and self._coming:
            oldest = next(iter(self._coming))
            self.leave(oldest)
            oldest.evict()

    def leave(self, body: ComingBody) -> None:
        """Count a body no longer: all of it is there, or nobody reads it."""
        if body in self._coming:
            del self._coming[body]
            self.size -= body.size


@dataclass(frozen=True)
class Limits:
    """All limits of one service."""

    requests: RateLimit
    sign_ins: RateLimit
    batches: Slots
    streams: Slots

    @classmethod
    def of(cls, settings: ServeSettings) -> Limits:
        return cls(
            requests=RateLimit(settings.requests_per_second, settings.request_burst),
            sign_ins=RateLimit(settings.sign_ins_per_minute / 60, max(1.0, settings.sign_ins_per_minute)),
            batches=Slots(settings.batches_in_flight, "batches of events"),
            streams=Slots(settings.streams, "live streams"),
        )
