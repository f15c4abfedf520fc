"""Parts of both clients: limits, connection options, live streams, and the way from a run's name to its uid.

Server-sent events (HTML standard, section 9.2) are parsed from lines of text. Invariant: what `feed` gives has its
whole data; an event that a broken connection cut short is never given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rhyme_openrlhf.client import calls, models
from rhyme_openrlhf.client.access import Access, checked_token, checked_url, find_access, is_loopback
from rhyme_openrlhf.client.calls import PAGE, PREFIX, Call
from rhyme_openrlhf.client.errors import ClientError
from rhyme_openrlhf.settings.control import UID_DIGITS

CONNECT_SECONDS = 5.0
# An export of a large run begins within this time; every other response arrives long before.
READ_SECONDS = 60.0
# A stream is pinged every 15 s (api/http/event_stream.py), so one that is silent for longer is dead.
STREAM_SECONDS = 40.0
STREAM_TIMEOUT = httpx.Timeout(STREAM_SECONDS, connect=CONNECT_SECONDS)
# Most requests while the server asks to come back later (429, 503), and the longest pause between two.
TRIES = 4
LONGEST_PAUSE_SECONDS = 10.0
# A stream that stays broken for this long is given up.
GIVE_UP_SECONDS = 300.0
PUT_OFF = frozenset({429, 503})
NEWEST = "last"
PING = "ping"


def resolve(url: str, token: str, token_file: str) -> Access:
    """Return the given access, or the one that `rhyme runs` uses. Raises AccessError."""
    if url and token:
        return Access(checked_url(url), checked_token(token))
    return find_access(url, token_file, os.environ)


def options(access: Access) -> dict[str, Any]:
    """Return the options of httpx's clients."""
    return {
        "base_url": access.url + PREFIX,
        "headers": {"Authorization": f"Bearer {access.token}", "Accept": "application/json"},
        "timeout": httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
        # Proxies and certificates of the environment, but never a proxy on the way to this machine itself.
        "trust_env": not is_loopback(access.url),
    }


def pause_after(response: httpx.Response) -> float:
    """Return the seconds after which the server asks to come back."""
    asked = response.headers.get("Retry-After", "")
    return min(float(asked) if asked.isascii() and asked.isdigit() else 1.0, LONGEST_PAUSE_SECONDS)


@dataclass(frozen=True)
class Lookup:
    """The search for a run by its uid, the beginning of its uid, its name, or "last"."""

    name: str

    @property
    def uid(self) -> str:
        """The uid if the name is one, else ""."""
        is_uid = len(self.name) == UID_DIGITS and all(c in "0123456789abcdef" for c in self.name)
        return self.name if is_uid else ""

    def candidates(self) -> Call[models.Run]:
        """Return the request for runs that the name may mean."""
        if self.name == NEWEST:
            return calls.runs(limit=1)
        return calls.runs(text=self.name, archived="all", limit=PAGE)

    def chosen(self, found: Sequence[models.Run]) -> str:
        """Return the uid of the one candidate that fits. Raises ClientError."""
        if self.name == NEWEST:
            if not found:
                raise ClientError("there are no runs yet")
            return found[0]["uid"]
        named = [run["uid"] for run in found if run["name"] == self.name]
        begins = [run["uid"] for run in found if run["uid"].startswith(self.name)]
        for uids in (begins, named):
            if len(uids) == 1:
                return uids[0]
            if uids:
                several = ", ".join(uids[:5])
                raise ClientError(f"several runs are called {self.name!r}: {several}; name one by its uid")
        raise ClientError(f"there is no run {self.name!r}; `rhyme runs list` shows all")


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
