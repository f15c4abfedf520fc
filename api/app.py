"""The app: store, middlewares, routes and background work, started in this order and stopped in reverse.

`create_app` has no lasting effects. The lifespan opens and upgrades the database, and creates a sign-in code.
"""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import BaseRoute

from rhyme_openrlhf import __version__
from rhyme_openrlhf.api.access.audit import AuditLog
from rhyme_openrlhf.api.access.service import Background, Service, webhook_deliveries
from rhyme_openrlhf.api.http import problems
from rhyme_openrlhf.api.http.fields import PREFIX, query_parameters, refuse_unknown
from rhyme_openrlhf.api.http.guard import (
    BodyLimit,
    ForwardedClient,
    HeadAsGet,
    HostGuard,
    RateGuard,
    RequestMetrics,
    SecurityHeaders,
)
from rhyme_openrlhf.api.http.limits import Limits, RateLimit
from rhyme_openrlhf.api.http.service_metrics import ServiceMetrics
from rhyme_openrlhf.api.live.streams import LiveLooks
from rhyme_openrlhf.api.routes import audit as audit_routes
from rhyme_openrlhf.api.routes import (
    events,
    experiments,
    exports,
    health,
    imports,
    ingest,
    launch,
    logs,
    openapi,
    openid,
    queue,
    right_size,
    run_files,
    runs,
    sample_groups,
    sample_records,
    saved_views,
    series,
    sign_in,
    steps,
    sweeps,
    system,
    webhooks,
)
from rhyme_openrlhf.api.routes import tokens as token_routes
from rhyme_openrlhf.api.settings import MEGABYTE, OpenIdSettings, ServeSettings
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.database import Database

# Routers of all resources.
ROUTERS: tuple[APIRouter, ...] = (
    sign_in.router,
    openid.router,
    token_routes.router,
    audit_routes.router,
    webhooks.router,
    experiments.router,
    runs.router,
    saved_views.router,
    launch.router,
    queue.router,
    sweeps.router,
    steps.router,
    series.router,
    system.router,
    events.router,
    logs.router,
    sample_records.router,
    sample_groups.router,
    right_size.router,
    run_files.router,
    exports.router,
    ingest.router,
    imports.router,
    events.live,
    openapi.router,
)
# Smaller responses fit into one packet anyway. Higher levels take longer and save 2 %.
COMPRESSED_FROM, COMPRESSION_LEVEL = 1024, 6
# Background work, entered in this order and left in reverse.
BACKGROUND: tuple[Background, ...] = (webhook_deliveries,)


def create_app(
    settings: ServeSettings,
    *,
    background: Sequence[Background] = BACKGROUND,
    show_link: Callable[[str], None] | None = None,
    openid_settings: OpenIdSettings | None = None,
) -> FastAPI:
    """Return the app. At its start, it gives `show_link` a new sign-in code, which is printed as a link.

    Raises DatabaseError for an invalid database URL, and SettingsError if the provider's client secret cannot be read.
    """
    database = Database(settings.database_url())
    metrics = ServiceMetrics()
    limits = Limits.of(settings)
    service = Service(settings=settings, database=database, limits=limits, metrics=metrics)
    if openid_settings is not None and openid_settings.issuer:
        from rhyme_openrlhf.api.access.openid import Provider

        service.openid = Provider(openid_settings)
    service.live = LiveLooks(database, service.news, settings.live_poll_s)
    metrics.watch(database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(database.dispose)
            stack.callback(service.ending.set)
            await run_in_threadpool(_open, service, show_link)
            for one in background:
                await stack.enter_async_context(one(service))
            yield

    app = FastAPI(
        title="rhyme-openrlhf",
        version=__version__,
        lifespan=lifespan,
        # The description has a route of its own, for readers only. FastAPI's own pages would need foreign scripts.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would respond without checking the token.
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.templates = {**templates(ROUTERS, PREFIX), **templates((health.router,))}
    app.state.query_parameters = _query_parameters()
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    problems.install(app)
    app.router.routes.extend(routes())
    # The middleware added last is the outermost.
    by_endpoint = {route.endpoint: route for route in _api_routes(ROUTERS)}
    app.add_middleware(AuditLog, database=database, routes=by_endpoint, prefix=PREFIX)
    # It leaves live streams alone. Compressed pages reveal no CSRF token, because the session's cookie is
    # SameSite=Strict: another site cannot request pages with it.
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_FROM, compresslevel=COMPRESSION_LEVEL)
    batch_limit = int(settings.batch_mb * MEGABYTE)
    app.add_middleware(
        BodyLimit,
        limit=int(settings.body_mb * MEGABYTE),
        batch_limit=batch_limit,
        seconds=settings.body_seconds,
        # As much memory as all batches in flight may need.
        room=batch_limit * settings.batches_in_flight,
    )
    app.add_middleware(RateGuard, limit=RateLimit(settings.requests_per_second, settings.request_burst))
    app.add_middleware(HostGuard, names=settings.host_names())
    app.add_middleware(SecurityHeaders, tls=settings.tls)
    app.add_middleware(RequestMetrics, metrics=metrics, templates=app.state.templates)
    app.add_middleware(ForwardedClient, proxies=settings.proxies())
    app.add_middleware(HeadAsGet)
    return app


@functools.cache
def routes() -> tuple[BaseRoute, ...]:
    """Return the routes of every service of this process.

    The result is cached, because FastAPI parses the routes' signatures here, which takes longer than the rest of
    `create_app`.
    """
    # Operations are named as their functions: `start_run` instead of `start_run_api_v1_runs_post`.
    all_of_them = APIRouter(generate_unique_id_function=lambda route: route.name)
    for router in ROUTERS:
        all_of_them.include_router(router, prefix=PREFIX, dependencies=[Depends(refuse_unknown)])
    all_of_them.include_router(health.router)
    return tuple(all_of_them.routes)


@functools.cache
def _query_parameters() -> dict[Callable[..., Any], frozenset[str]]:
    """Return the names of each endpoint's query parameters; the same, and cached, for every service of this process."""
    return query_parameters(ROUTERS)


def templates(routers: Iterable[APIRouter], prefix: str = "") -> dict[Any, str]:
    """Return the path template of each endpoint, e.g. `/api/v1/runs/{uid}`.

    The templates come from the routers, not from the app. Newer releases of FastAPI keep an included router as one
    object in `app.routes`, and name its routes without the prefix.
    """
    return {route.endpoint: prefix + route.path for route in _api_routes(routers)}


def _api_routes(routers: Iterable[APIRouter]) -> Iterator[APIRoute]:
    return (route for router in routers for route in router.routes if isinstance(route, APIRoute))


def _open(service: Service, show_link: Callable[[str], None] | None) -> None:
    """Upgrade the store, and create a sign-in code."""
    service.database.open()
    if show_link is None:
        return
    with service.database.writing() as session:
        now = time.time()
        first = credentials.nobody_gets_in(session, now)
        code = credentials.issue_code(
            session, now, credentials.FIRST_CODE_SECONDS if first else credentials.CODE_SECONDS
        )
    # Shown only after the code is stored.
    show_link(code)
