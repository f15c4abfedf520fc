"""The base of all kinds of events (telemetry/events.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Event:
    """Base of all kinds. A kind is a frozen dataclass whose field names differ from the envelope's."""

    kind: ClassVar[str]
