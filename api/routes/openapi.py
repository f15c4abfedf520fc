"""The API's OpenAPI description, for clients and test tools.

Readers can get it. Every operation states what it requires (a token or a session) and its responses.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi

from rhyme_openrlhf import __version__
from rhyme_openrlhf.api.access import auth
from rhyme_openrlhf.api.http.problems import Problem, documented

router = APIRouter(tags=["description"], responses=documented(401, 403, 429))

DESCRIPTION = (
    "Start, see and stop runs of rhyme-openrlhf. Errors are problem details (RFC 9457); lists are paged by cursor; "
    "times are unix seconds. Scripts send `Authorization: Bearer <token>`; browsers sign in at `/api/v1/session`, and "
    f"send `{auth.CSRF_HEADER}` with requests that change something."
)
# Responses before any route: wrong host or foreign page, too many requests, too large a body. A body that arrives too
# slowly can occur at any route.
_ALWAYS = documented(400, 403, 408, 413, 429)


@router.get("/openapi.json", summary="This description", responses={200: {"content": {"application/json": {}}}})
def openapi(request: Request, who: auth.Viewer) -> dict[str, Any]:
    """Return the OpenAPI description of this API."""
    app: FastAPI = request.app
    schema = app.openapi()
    schemes = schema["components"]["securitySchemes"]
    cookie = {**schemes[auth.COOKIE_SCHEME], "name": auth.cookie_name(request)}
    components = {**schema["components"], "securitySchemes": {**schemes, auth.COOKIE_SCHEME: cookie}}
    return {**schema, "components": components}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the description of `app`, which is cached."""
    if app.openapi_schema is None:
        schema = get_openapi(title="rhyme-openrlhf", version=__version__, description=DESCRIPTION, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(problem.pop("$defs", {}))
        components["Problem"] = problem
        for path in schema["paths"].values():
            for operation in path.values():
                for status, response in _ALWAYS.items():
                    operation["responses"].setdefault(str(status), response)
        app.openapi_schema = schema
    return app.openapi_schema
