"""The base of all kinds of events (telemetry/events.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all kinds. A kind is a frozen dataclass whose field names differ from the envelope's."""

    kind: ClassVar[str]


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether an event must have the field: one that a later version added has a default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
