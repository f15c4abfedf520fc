"""Parameters of requests: types with the bounds of `store/bounds.py`, edits with If-Match, unknown names.

If-Match (RFC 9110): an edit is refused if another one was faster. `read/run_json.py` makes the entity tags. Unknown
query parameters are refused, because a misspelt one would be ignored and give a wrong result silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query as QueryField
from fastapi.routing import APIRoute

from rhyme_openrlhf.api.http.problems import FieldError, ProblemError
from rhyme_openrlhf.api.read.pagination import CURSOR_LENGTH
from rhyme_openrlhf.api.store.bounds import INT32, LAST_TIME, NO_NUL
from rhyme_openrlhf.api.store.models import UID_LENGTH

# Default rows per page: a table in the browser shows no more at once.
PAGE = 50
LARGEST_PAGE = 1000
# Longest name of an unknown parameter that is repeated to the client.
_SHOWN = 100
# Where the API's addresses begin.
PREFIX = "/api/v1"

RunUid = Annotated[
    str,
    Path(alias="uid", pattern=rf"^[0-9a-f]{{{UID_LENGTH}}}$", description="The run.", examples=["0f3a5b7c9d1e2f40"]),
]
AttemptNumber = Annotated[int, Path(ge=1, le=INT32, description="Attempts count from 1.")]
ExperimentId = Annotated[int, Path(ge=1, le=INT32)]
StepNumber = Annotated[int, Path(ge=0, le=INT32)]

Limit = Annotated[int, Query(ge=1, le=LARGEST_PAGE, description="Most rows of the page.")]
Cursor = Annotated[
    str | None, Query(max_length=CURSOR_LENGTH, pattern=NO_NUL, description="`next_cursor` of the previous page.")
]
FromStep = Annotated[int, Query(ge=0, le=INT32, description="First step.")]
ToStep = Annotated[int, Query(ge=0, le=INT32, description="Last step, included.")]
Moment = Annotated[float | None, Query(ge=0, le=LAST_TIME, allow_inf_nan=False, description="Unix seconds.")]
# An offset, because a step's file of responses only ever changes as a whole.
Offset = Annotated[
    str | None, Query(pattern=r"^[0-9]{1,6}$", description="`next_cursor` of the previous page.", examples=["50"])
]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=1000,
        description="The ETag of the state that the edit is based on; a later edit is refused with 412.",
    ),
]
# Entries of `responses` of operations that send or check tags.
TAGGED: dict[str, Any] = {"headers": {"ETag": {"schema": {"type": "string"}, "description": "For If-Match."}}}


def created_at(response: Response, path: str) -> None:
    """Name the address of what a request created: `path` below the API's prefix."""
    response.headers["Location"] = PREFIX + path


def require_match(if_match: str | None, tag: str) -> None:
    """Raise ProblemError 412 if the client bases its edit on another state."""
    if if_match is None or if_match.strip() == "*" or tag in [one.strip() for one in if_match.split(",")]:
        return
    raise ProblemError(412, "it was changed meanwhile: read it again, then repeat the edit")


def query_parameters(routers: Iterable[APIRouter]) -> dict[Callable[..., Any], frozenset[str]]:
    """Return the names of each endpoint's query parameters."""
    return {
        route.endpoint: frozenset(
            field.alias for field in get_flat_params(route.dependant) if isinstance(field.field_info, QueryField)
        )
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
    }


async def refuse_unknown(request: Request) -> None:
    """Raise ProblemError 422 if the query has a parameter that the operation does not know (a dependency)."""
    known = request.app.state.query_parameters[request.scope["endpoint"]]
    unknown = sorted(set(request.query_params) - known)
    if not unknown:
        return
    allowed = f"this operation knows: {', '.join(sorted(known))}" if known else "this operation has no parameters"
    errors = [FieldError(field=f"query.{name[:_SHOWN]}", message=allowed) for name in unknown[:10]]
    raise ProblemError(422, "the request has an unknown parameter", code="unknown_parameter", errors=errors)
