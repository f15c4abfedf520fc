"""Errors of the API as problem details (RFC 9457).

Invariants: every response with a status of 400 or more is an `application/problem+json` with a `Problem`. A response
with status 500 reveals no internals, which are in the log. No response repeats the client's input.
"""

from __future__ import annotations

import http
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm.exc import StaleDataError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rhyme_openrlhf.api.http.security_headers import SECURITY_HEADERS
from rhyme_openrlhf.api.read.pagination import CursorError
from rhyme_openrlhf.api.read.run_query import QueryError
from rhyme_openrlhf.api.store.database import BusyError
from rhyme_openrlhf.api.store.lookup import NotFoundError
from rhyme_openrlhf.api.store.races import is_race

MEDIA_TYPE = "application/problem+json"
# Retry delay in seconds when the database is away or locked; the database's own wait for a lock is over by then.
STORE_RETRY_S = 5
logger = logging.getLogger(__name__)

# What a program can decide by. The first of a status is used where a route names none.
Code = Literal[
    "bad_request", "wrong_host",
    "unauthorized",
    "forbidden", "foreign_origin", "csrf_token_missing", "foreign_run",
    "not_found",
    "method_not_allowed",
    "body_too_slow",
    "wrong_state", "name_taken", "idempotency_key_reused", "no_cluster", "attempt_unknown",
    "changed_meanwhile",
    "body_too_large",
    "unsupported_media_type",
    "invalid_request", "unknown_parameter", "invalid_filter", "invalid_run", "invalid_event", "import_refused",
    "too_many_requests",
    "internal_error",
    "unavailable", "database_unavailable", "cluster_unreachable", "provider_unavailable",
]  # fmt: skip
_OF_STATUS: dict[int, Code] = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    409: "wrong_state",
    412: "changed_meanwhile",
    413: "body_too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    429: "too_many_requests",
    500: "internal_error",
    502: "provider_unavailable",
    503: "unavailable",
    504: "provider_unavailable",
}


class FieldError(BaseModel):
    """An error in one field of a request."""

    field: str = Field(description="The field: 'body.name', 'query.limit', ...", examples=["body.name"])
    message: str = Field(description="The error in one sentence.", examples=["Field required"])


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Not Found",
                    "status": 404,
                    "code": "not_found",
                    "detail": "there is no run 0f3a",
                }
            ]
        }
    )

    type: str = Field(default="about:blank", description="Always about:blank.")
    title: str = Field(description="The status in words.")
    status: int = Field(description="The HTTP status.")
    code: Code = Field(description="The kind of error for programs; it does not change when sentences do.")
    detail: str = Field(default="", description="The error in one sentence.")
    errors: list[FieldError] | None = Field(default=None, description="With 422: the errors field by field.")


class ProblemError(Exception):
    """An exception that a route raises to respond with a problem: status, one sentence, and what else is known."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        code: Code | None = None,
        errors: Sequence[FieldError] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = list(errors) if errors is not None else None
        self.headers = dict(headers or {})


def retry_later(status: int, detail: str, seconds: float) -> ProblemError:
    """Return a 429 or 503 that asks to retry after `seconds`, rounded up because the header has whole seconds."""
    return ProblemError(status, detail, headers={"Retry-After": str(max(1, -int(-seconds // 1)))})


def problem_response(
    status: int,
    detail: str,
    code: Code | None = None,
    errors: Sequence[FieldError] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the whole response of a problem; without a code, it has the usual one of its status."""
    problem = Problem(
        title=http.HTTPStatus(status).phrase,
        status=status,
        code=code or code_of(status),
        detail=_readable(detail),
        errors=[FieldError(field=_readable(one.field), message=_readable(one.message)) for one in errors or ()] or None,
    )
    body = problem.model_dump(exclude_none=True)
    return JSONResponse(body, status_code=status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def code_of(status: int) -> Code:
    """Return the code of a status that no route has named more closely."""
    return _OF_STATUS.get(status) or ("bad_request" if status < 500 else "internal_error")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a router that documents these statuses."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": http.HTTPStatus(status).phrase,
            "content": {
                MEDIA_TYPE: {
                    "schema": schema,
                    "example": {
                        "type": "about:blank",
                        "title": http.HTTPStatus(status).phrase,
                        "status": status,
                        "code": code_of(status),
                    },
                }
            },
        }
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Make `app` respond to every error with a problem."""

    async def on_problem(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ProblemError)
        return problem_response(error.status, error.detail, error.code, error.errors, error.headers)

    async def on_not_found(request: Request, error: Exception) -> JSONResponse:
        return problem_response(404, str(error))

    async def on_cursor(request: Request, error: Exception) -> JSONResponse:
        fields = [FieldError(field="query.cursor", message=str(error))]
        return problem_response(422, "the request is not valid", None, fields)

    async def on_query(request: Request, error: Exception) -> JSONResponse:
        fields = [FieldError(field="query.filter", message=str(error))]
        return problem_response(422, "the filter is not valid", "invalid_filter", fields)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem_response(error.status_code, str(error.detail), headers=error.headers)

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fields = [FieldError(field=_where(entry["loc"]), message=str(entry["msg"])) for entry in error.errors()]
        return problem_response(422, "the request is not valid", None, fields)

    async def on_race(request: Request, error: Exception) -> JSONResponse:
        logger.warning("%s %s met another change: %s", request.method, request.url.path, type(error).__name__)
        return problem_response(
            409, "another request was faster: read it again, then repeat yours", "changed_meanwhile"
        )

    async def on_constraint(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, IntegrityError)
        # Most routes look first, and say what is taken.
        return await (on_race if is_race(error) else on_defect)(request, error)

    async def on_hang_up(request: Request, error: Exception) -> JSONResponse:
        # Nobody reads this; it is counted as a fault of the client.
        return problem_response(400, "the client hung up before its request was complete")

    async def on_store(request: Request, error: Exception) -> JSONResponse:
        logger.error("the database did not respond to %s %s", request.method, request.url.path, exc_info=error)
        return problem_response(
            503,
            "the database does not respond: try again",
            "database_unavailable",
            headers={"Retry-After": str(STORE_RETRY_S)},
        )

    async def on_defect(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        # This response is sent outside of all middlewares.
        return problem_response(500, "the service failed: see its log", headers=SECURITY_HEADERS)

    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(NotFoundError, on_not_found)
    app.add_exception_handler(CursorError, on_cursor)
    app.add_exception_handler(QueryError, on_query)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(ClientDisconnect, on_hang_up)
    app.add_exception_handler(IntegrityError, on_constraint)
    # Of a row that another request has deleted since this one read it.
    app.add_exception_handler(StaleDataError, on_race)
    for away in (OperationalError, PoolTimeoutError, BusyError):
        app.add_exception_handler(away, on_store)
    app.add_exception_handler(Exception, on_defect)


def _where(location: Sequence[Any]) -> str:
    # The location may contain a key that the client made up. It is cut, because no name of ours is that long.
    return ".".join(str(part)[:100] for part in location)


def _readable(text: str) -> str:
    """Return what a client may have sent without lone surrogates, which JSON can write and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")
