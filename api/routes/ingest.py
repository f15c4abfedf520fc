"""Routes for reporters: announcement of an attempt, and batches of its events.

The response says whether the run should stop.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.access.service import ServiceDep
from rhyme_openrlhf.api.http.problems import FieldError, ProblemError, documented, retry_later
from rhyme_openrlhf.api.ingest.announce import (
    Announcement,
    AnnouncementConflictError,
    AnnouncementError,
    ForeignRunError,
    Sender,
    announce,
)
from rhyme_openrlhf.api.ingest.decoding import UNPACKED_RATIO, EncodingError, FormError, TooLargeError
from rhyme_openrlhf.api.ingest.store_batch import UnknownAttemptError
from rhyme_openrlhf.api.ingest.validation import BadEventError
from rhyme_openrlhf.api.ingest.workers import RESTART_RETRY_S, IngestionInterruptedError, Sent
from rhyme_openrlhf.api.settings import MEGABYTE
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.bounds import NO_NUL, Body, Name, UidText
from rhyme_openrlhf.api.store.json_values import JsonObject
from rhyme_openrlhf.api.store.models import UID_LENGTH
from rhyme_openrlhf.api.store.races import again_if_raced

router = APIRouter(
    prefix="/ingest/attempts/{uid}", tags=["ingest"], responses=documented(401, 403, 409, 413, 415, 422, 429, 503)
)

AttemptUid = Annotated[str, Path(alias="uid", pattern=rf"^[0-9a-f]{{{UID_LENGTH}}}$", examples=["9f8e7d6c5b4a3928"])]

# Reporters read 64 KiB of a response.
RECEIPT_BYTES = 60_000

_EXAMPLE = {
    "sent_at": 1760000001.0,
    "dropped": {},
    "known": {"driver": 0},
    "heartbeat": {"alive": True},
    "events": [
        {"kind": "note", "time": 1760000000.0, "source": "driver", "sequence": 0, "level": "info", "text": "starting"}
    ],
}
_BATCH: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "example": _EXAMPLE,
                "schema": {
                    "type": "object",
                    "required": ["events"],
                    "properties": {
                        "sent_at": {"type": "number", "nullable": True},
                        "dropped": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
                        "heartbeat": {"type": "object", "properties": {"alive": {"type": "boolean"}}},
                        "known": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
                        "events": {"type": "array", "items": {"type": "object"}},
                    },
                },
            }
        },
    }
}


class AnnouncementBody(Body):
    """The identity of an attempt."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "run": "0f3a5b7c9d1e2f40",
                    "name": "math-7b",
                    "run_directory": "/home/me/runs/20251009-math-7b",
                    "config": {"command": ["rhyme", "train"], "settings": {"histospec": {"enable": True}}},
                }
            ]
        }
    )

    run: UidText = Field(description="The run's uid, created at its start.")
    name: Name
    run_directory: Annotated[str, Field(max_length=4096, pattern=NO_NUL)]
    config: JsonObject = Field(description="The content of the run directory's config.json.")


class Announced(BaseModel):
    """The run and attempt as stored."""

    run: str
    attempt: int = Field(description="Number of the attempt.")


class BatchReceipt(BaseModel):
    """The result of a batch; `stop`: the run is asked to end."""

    accepted: int
    duplicates: int
    stop: bool
    next: dict[str, int] = Field(
        description="The next sequence number that the service expects from each source: the sources that the batch "
        "names, or all if it names none. If it is below the batch's `known`, the service has lost events and has not "
        "stored the batch: send the events again from there."
    )


@router.put("", summary="Announce an attempt")
def put_attempt(uid: AttemptUid, body: AnnouncementBody, who: auth.Reporter, service: ServiceDep) -> Announced:
    """Announce run and attempt; repeating it changes nothing."""

    def store() -> Announced:
        with service.database.writing() as session:
            attempt = announce(session, announcement, time.time(), _sender(who))
            return Announced(run=body.run, attempt=attempt.number)

    try:
        announcement = Announcement(uid, body.run, body.name, body.run_directory, body.config)
        return again_if_raced(store)
    except AnnouncementError as error:
        raise ProblemError(422, str(error)) from error
    except ForeignRunError as error:
        raise ProblemError(403, str(error), code="foreign_run") from error
    except AnnouncementConflictError as error:
        raise ProblemError(409, str(error)) from error


@router.post("/batches", summary="Send events", openapi_extra=_BATCH)
async def post_batch(uid: AttemptUid, request: Request, who: auth.Reporter, service: ServiceDep) -> BatchReceipt:
    """Store a batch of an attempt's events, in order per source, or refuse it as a whole.

    An empty batch is a heartbeat.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ProblemError(415, "a batch is application/json")
    limits = service.limits.batches
    # Refused before the body is sent, so that it is not sent twice. A body that is being received holds no slot,
    # because a stuck one would block others.
    limits.check()
    body = await request.body()
    with limits.one():
        service.metrics.batches_in_flight.inc()
        began = time.perf_counter()
        outcome = "refused"
        try:
            encoding = request.headers.get("content-encoding")
            limit = int(service.settings.batch_mb * MEGABYTE * UNPACKED_RATIO)
            with _as_problem():
                run_id, receipt = await service.intake(Sent(uid, body, encoding, limit, _sender(who)))
            outcome = "stored"
        finally:
            service.metrics.batches_in_flight.dec()
            service.metrics.batches.labels(outcome).inc()
            service.metrics.batch_seconds.observe(time.perf_counter() - began)
    service.news.publish(run_id)
    service.metrics.events.inc(receipt.accepted)
    service.metrics.duplicates.inc(receipt.duplicates)
    return BatchReceipt(
        accepted=receipt.accepted, duplicates=receipt.duplicates, stop=receipt.stop, next=_short(receipt.following)
    )


@contextlib.contextmanager
def _as_problem() -> Iterator[None]:
    """Convert refusals of the ingestion to problems."""
    try:
        yield
    except EncodingError as error:
        raise ProblemError(415, str(error)) from error
    except TooLargeError as error:
        raise ProblemError(413, str(error)) from error
    except FormError as error:
        errors = [FieldError(field=error.field, message=error.fault)] if error.field else None
        raise ProblemError(422, str(error), errors=errors) from error
    except BadEventError as error:
        errors = [FieldError(field=f"body.events[{error.position}]", message=str(error))]
        raise ProblemError(422, "the batch has an invalid event", code="invalid_event", errors=errors) from error
    except UnknownAttemptError as error:
        raise ProblemError(409, str(error), code="attempt_unknown") from error
    except ForeignRunError as error:
        raise ProblemError(403, str(error), code="foreign_run") from error
    except IngestionInterruptedError as error:
        raise retry_later(503, str(error), RESTART_RETRY_S) from error


def _sender(who: credentials.Principal) -> Sender:
    return Sender(who.token_id, who.run_id, who.role == "operator")


def _short(following: Mapping[str, int]) -> dict[str, int]:
    """Return as many sources as fit into the part of a response that reporters read.

    These are all sources, except for a huge cluster.
    """
    sizes = itertools.accumulate(len(json.dumps([source, count])) for source, count in following.items())
    return {source: following[source] for source, size in zip(following, sizes, strict=True) if size <= RECEIPT_BYTES}
