"""What the parts of one running service share: settings, store, limits, counts, and the news of events that came.

One `Service` a FastAPI app, at `app.state.service`; routes get it by `Depends(service)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from rhyme_openrlhf.api.http.limits import Limits
from rhyme_openrlhf.api.http.service_metrics import ServiceMetrics
from rhyme_openrlhf.api.ingest.workers import Intake, ThreadIntake
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.read_cache import Fresh
from rhyme_openrlhf.api.store.readiness import Writable
from rhyme_openrlhf.config import new_uid

if TYPE_CHECKING:
    from rhyme_openrlhf.api.access.auth import Principal
    from rhyme_openrlhf.api.live.streams import LiveLooks

# A page asks a dozen questions at once, each with the same token. What this service revokes is forgotten at once; what
# another one on the same database revokes closes this much later.
WHO_SECONDS = 1.0
# Tokens and sessions of which that is known at once: some 500 bytes each.
WHO_KEPT = 1000


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


@dataclass
class Service:
    """Everything that lives as long as the app. `uid`: this start of the service, among all on the database."""

    settings: ServeSettings
    database: Database
    limits: Limits
    metrics: ServiceMetrics
    news: News = field(default_factory=News)
    callers: Fresh[Principal] = field(default_factory=lambda: Fresh(WHO_SECONDS, WHO_KEPT))
    intake: Intake = field(init=False)
    uid: str = field(default_factory=new_uid)
    # Set by `create_app`.
    live: LiveLooks = field(init=False)
    writable: Writable = field(init=False)

    def __post_init__(self) -> None:
        self.intake = ThreadIntake(self.database)
        self.writable = Writable(self.database)


# Something that runs beside the requests: entered when the database is ready, left at shutdown.
Background = Callable[[Service], AbstractAsyncContextManager[None]]


async def service(request: Request) -> Service:
    """The service of this request (a dependency)."""
    found: Service = request.app.state.service
    return found


ServiceDep = Annotated[Service, Depends(service)]
