"""The page `/docs`: every operation of the API, with parameters, body and responses; anyone may read it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from rhyme_openrlhf.webui.pages.rendering import PageOrNone, render_public

router = APIRouter(include_in_schema=False)

# Responses that every operation may give; the page explains them once.
_EVERYWHERE = frozenset({"400", "401", "403", "408", "413", "422", "429", "503"})


@dataclass(frozen=True)
class Parameter:
    """A parameter. `place`: path, query or header."""

    name: str
    place: str
    required: bool
    kind: str
    text: str


@dataclass(frozen=True)
class Operation:
    """An operation. `body`: an example of its JSON body, or ""; `responses`: (status, meaning)."""

    name: str
    method: str
    path: str
    title: str
    text: str
    is_open: bool
    parameters: tuple[Parameter, ...]
    body: str
    responses: tuple[tuple[str, str], ...]


@router.get("/docs")
def api_docs(request: Request, page: PageOrNone) -> HTMLResponse:
    """Render the description of the API; with the menu for those who are signed in."""
    document = request.app.openapi()
    render = render_public if page is None else page.render
    return render("api_docs.html", groups=_groups(json.dumps(document)), codes=_codes(document))


@functools.lru_cache(maxsize=2)
def _groups(document: str) -> dict[str, list[Operation]]:
    """Return the operations by tag, in the order of the routes."""
    described = json.loads(document)
    found: dict[str, list[Operation]] = {}
    for path, methods in described["paths"].items():
        for method, one in methods.items():
            found.setdefault(one.get("tags", ["other"])[0], []).append(_operation(described, path, method, one))
    return found


def _codes(document: Mapping[str, Any]) -> list[str]:
    codes: list[str] = document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]
    return codes


def _operation(document: Mapping[str, Any], path: str, method: str, one: Mapping[str, Any]) -> Operation:
    parameters = [
        Parameter(
            given["name"],
            given["in"],
            given.get("required", False),
            kind_of(document, given["schema"]),
            given.get("description", ""),
        )
        for given in one.get("parameters", [])
    ]
    responses = [
        (status, response["description"]) for status, response in one["responses"].items() if status not in _EVERYWHERE
    ]
    return Operation(
        name=one["operationId"],
        method=method.upper(),
        path=path,
        title=one["summary"],
        text=one.get("description", ""),
        is_open="security" not in one,
        parameters=tuple(parameters),
        body=_body(document, one),
        responses=tuple(responses),
    )


def _body(document: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    content = one.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return ""
    schema = resolved(document, content["schema"])
    example = content.get("example") or (schema.get("examples") or [None])[0]
    if example is None:
        fields = schema.get("properties", {}).items()
        example = {name: f"<{kind_of(document, field)}>" for name, field in fields}
    return json.dumps(example, indent=2)


def resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema behind a reference."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def kind_of(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the kind of a value in words, with its limits."""
    schema = resolved(document, schema)
    if "anyOf" in schema:
        kinds = (kind_of(document, one) for one in schema["anyOf"] if one.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {kind_of(document, schema.get('items', {}))}"
    kind = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}.get(
        schema.get("type", ""), "JSON"
    )
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        kind += f", {low} to {high}"
    return kind
