"""The service: shared objects (settings, store, limits, metrics, news), and the processes that ingest batches.

Each FastAPI app has one `Service` at `app.state.service`; routes get it with `Depends(service)`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from rhyme_openrlhf.api.http.limits import Limits
from rhyme_openrlhf.api.http.service_metrics import ServiceMetrics
from rhyme_openrlhf.api.ingest.workers import WORKERS_POSTGRESQL, WORKERS_SQLITE, Intake, ThreadIntake, WorkerIntake
from rhyme_openrlhf.api.live.shared_polling import News
from rhyme_openrlhf.api.live.streams import LiveLooks
from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store.credentials import Principal
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.read_cache import Fresh
from rhyme_openrlhf.api.store.readiness import Writable
from rhyme_openrlhf.api.webhooks.deliveries import Deliveries
from rhyme_openrlhf.settings.control import new_uid

if TYPE_CHECKING:
    from rhyme_openrlhf.api.access.openid import Provider

# Seconds for which a caller stays cached. A page sends a dozen requests at once, each with the same token. This service
# forgets its own revocations at once; a revocation by another service on the database takes this long.
WHO_SECONDS = 1.0
# Most cached callers; each takes about 500 bytes.
WHO_KEPT = 1000


@dataclass
class Service:
    """Objects that live as long as the app. `uid`: this start of the service, unique on the database."""

    settings: ServeSettings
    database: Database
    limits: Limits
    metrics: ServiceMetrics
    news: News = field(default_factory=News)
    callers: Fresh[Principal] = field(default_factory=lambda: Fresh(WHO_SECONDS, WHO_KEPT))
    intake: Intake = field(init=False)
    uid: str = field(default_factory=new_uid)
    # Set when the service ends, for work in threads that takes longer than a request.
    ending: threading.Event = field(default_factory=threading.Event)
    # None: nobody signs in with an OpenID Connect provider.
    openid: Provider | None = None
    # Set by `create_app`.
    live: LiveLooks = field(init=False)
    writable: Writable = field(init=False)

    def __post_init__(self) -> None:
        self.intake = ThreadIntake(self.database)
        self.writable = Writable(self.database)


# Work beside the requests: a context entered when the database is ready, and left at shutdown.
Background = Callable[[Service], AbstractAsyncContextManager[None]]


async def service(request: Request) -> Service:
    """Return the service of this request (a dependency)."""
    found: Service = request.app.state.service
    return found


ServiceDep = Annotated[Service, Depends(service)]


@asynccontextmanager
async def worker_intake(service: Service) -> AsyncIterator[None]:
    """Ingest batches in worker processes while this context lasts."""
    workers = service.settings.ingest_workers
    if workers == 0:
        workers = WORKERS_SQLITE if service.database.is_sqlite else WORKERS_POSTGRESQL
    before, service.intake = service.intake, WorkerIntake(service.settings.database_url(), workers)
    started = service.intake
    try:
        yield
    finally:
        service.intake = before
        await run_in_threadpool(started.close)


@asynccontextmanager
async def webhook_deliveries(service: Service) -> AsyncIterator[None]:
    """Send messages of webhooks while this context lasts."""
    async with Deliveries(service.database, service.settings.webhooks_public_only).running():
        yield
