"""Server-sent events, from lines of text: pure (HTML standard, section 9.2).

Invariant: what `feed` gives has its whole data; an event that a broken connection cut short is never given.
"""

from __future__ import annotations

from dataclasses import dataclass

PING = "ping"


@dataclass(frozen=True)
class SseEvent:
    """One event; `kind` is "message" if the server named none, PING for a comment, which only says that it lives."""

    kind: str
    data: str
    id: str


class SseParser:
    """The events of one connection, line by line."""

    def __init__(self) -> None:
        self._kind = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, line: str) -> list[SseEvent]:
        """Return the event that `line` (without its end) completes, if any."""
        if line.startswith(":"):
            return [SseEvent(PING, line[1:].strip(), "")]
        if not line:
            data, kind = self._data, self._kind or "message"
            self._data, self._kind = [], ""
            return [SseEvent(kind, "\n".join(data), self._id)] if data else []
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._kind = value
        elif field == "id" and "\0" not in value:
            self._id = value
        return []
