"""Writes `rhyme_openrlhf/settings/upstream_options.json`: OpenRLHF's options as a JSON schema, made from its own
parser.

    python scripts/write_upstream_schema.py

Run it where the supported OpenRLHF is installed, whenever that version changes;
tests/api/launch/test_schema.py compares.
"""

from __future__ import annotations

import argparse
import json
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import rhyme_openrlhf
from rhyme_openrlhf.cli import upstream

TARGET = Path(rhyme_openrlhf.__file__).parent / "settings/upstream_options.json"
# Options that stand in no group on upstream's command line.
NO_GROUP = "openrlhf"
JSON_TYPES = {int: "integer", float: "number", str: "string", None: "string"}


def build() -> dict[str, Any]:
    """Return the schema: one object per group, one property per option, named as in `args.<group>.<field>`."""
    groups: dict[str, dict[str, Any]] = {}
    for action in upstream.options():
        flag = next(name for name in action.option_strings if name.startswith("--"))
        group, field = action.dest.split(".", 1) if "." in action.dest else (NO_GROUP, action.dest)
        properties = groups.setdefault(group, {})
        if isinstance(action, argparse._StoreFalseAction):
            # The other half of a switch that is on by default.
            properties[field]["x-off-flag"] = flag
            continue
        properties[field] = {**_type(action), **_said(action), "x-flag": flag}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of openrlhf.cli.train_ppo_ray",
        "x-openrlhf-version": metadata.version("openrlhf"),
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: {"type": "object", "additionalProperties": False, "properties": properties}
            for name, properties in groups.items()
        },
    }


def _type(action: argparse.Action) -> dict[str, Any]:
    if isinstance(action, argparse._StoreTrueAction):
        return {"type": "boolean"}
    item: dict[str, Any] = {"type": JSON_TYPES[action.type]}  # type: ignore[index]
    if action.choices is not None:
        item["enum"] = list(action.choices)
    if action.nargs is None:
        return item
    counts: dict[Any, dict[str, int]] = {"*": {}, "+": {"minItems": 1}}
    exact = {"minItems": action.nargs, "maxItems": action.nargs}
    return {"type": "array", "items": item, **counts.get(action.nargs, exact)}


def _said(action: argparse.Action) -> dict[str, Any]:
    default = list(action.default) if isinstance(action.default, tuple) else action.default
    if isinstance(default, float) and not math.isfinite(default):
        default = str(default)  # JSON has no number for it
    return {"default": default, "description": " ".join((action.help or "").split())}


def text() -> str:
    """Return the file's content."""
    return json.dumps(build(), indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    print(f"wrote {TARGET}")
