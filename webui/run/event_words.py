"""One sentence for each event of a run, of any kind. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rhyme_openrlhf.webui.site import text

# Longest sentence in a row of the table; the complete event is below the row.
LENGTH = 200
# Longer lists are not shown as a single value.
MOST_VALUES = 8
# Fields shown elsewhere in the row.
_LEFT_OUT = ("step", "level", "schema_version")


def sentence(kind: str, body: Mapping[str, Any]) -> str:
    """Return a note's text, the reason why something ended, or else the event's values."""
    if kind == "note":
        said = str(body.get("text", ""))
    elif kind == "run_finished":
        said = f"{body.get('status', '')}: {body.get('message', '')}".rstrip(": ")
    elif kind == "process_ready":
        said = f"{body.get('name', '')} is ready"
    elif kind == "process_died":
        said = f"{body.get('name', '')}: {body.get('cause', '')}{' (replaced)' if body.get('healed') else ''}"
    elif kind == "engine_interval" and isinstance(body.get("end"), float) and isinstance(body.get("start"), float):
        cause = f", cause {body['cause']}" if body.get("cause") else ""
        said = f"engine {body.get('engine')}: {body.get('state')} {text.duration(body['end'] - body['start'])}{cause}"
    else:
        said = ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in _singles(body))
    said = " ".join(said.split())
    return said if len(said) <= LENGTH else f"{said[: LENGTH - 1]}…"


def level_of(kind: str, body: Mapping[str, Any]) -> str:
    """Return the level of a row, "error", "warning" or "", by the rules of `api/read/events.py`."""
    if kind == "process_died" or (kind == "run_finished" and body.get("status") == "failed"):
        return "error"
    level = body.get("level") if kind == "note" else ""
    return level if level in ("warning", "error") else ""


def _singles(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield single values, and those of tables of numbers (a step's seconds by part, its metrics)."""
    for name, value in body.items():
        if name in _LEFT_OUT or value == "":
            continue
        if name == "seconds_by_part" and isinstance(value, dict):
            yield from ((part, text.duration(one)) for part, one in value.items() if isinstance(one, (int, float)))
        elif isinstance(value, dict):
            yield from ((inner, one) for inner, one in value.items() if isinstance(one, (int, float)))
        elif isinstance(value, list) and 0 < len(value) <= MOST_VALUES:
            if all(isinstance(one, (int, float)) for one in value):
                yield name, " / ".join(map(_value, value))
        elif isinstance(value, (str, int, float)):
            yield name, value


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else text.number(value)
