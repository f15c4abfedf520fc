"""Every error of the API as problem details (RFC 9457): what routes raise, and what the store does not have.

Invariants: an answer with a status of 400 and above is `application/problem+json` and a `Problem`; one of 500 says
nothing about the inside (the log does); what a client sent is not repeated in it.
"""

from __future__ import annotations

import http
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from rhyme_openrlhf.api.http.security_headers import SECURITY_HEADERS
from rhyme_openrlhf.api.read.pagination import CursorError
from rhyme_openrlhf.api.store.database import BusyError
from rhyme_openrlhf.api.store.lookup import NotFoundError

MEDIA_TYPE = "application/problem+json"
# Seconds after which to come again when the database is away or locked: its own wait for a lock is over by then.
STORE_RETRY_S = 5
logger = logging.getLogger(__name__)


class FieldError(BaseModel):
    """What is wrong with one field of a request."""

    field: str = Field(description="Where: 'body.name', 'query.limit', ...", examples=["body.name"])
    message: str = Field(description="What, in one sentence.", examples=["Field required"])


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"type": "about:blank", "title": "Not Found", "status": 404, "detail": "there is no run 0f3a"}]
        }
    )

    type: str = Field(default="about:blank", description="Always about:blank: status and detail say it all.")
    title: str = Field(description="The status in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(default="", description="What is wrong with this request, in one sentence.")
    errors: list[FieldError] | None = Field(default=None, description="With 422: what is wrong, field by field.")


class ProblemError(Exception):
    """Raised by routes to answer with a problem: status, one sentence, and if need be fields and headers."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: Sequence[FieldError] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = list(errors) if errors is not None else None
        self.headers = dict(headers or {})


def retry_later(status: int, detail: str, seconds: float) -> ProblemError:
    """429 or 503: come again in `seconds` (rounded up to whole ones, as the header wants)."""
    return ProblemError(status, detail, headers={"Retry-After": str(max(1, -int(-seconds // 1)))})


def problem_body(status: int, detail: str, errors: Sequence[FieldError] | None = None) -> dict[str, Any]:
    """The JSON of a problem."""
    problem = Problem(
        title=http.HTTPStatus(status).phrase, status=status, detail=detail, errors=list(errors) if errors else None
    )
    return problem.model_dump(exclude_none=True)


def problem_response(
    status: int, detail: str, errors: Sequence[FieldError] | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A whole answer."""
    return JSONResponse(
        problem_body(status, detail, errors), status_code=status, headers=dict(headers or {}), media_type=MEDIA_TYPE
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a router's `responses` says of these statuses."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": http.HTTPStatus(status).phrase,
            "content": {
                MEDIA_TYPE: {
                    "schema": schema,
                    "example": {"type": "about:blank", "title": http.HTTPStatus(status).phrase, "status": status},
                }
            },
        }
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Answer every error of `app` with a problem."""

    async def on_problem(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ProblemError)
        return problem_response(error.status, error.detail, error.errors, error.headers)

    async def on_not_found(request: Request, error: Exception) -> JSONResponse:
        return problem_response(404, str(error))

    async def on_cursor(request: Request, error: Exception) -> JSONResponse:
        fields = [FieldError(field="query.cursor", message=str(error))]
        return problem_response(422, "the request does not have its form", fields)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem_response(error.status_code, str(error.detail), None, error.headers)

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fields = [FieldError(field=_where(entry["loc"]), message=str(entry["msg"])) for entry in error.errors()]
        return problem_response(422, "the request does not have its form", fields)

    async def on_store(request: Request, error: Exception) -> JSONResponse:
        logger.error("the database did not answer %s %s", request.method, request.url.path, exc_info=error)
        return problem_response(
            503, "the database does not answer: try again", headers={"Retry-After": str(STORE_RETRY_S)}
        )

    async def on_defect(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        # This answer is given outside of all middlewares.
        return problem_response(500, "the service failed; its log says why", headers=SECURITY_HEADERS)

    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(NotFoundError, on_not_found)
    app.add_exception_handler(CursorError, on_cursor)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    for away in (OperationalError, PoolTimeoutError, BusyError):
        app.add_exception_handler(away, on_store)
    app.add_exception_handler(Exception, on_defect)


def _where(location: Sequence[Any]) -> str:
    # A key that the client made up is part of the location: cut, since no name of ours is that long, and without the
    # lone surrogates that JSON can write and UTF-8 cannot.
    return ".".join(str(part)[:100] for part in location).encode("utf-8", "replace").decode("utf-8")
