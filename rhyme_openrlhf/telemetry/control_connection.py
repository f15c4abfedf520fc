"""One HTTP connection to a control plane, with nothing but the standard library: the reporter must start at once.

Invariants:
- A request waits at most REQUEST_SECONDS to connect, and as long for each part of the response.
- Every failure is an `Answer` with status 0 and one sentence, never an exception.
- The token is in no message. Redirects are not followed, because they would carry the token to an address that the
  user has not given. Proxies of the environment are not used.
"""

from __future__ import annotations

import gzip
import http.client
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

REQUEST_SECONDS = 10.0
# What a batch is answered with has a hundred bytes; a longer answer is from something else and is cut.
ANSWER_BYTES = 65536
# Of what a server says is wrong, this much is shown.
PROBLEM_CHARS = 500
# Events are repetitive: the fastest level already takes away nine tenths.
GZIP_LEVEL = 1
# Below this, compressing saves no packet.
GZIP_FROM_BYTES = 1400
UNAUTHORISED = frozenset({401, 403})


class TokenError(ValueError):
    """The access token cannot be had or cannot be one; the message says where it was looked for, never what it is."""


@dataclass(frozen=True)
class Answer:
    """A server's response: HTTP status (0: none came), its JSON object, seconds to wait, and the problem in words."""

    status: int
    content: dict[str, Any]
    retry_after: float | None = None
    problem: str = ""

    @property
    def taken(self) -> bool:
        """The server did what was asked."""
        return 200 <= self.status < 300


def read_token(token_file: str, given: str) -> str:
    """Return the token in `token_file` if that is named, else `given` (from the environment). Raises TokenError."""
    token, where = given, "RHYME_CONTROL_TOKEN"
    if token_file:
        where = token_file
        try:
            token = Path(token_file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"the token file {token_file} cannot be read: {type(error).__name__}") from None
    token = token.strip()
    if not token:
        raise TokenError(
            "there is no access token: name its file with --control.token_file or set RHYME_CONTROL_TOKEN"
            if not token_file
            else f"the token file {token_file} is empty"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise TokenError(f"what {where} holds is no access token (one word of printable ASCII characters)")
    return token


class ControlConnection:
    """Sends JSON to one server, keeping the connection open between requests. For one thread."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._path = parts.path.rstrip("/")
        self._name = parts.netloc
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=REQUEST_SECONDS)
        self._used = False

    def send(self, method: str, path: str, body: bytes, token: str, pack: bool) -> Answer:
        """Send one request with a JSON body to `path` below the address; `pack`: compress a large body."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Accept": "application/json"}
        if pack and len(body) >= GZIP_FROM_BYTES:
            body = gzip.compress(body, GZIP_LEVEL)
            headers["Content-Encoding"] = "gzip"
        try:
            response, text = self._exchange(method, self._path + path, body, headers)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            self.close()
            return Answer(0, {}, None, f"{self._name} does not answer: {_in_words(error)}")
        if not response.isclosed():  # more than ANSWER_BYTES: what is left would be taken for the next answer
            self.close()
        return _answer(self._name, response, text)

    def close(self) -> None:
        """End the connection; the next `send` makes a new one."""
        self._connection.close()
        self._used = False

    def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        while True:
            reused, self._used = self._used, True
            try:
                with suppress(BrokenPipeError, ConnectionResetError):
                    # A server may refuse a body that it has not read to its end: what it says can still be read.
                    self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                return response, response.read(ANSWER_BYTES)
            except (ConnectionError, http.client.BadStatusLine, http.client.ResponseNotReady):
                # Servers close idle connections; everything that is sent here may be sent twice.
                self.close()
                if not reused:
                    raise


def _answer(name: str, response: http.client.HTTPResponse, text: bytes) -> Answer:
    retry_after = _seconds(response.getheader("Retry-After"), response.getheader("Date"))
    try:
        content = json.loads(text)
    except ValueError:  # not JSON, or not UTF-8
        content = None
    if 200 <= response.status < 300:
        if isinstance(content, dict):
            return Answer(response.status, content, retry_after)
        return Answer(0, {}, retry_after, f"{name} answered {response.status} without a JSON object: no control plane")
    said = content if isinstance(content, dict) else {}
    detail = str(said.get("detail") or said.get("title") or response.reason)
    errors = said.get("errors")
    if isinstance(errors, list) and errors and isinstance(errors[0], dict):
        detail += f" ({errors[0].get('field')}: {errors[0].get('message')})"
    return Answer(response.status, said, retry_after, f"{name} answered {response.status}: {detail[:PROBLEM_CHARS]}")


def _seconds(header: str | None, date: str | None) -> float | None:
    """Return a Retry-After in seconds; it may be a number, or a date by the server's clock, which says `date` now."""
    if header is None:
        return None
    header = header.strip()
    if header.isdigit() and header.isascii():
        return float(header)
    try:
        now = parsedate_to_datetime(date).timestamp() if date else time.time()
        return parsedate_to_datetime(header).timestamp() - now
    except (TypeError, ValueError):
        return None


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing for {REQUEST_SECONDS:g} s"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
