"""Limits on clients: token buckets with bounded memory, counted slots, and memory for incoming bodies.

Invariants:

- A bucket admits at most `burst` requests plus `rate` per second.
- At most `capacity` buckets are kept. Dropping one (the longest unused) at most gives its owner a full bucket again.
- Buckets and slots are thread-safe.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rhyme_openrlhf.api.http.problems import retry_later
from rhyme_openrlhf.api.settings import ServeSettings

# Most remembered addresses and tokens: about 1 MB. An attacker needs that many addresses to overflow it.
BUCKETS = 10_000
# Imports at once. Each takes as long as a run's events need, so reporters' batches have slots of their own.
IMPORTS = 2
# Simulations of other engines at once, which viewers may ask for.
SIMULATIONS = 2
# Part of the live streams that one token may have: more than any person's pages need.
SHARE = 4
# Retry delay when all slots are taken: a batch takes tens of milliseconds.
SLOT_RETRY_S = 1.0


class RateLimit:
    """Token buckets by key."""

    def __init__(
        self, rate: float, burst: float, capacity: int = BUCKETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Admit `rate` requests per second, and at most `burst` at once."""
        self._rate = rate
        self._burst = burst
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one token and return 0.0, or take none and return the seconds until there is one."""
        with self._lock:
            left = self._left(key)
            wait = 0.0 if left >= 1 else (1 - left) / self._rate
            self._keep(key, left - 1 if left >= 1 else left)
        return wait

    def wait(self, key: str) -> float:
        """Return the same seconds as `take` would, without taking a token."""
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
    """A fixed number of slots without a queue; a client that finds none has to retry."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._lock = threading.Lock()
        self.taken = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot. Raises ProblemError (503 with Retry-After) if none is free."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Take a slot, which `release` gives back. Raises ProblemError if none is free."""
        with self._lock:
            self.check()
            self.taken += 1

    def check(self) -> None:
        """Raise ProblemError if no slot is free."""
        if self.taken >= self._count:
            raise retry_later(503, f"{self._count} {self._what} are open already: try again", SLOT_RETRY_S)

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            self.taken -= 1


class SharedSlots:
    """Slots of which one key (a token) may hold a quarter, so that it cannot take them all."""

    def __init__(self, count: int, what: str) -> None:
        self.all = Slots(count, what)
        self._each = max(1, count // SHARE)
        self._what = what
        self._lock = threading.Lock()
        self._taken: Counter[Hashable] = Counter()

    @property
    def taken(self) -> int:
        """The number of slots of all keys that are taken."""
        return self.all.taken

    def acquire(self, key: Hashable) -> None:
        """Take a slot, which `release` gives back. Raises ProblemError if none is free, or none for this key."""
        with self._lock:
            if self._taken[key] >= self._each:
                raise retry_later(503, f"{self._each} {self._what} of this token are open already", SLOT_RETRY_S)
            self.all.acquire()
            self._taken[key] += 1

    def release(self, key: Hashable) -> None:
        """Give a slot back."""
        with self._lock:
            self.all.release()
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]


@dataclass(eq=False)
class ComingBody:
    """An incomplete request body; `deadline` is a time of the event loop."""

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
    """The memory shared by all incoming bodies; the oldest body is evicted for newer ones, so stuck bodies block none.

    Only one event loop uses it, so it needs no lock.
    """

    def __init__(self, limit: int) -> None:
        """Set the limit in bytes."""
        self._limit = limit
        self._coming: dict[ComingBody, None] = {}
        self.size = 0

    def enter(self, deadline: float) -> ComingBody:
        """Count a new body."""
        body = ComingBody(deadline)
        self._coming[body] = None
        return body

    def grow(self, body: ComingBody, size: int) -> None:
        """Count `size` more bytes of a body; evict the oldest bodies while the total is above the limit."""
        body.size += size
        self.size += size
        while self.size > self._limit and self._coming:
            oldest = next(iter(self._coming))
            self.leave(oldest)
            oldest.evict()

    def leave(self, body: ComingBody) -> None:
        """Stop counting a body that is complete or no longer read."""
        if body in self._coming:
            del self._coming[body]
            self.size -= body.size


@dataclass(frozen=True)
class Limits:
    """All limits of one service."""

    requests: RateLimit
    sign_ins: RateLimit
    # Apart from wrong secrets, so that neither stops the other.
    provider_sign_ins: RateLimit
    batches: Slots
    imports: Slots
    streams: SharedSlots
    # Each keeps a processor busy for seconds.
    simulations: Slots

    @classmethod
    def of(cls, settings: ServeSettings) -> Limits:
        per_minute = settings.sign_ins_per_minute
        return cls(
            requests=RateLimit(settings.requests_per_second, settings.request_burst),
            sign_ins=RateLimit(per_minute / 60, max(1.0, per_minute)),
            provider_sign_ins=RateLimit(per_minute / 60, max(1.0, per_minute)),
            batches=Slots(settings.batches_in_flight, "batches of events"),
            imports=Slots(IMPORTS, "imports"),
            simulations=Slots(SIMULATIONS, "simulations"),
            streams=SharedSlots(settings.streams, "live streams"),
        )
