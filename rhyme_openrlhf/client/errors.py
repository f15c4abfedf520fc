"""Errors of a client: each is one sentence that says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx


class ClientError(Exception):
    """A request that failed. `status`: HTTP's (0: no response); `code`: the problem's kind for programs, or ""."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class UnreachableError(ClientError):
    """The control plane does not respond, or it failed."""


class AccessError(ClientError):
    """The token is missing, is refused, or may not do this."""


@contextmanager
def in_words(url: str) -> Iterator[None]:
    """Raise UnreachableError instead of the transport's exceptions."""
    try:
        yield
    except httpx.TimeoutException:
        raise UnreachableError(f"{url} does not answer in time; is the machine very busy?") from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        told = str(error) or type(error).__name__
        raise UnreachableError(
            f"no control plane answers at {url} ({told}): start one with `rhyme serve`, or name another one with "
            "--server"
        ) from None


def refusal(response: httpx.Response, url: str) -> ClientError:
    """Return the error that a response stands for, in words."""
    status = response.status_code
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    problem = problem if isinstance(problem, dict) else {}
    code = str(problem.get("code") or "")
    detail = str(problem.get("detail") or problem.get("title") or response.reason_phrase or "no reason given")
    # An argument of a run is an option of `rhyme train`.
    faults = [
        f"{str(error.get('field')).replace('body.arguments.', '--', 1)}: {error.get('message')}"
        for error in problem.get("errors") or []
        if isinstance(error, dict)
    ]
    if faults:
        detail += " (" + "; ".join(faults) + ")"
    if status == httpx.codes.UNAUTHORIZED:
        message = f"{url} does not know this access token (revoked?): sign in with `rhyme runs login {url}`"
        return AccessError(message, status, code)
    if status == httpx.codes.FORBIDDEN:
        return AccessError(f"this access token may not do that: {detail}", status, code)
    if response.is_server_error:
        return UnreachableError(f"{url} failed with {status}: {detail}", status, code)
    return ClientError(detail, status, code)


def content(response: httpx.Response, url: str) -> Any:
    """Return the JSON of a response, None if it has no content. Raises ClientError."""
    if not response.is_success:
        raise refusal(response, url)
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        raise UnreachableError(f"{url} is no control plane: its answer is not JSON") from None
