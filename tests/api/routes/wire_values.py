"""Values of a query as they arrive: all of them are text, and a text that reads as a right value is one.

Schemathesis makes queries wrong before they are sent: the number 5 where a text is wanted arrives as the text "5". It
knows most such cases by itself, not those of several parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema


def reads_right(url: str, parameters: list[dict[str, Any]], document: dict[str, Any]) -> bool:
    """Whether every query parameter in `url` is as an OpenAPI document's operation with `parameters` wants it."""
    sent = parse_qs(urlsplit(url).query, keep_blank_values=True)
    if not set(sent) <= {parameter["name"] for parameter in parameters if parameter["in"] == "query"}:
        return False
    for parameter in parameters:
        if parameter["in"] != "query":
            continue
        texts = sent.get(parameter["name"])
        if texts is None:
            if parameter.get("required"):
                return False
            continue
        schema = {**parameter["schema"], "components": document.get("components", {})}
        if schema.get("type") == "array":
            item = {**schema["items"], "components": schema["components"]}
            values = [next((value for value in readings(text) if valid(value, item)), None) for text in texts]
            if None in values or not valid(values, schema):
                return False
        # Of several, servers take the last.
        elif not any(valid(value, schema) for value in readings(texts[-1])):
            return False
    return True


def readings(text: str) -> Iterator[Any]:
    """The values that a server may take a text for."""
    yield text
    for read in (int, float, {"true": True, "false": False}.__getitem__):
        try:
            yield read(text)
        except (ValueError, KeyError):
            continue


def valid(value: Any, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)
