"""The client: sends the requests of `calls.py`, with a limit for every wait and a sentence for every failure.

Streams go on by Last-Event-ID after a broken connection, so nothing is shown twice or missed.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from rhyme_openrlhf.client import calls, models
from rhyme_openrlhf.client.access import Access
from rhyme_openrlhf.client.calls import ENDED, Call
from rhyme_openrlhf.client.errors import AccessError, ClientError, UnreachableError, content, in_words, refusal
from rhyme_openrlhf.client.transport import (
    GIVE_UP_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PUT_OFF,
    STREAM_TIMEOUT,
    TRIES,
    Lookup,
    SseEvent,
    SseParser,
    options,
    pause_after,
    resolve,
)

POLL_SECONDS = 2.0
Result = TypeVar("Result")
Given = ParamSpec("Given")


def sends(make: Callable[Given, Call[Result]]) -> Callable[Concatenate[Client, Given], Result]:
    """Return the method that sends the request of `make`, with its parameters and description."""

    @functools.wraps(make)
    def method(client: Client, /, *given: Given.args, **named: Given.kwargs) -> Result:
        return client.send(make(*given, **named))

    return method


def lists(make: Callable[Given, Call[Result]]) -> Callable[Concatenate[Client, Given], Iterator[Result]]:
    """Return the method that yields the items of the list of `make`."""

    @functools.wraps(make)
    def method(client: Client, /, *given: Given.args, **named: Given.kwargs) -> Iterator[Result]:
        return client.pages(make(*given, **named))

    return method


class Client:
    """Requests to one control plane; use it in a `with` block.

    Without arguments it uses the address and token of `rhyme runs`. A run is named by its uid; `find` gives the uid of
    a name. Methods raise ClientError.
    """

    def __init__(
        self, url: str = "", token: str = "", *, token_file: str = "", transport: httpx.BaseTransport | None = None
    ) -> None:
        access = resolve(url, token, token_file)
        self.url = access.url
        self._http = httpx.Client(**options(access), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    whoami = sends(calls.whoami)
    tokens = lists(calls.tokens)
    make_token = sends(calls.make_token)
    revoke_token = sends(calls.revoke_token)
    audit = lists(calls.audit)
    webhooks = lists(calls.webhooks)
    make_webhook = sends(calls.make_webhook)
    edit_webhook = sends(calls.edit_webhook)
    delete_webhook = sends(calls.delete_webhook)
    test_webhook = sends(calls.test_webhook)
    deliveries = lists(calls.deliveries)
    runs = lists(calls.runs)
    views = lists(calls.views)
    save_view = sends(calls.save_view)
    rename_view = sends(calls.rename_view)
    delete_view = sends(calls.delete_view)
    run = sends(calls.run)
    queue = sends(calls.queue)
    start = sends(calls.start)
    sweep = sends(calls.sweep)
    experiments = lists(calls.experiments)
    groups = sends(calls.groups)
    stop_experiment = sends(calls.stop_experiment)
    clone = sends(calls.clone)
    stop = sends(calls.stop)
    resume = sends(calls.resume)
    edit = sends(calls.edit)
    archive = sends(calls.archive)
    unarchive = sends(calls.unarchive)
    delete = sends(calls.delete)
    compare = sends(calls.compare)
    config_difference = sends(calls.config_difference)
    series = sends(calls.series)
    steps = lists(calls.steps)
    events = lists(calls.events)
    logs = sends(calls.logs)
    log = sends(calls.log)
    files = sends(calls.files)
    import_directory = sends(calls.import_directory)

    def find(self, name: str) -> str:
        """Return the uid of a run by its uid, the beginning of its uid, its name, or "last"."""
        lookup = Lookup(name)
        return lookup.uid or lookup.chosen(list(self.pages(lookup.candidates())))

    def wait(
        self, uid: str, *, statuses: Iterable[str] = ENDED, limit_s: float = 86_400.0, poll_s: float = POLL_SECONDS
    ) -> models.RunDetail:
        """Wait until a run has one of `statuses`, by default until it has ended, and return it.

        After `limit_s` seconds it returns the run as it is then.
        """
        wanted, end = frozenset(statuses), time.monotonic() + limit_s
        while True:
            run = self.run(uid)
            if run["status"] in wanted or time.monotonic() >= end:
                return run
            time.sleep(poll_s)

    def follow_events(self, uid: str, *, kinds: Sequence[str] = (), after: int = 0) -> Iterator[models.Event | None]:
        """Yield events as they are stored, without end; None at least every 15 seconds."""
        for one in self.follow(calls.follow_events(uid, kinds=kinds, after=after)):
            yield json.loads(one.data) if one.kind == "message" else None

    def follow_log(self, uid: str, attempt: int, name: str, *, start: int) -> Iterator[models.LogChunk | None]:
        """Yield what is written to a log file from byte `start` on, without end; None at least every 15 seconds."""
        for one in self.follow(calls.follow_log(uid, attempt, name, start=start)):
            yield json.loads(one.data) if one.kind == "message" else None

    @contextmanager
    def export(self, uid: str = "", table: str = "steps", *, form: str = "csv") -> Iterator[Iterator[bytes]]:
        """Give the bytes of a run's table, or without a run of the table of all runs, as they arrive."""
        with self._bytes(calls.export(uid, table, form=form)) as found:
            yield found

    @contextmanager
    def download(self, uid: str, attempt: int, kinds: Sequence[str] = ()) -> Iterator[Iterator[bytes]]:
        """Give the bytes of an archive (.tar.gz) of an attempt's files, as they arrive.

        Without `kinds`: record, logs and samples.
        """
        with self._bytes(calls.download(uid, attempt, kinds)) as found:
            yield found

    @contextmanager
    def _bytes(self, call: Call[Any]) -> Iterator[Iterator[bytes]]:
        with in_words(self.url), self._http.stream(call.method, call.path, params=dict(call.params)) as response:
            if response.is_error:
                response.read()
                raise refusal(response, self.url)
            yield response.iter_bytes()

    def send(self, call: Call[Result]) -> Result:
        """Send a request and return its response; repeat it while the service asks to come back later."""
        with in_words(self.url):
            for left in reversed(range(TRIES)):
                response = self._http.request(
                    call.method, call.path, params=dict(call.params), json=call.body, headers=dict(call.headers)
                )
                if response.status_code not in PUT_OFF or not left:
                    break
                time.sleep(pause_after(response))
        found: Result = content(response, self.url)
        return found

    def pages(self, call: Call[Result]) -> Iterator[Result]:
        """Yield the items of a list, one page a request."""
        cursor, left = None, call.most
        while left > 0:
            page = self.send(call.page(left, cursor))
            yield from page["items"]
            left -= len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def follow(self, call: Call[Any]) -> Iterator[SseEvent]:
        """Yield the events of a stream without end; pings come as events of kind "ping"."""
        last_id = ""
        heard, pause = time.monotonic(), 0.5
        while True:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
            try:
                with self._http.stream(
                    call.method, call.path, params=dict(call.params), headers=headers, timeout=STREAM_TIMEOUT
                ) as response:
                    if response.is_error:
                        response.read()
                        if response.status_code < 500 and response.status_code not in PUT_OFF:
                            raise refusal(response, self.url)
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
                raise UnreachableError(f"{self.url} has not come back for {GIVE_UP_SECONDS:.0f} s ({problem})")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def exchange(url: str, code: str, name: str) -> Access:
    """Return access with a new operator's token, called `name`, for the code of a sign-in link. Raises ClientError."""
    try:
        with Client(url, code) as client:
            issued = client.send(calls.exchange(code, name))
    except ClientError as error:
        if error.status != httpx.codes.UNAUTHORIZED:
            raise
        raise AccessError(
            f"{url} does not take this sign-in link: it was used already or is too old; `rhyme serve --new-link` "
            "prints a new one",
            error.status,
        ) from None
    return Access(url, str(issued["token"]))
