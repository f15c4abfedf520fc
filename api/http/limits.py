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
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
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
# One holder may have this part of the live streams: more than any person's pages need.
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

    @property
    def full(self) -> bool:
        """True if no slot is free."""
        return self.taken >= self._count

    def check(self) -> None:
        """Raise ProblemError if no slot is free."""
        if self.full:
            raise retry_later(503, f"{self._count} {self._what} are open already: try again", SLOT_RETRY_S)

    def release(self) -> None:
        """Give a slot back."""
        with self._lock:
            self.taken -= 1


@dataclass(eq=False)
class Place:
    """A slot that one holder has; `close` ends its use, on the event loop's thread."""

    holder: str
    close: Callable[[], None]


class SharedSlots:
    """Slots of which one holder (a token or session) has at most a quarter.

    When all are taken, a holder gets one of those of the holder who has most, unless that would only change who has
    more. So everyone has some, however many holders take all that they can.
    """

    def __init__(self, count: int, what: str) -> None:
        self.all = Slots(count, what)
        self._each = max(1, count // SHARE)
        self._what = what
        self._lock = threading.Lock()
        self._places: defaultdict[str, list[Place]] = defaultdict(list)

    @property
    def taken(self) -> int:
        """The number of slots of all holders that are taken."""
        return self.all.taken

    def acquire(self, holder: str, close: Callable[[], None]) -> Place:
        """Take a slot, which `release` gives back. Raises ProblemError if there is none for this holder."""
        with self._lock:
            mine = len(self._places.get(holder, ()))
            if mine >= self._each:
                raise retry_later(503, f"{self._each} {self._what} of this token are open already", SLOT_RETRY_S)
            most = max(self._places.values(), key=len, default=[])
            if self.all.full and len(most) > mine + 1:
                oldest = most[0]
                self._leave(oldest)
                oldest.close()
            self.all.acquire()
            place = Place(holder, close)
            self._places[holder].append(place)
        return place

    def release(self, place: Place) -> None:
        """Give a slot back, unless another holder has it already."""
        with self._lock:
            if place in self._places.get(place.holder, ()):
                self._leave(place)

    def _leave(self, place: Place) -> None:
        self.all.release()
        places = self._places[place.holder]
        places.remove(place)
        if not places:
            del self._places[place.holder]


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
