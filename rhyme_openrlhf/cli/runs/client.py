"""The control plane's HTTP interface as a client uses it: every wait has a limit, every failure is one sentence.

Streams of server-sent events go on by Last-Event-ID after a broken connection, so nothing is shown twice or missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from rhyme_openrlhf.cli.runs.access import Access, is_loopback
from rhyme_openrlhf.cli.runs.sse import SseEvent, SseParser

PREFIX = "/api/v1"
CONNECT_SECONDS = 5.0
# An export of a large run begins within this; every other answer is there long before.
READ_SECONDS = 60.0
# A stream is pinged every 15 s (api/live/streams.py): one that is silent for longer is dead.
STREAM_SECONDS = 40.0
# How often a request is repeated that the server puts off (429, 503), and how long one pause may be.
TRIES = 4
LONGEST_PAUSE_SECONDS = 10.0
# A stream that cannot be taken up again for so long is given up.
GIVE_UP_SECONDS = 300.0
PAGE = 200

REFUSED, UNREACHABLE, NO_ACCESS = 1, 3, 4
PUT_OFF = frozenset({429, 503})


class ClientError(Exception):
    """Something did not work; the message is one sentence, `code` the exit code for it, `status` HTTP's (0: none)."""

    def __init__(self, message: str, code: int = REFUSED, status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class Client:
    """Requests to one control plane. Use it in a `with` block."""

    def __init__(self, access: Access, transport: httpx.BaseTransport | None = None) -> None:
        self.url = access.url
        self._http = httpx.Client(
            base_url=access.url + PREFIX,
            headers={"Authorization": f"Bearer {access.token}", "Accept": "application/json"},
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
            # Proxies and certificates of the environment, but never a proxy on the way to this machine itself.
            trust_env=not is_loopback(access.url),
            transport=transport,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON at `path`. Raises ClientError."""
        return self._send("GET", path, params=params)

    def post(self, path: str, body: Any = None, key: str = "") -> Any:
        """Return the response to a POST; with an idempotency `key` it may be sent again. Raises ClientError."""
        return self._send("POST", path, json=body, headers={"Idempotency-Key": key} if key else None)

    def pages(self, path: str, params: Mapping[str, Any], most: int) -> Iterator[dict[str, Any]]:
        """Yield at most `most` items of a list that comes in pages. Raises ClientError."""
        cursor = None
        while most > 0:
            asked = {**params, "limit": min(most, PAGE), **({"cursor": cursor} if cursor else {})}
            page = self.get(path, asked)
            yield from page["items"]
            most -= len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    @contextmanager
    def download(self, path: str, params: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
        """Yield the bytes of a file as they arrive. Raises ClientError."""
        with self._in_words(), self._http.stream("GET", path, params=params) as response:
            if response.is_error:
                response.read()
                raise self._refused(response)
            yield response.iter_bytes()

    def follow(self, path: str, params: Mapping[str, Any]) -> Iterator[SseEvent]:
        """Yield the events of an endless stream; pings are events of kind "ping". Raises ClientError."""
        last_id = ""
        heard = time.monotonic()
        pause = 0.5
        while True:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
            timeout = httpx.Timeout(STREAM_SECONDS, connect=CONNECT_SECONDS)
            try:
                with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
                    if response.is_error:
                        response.read()
                        if response.status_code < 500 and response.status_code not in PUT_OFF:
                            raise self._refused(response)
                    else:
                        parser = SseParser()
                        for line in response.iter_lines():
                            heard, pause = time.monotonic(), 0.5
                            for event in parser.feed(line):
                                last_id = event.id or last_id
                                yield event
            except httpx.TransportError as error:
                problem = type(error).__name__
            else:
                problem = f"it answers {response.status_code}"
            if time.monotonic() - heard > GIVE_UP_SECONDS:
                raise ClientError(f"{self.url} has not come back for {GIVE_UP_SECONDS:.0f} s ({problem})", UNREACHABLE)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _send(self, method: str, path: str, **arguments: Any) -> Any:
        with self._in_words():
            for left in reversed(range(TRIES)):
                response = self._http.request(method, path, **arguments)
                if response.status_code not in PUT_OFF or not left:
                    break
                time.sleep(_pause(response.headers.get("Retry-After", "")))
        if not response.is_success:
            raise self._refused(response)
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise ClientError(f"{self.url} is no control plane: its answer is not JSON", UNREACHABLE) from None

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException:
            raise ClientError(f"{self.url} does not answer in time; is the machine very busy?", UNREACHABLE) from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            told = str(error) or type(error).__name__
            raise ClientError(
                f"no control plane answers at {self.url} ({told}): start one with `rhyme serve`, or name another one "
                "with --server",
                UNREACHABLE,
            ) from None

    def _refused(self, response: httpx.Response) -> ClientError:
        status = response.status_code
        try:
            problem = response.json()
        except ValueError:
            problem = {}
        problem = problem if isinstance(problem, dict) else {}
        detail = str(problem.get("detail") or problem.get("title") or response.reason_phrase or "no reason given")
        faults = [
            f"{error.get('field')}: {error.get('message')}"
            for error in problem.get("errors") or []
            if isinstance(error, dict)
        ]
        if faults:
            detail += " (" + "; ".join(faults) + ")"
        if status == httpx.codes.UNAUTHORIZED:
            return ClientError(
                f"{self.url} does not know this access token (revoked?): sign in with `rhyme runs login {self.url}`",
                NO_ACCESS,
                status,
            )
        if status == httpx.codes.FORBIDDEN:
            return ClientError(f"this access token may not do that: {detail}", NO_ACCESS, status)
        if response.is_server_error:
            return ClientError(f"{self.url} failed with {status}: {detail}", UNREACHABLE, status)
        return ClientError(detail, REFUSED, status)


def exchange(url: str, code: str, name: str) -> Access:
    """Return access with a new operator's token, called `name`, for the code of a sign-in link. Raises ClientError."""
    try:
        with Client(Access(url, code)) as client:
            issued = client.post("/tokens/exchange", {"code": code, "name": name})
    except ClientError as error:
        if error.status != httpx.codes.UNAUTHORIZED:
            raise
        raise ClientError(
            f"{url} does not take this sign-in link: it was used already or is too old; `rhyme serve --new-link` "
            "prints a new one",
            NO_ACCESS,
            error.status,
        ) from None
    return Access(url, str(issued["token"]))


def _pause(retry_after: str) -> float:
    asked = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 1.0
    return min(asked, LONGEST_PAUSE_SECONDS)
