"""Differences of the form to its starting point, a template or a cloned run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.api.launch.schema import options
from rhyme_openrlhf.webui.site.text import written

UNSET = "not set"


@dataclass(frozen=True)
class Difference:
    """An option with another value than at the starting point; `key` is its field's."""

    key: str
    was: str
    now: str


def differences(
    base: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Mapping[str, Any]]
) -> tuple[Difference, ...]:
    """Return the options that differ, in the schema's order; an option that is not given has its default."""
    found = []
    for (group, name), option in options().items():
        was = base.get(group, {}).get(name, option.default)
        now = arguments.get(group, {}).get(name, option.default)
        # A list is a tuple where it is a default.
        if (list(was) if isinstance(was, tuple) else was) != (list(now) if isinstance(now, tuple) else now):
            found.append(Difference(f"{group}.{name}", written(was) or UNSET, written(now) or UNSET))
    return tuple(found)
