"""Refusal of unknown query parameters, because a misspelt one would be ignored and give a wrong result silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute

from rhyme_openrlhf.api.http.problems import FieldError, ProblemError

# Longest name that is repeated to the client.
_SHOWN = 100


def query_parameters(routers: Iterable[APIRouter]) -> dict[Callable[..., Any], frozenset[str]]:
    """Return the names of each endpoint's query parameters."""
    return {
        route.endpoint: frozenset(
            field.alias for field in get_flat_params(route.dependant) if isinstance(field.field_info, Query)
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
    errors = [FieldError(field=f"query.{_readable(name)}", message=allowed) for name in unknown[:10]]
    raise ProblemError(422, "the request has an unknown parameter", code="unknown_parameter", errors=errors)


def _readable(name: str) -> str:
    return name[:_SHOWN].encode("utf-8", "replace").decode("utf-8")
