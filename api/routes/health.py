"""Routes for machines: alive, ready, metrics. The first two are public and say nothing else."""

from __future__ import annotations

import logging
from typing import Literal

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.problems import ProblemError, documented
from rhyme_openrlhf.api.store.readiness import schema_is_current

router = APIRouter(tags=["health"])
logger = logging.getLogger(__name__)


class Health(BaseModel):
    """The healthy response; otherwise the response is a problem."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", summary="Alive")
async def healthz() -> Health:
    """Report that the process responds."""
    return Health()


@router.get("/readyz", responses=documented(503), summary="Ready")
def readyz(service: ServiceDep) -> Health:
    """Report that the database responds, has this version's schema, and has accepted a write within the last
    seconds.
    """
    try:
        current = schema_is_current(service.database)
    except SQLAlchemyError as error:
        logger.error("not ready: the database does not respond", exc_info=error)
        raise ProblemError(503, "the database does not respond", code="database_unavailable") from error
    if not current:
        raise ProblemError(503, "the database has another version's schema")
    if problem := service.writable.problem():
        raise ProblemError(503, problem)
    return Health()


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **documented(401, 403, 429, 503),
    },
    summary="Metrics",
)
def metrics(who: auth.Viewer, service: ServiceDep) -> Response:
    """Return counts of the service and the state of active runs for Prometheus (with a viewer's token)."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
