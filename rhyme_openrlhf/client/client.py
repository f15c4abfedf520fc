"""The client: sends the requests of `calls.py`, with a limit for every wait and a sentence for every failure.

Streams go on by Last-Event-ID after a broken connection, so nothing is shown twice or missed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import httpx

from rhyme_openrlhf.client import calls, models
from rhyme_openrlhf.client.access import Access
from rhyme_openrlhf.client.calls import ENDED, PAGE, Arguments, Call
from rhyme_openrlhf.client.errors import AccessError, ClientError, UnreachableError, content, in_words, refusal
from rhyme_openrlhf.client.sse import SseEvent, SseParser
from rhyme_openrlhf.client.transport import (
    GIVE_UP_SECONDS,
    LONGEST_PAUSE_SECONDS,
    PUT_OFF,
    STREAM_TIMEOUT,
    TRIES,
    Lookup,
    options,
    pause_after,
    resolve,
)

POLL_SECONDS = 2.0
Result = TypeVar("Result")


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

    def whoami(self) -> models.Who:
        """Return the user of the token."""
        return self.send(calls.whoami())

    def runs(
        self,
        *,
        status: Sequence[str] = (),
        tag: Sequence[str] = (),
        experiment: str = "",
        text: str = "",
        filter: str = "",
        columns: Sequence[str] = (),
        archived: str = "no",
        sort: str = "created_at",
        direction: str = "desc",
        limit: int = 50,
    ) -> Iterator[models.Run]:
        """Yield runs that match all conditions, in order; `calls.runs` explains them."""
        call = calls.runs(
            status=status,
            tag=tag,
            experiment=experiment,
            text=text,
            filter=filter,
            columns=columns,
            archived=archived,
            sort=sort,
            direction=direction,
        )
        return self.pages(call, limit)

    def run(self, uid: str) -> models.RunDetail:
        """Return a run with its configuration and attempts."""
        return self.send(calls.run(uid))

    def find(self, name: str) -> str:
        """Return the uid of a run by its uid, the beginning of its uid, its name, or "last"."""
        lookup = Lookup(name)
        return lookup.uid or lookup.chosen(list(self.pages(*lookup.wanted())))

    def start(
        self,
        command: str = "",
        *,
        arguments: Arguments | None = None,
        name: str = "",
        experiment: str = "",
        tags: Sequence[str] = (),
        notes: str = "",
        key: str = "",
    ) -> models.RunDetail:
        """Start a run from a command line, from arguments by group, or from both (`calls.start`)."""
        call = calls.start(
            command, arguments=arguments, name=name, experiment=experiment, tags=tags, notes=notes, key=key
        )
        return self.send(call)

    def clone(
        self,
        uid: str,
        *,
        edits: Arguments | None = None,
        name: str = "",
        experiment: str = "",
        tags: Sequence[str] = (),
        notes: str = "",
        key: str = "",
    ) -> models.RunDetail:
        """Start a run with another one's settings, some of them changed."""
        call = calls.clone(uid, edits=edits, name=name, experiment=experiment, tags=tags, notes=notes, key=key)
        return self.send(call)

    def stop(self, uid: str) -> models.RunDetail:
        """Ask a run to end after its step, with a checkpoint."""
        return self.send(calls.stop(uid))

    def resume(self, uid: str, *, key: str = "") -> models.RunDetail:
        """Continue a run from its last checkpoint; only once for a key."""
        return self.send(calls.resume(uid, key=key))

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

    def edit(
        self,
        uid: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
        experiment: str | None = None,
        based_on: str = "",
    ) -> models.RunDetail:
        """Change what describes a run; with `based_on` only if nobody was faster (`calls.edit`)."""
        call = calls.edit(uid, name=name, notes=notes, tags=tags, experiment=experiment, based_on=based_on)
        return self.send(call)

    def archive(self, uid: str) -> models.RunDetail:
        """Hide a run from the default list."""
        return self.send(calls.archive(uid))

    def unarchive(self, uid: str) -> models.RunDetail:
        """Show an archived run in the default list again."""
        return self.send(calls.unarchive(uid))

    def delete(self, uid: str) -> None:
        """Delete an archived run that has ended, with everything it reported; its run directory stays."""
        return self.send(calls.delete(uid))

    def compare(self, uids: Sequence[str], *, points: int = 500) -> models.Comparison:
        """Return figures and curves of runs side by side."""
        return self.send(calls.compare(uids, points=points))

    def config_difference(self, a: str, b: str) -> models.ConfigDiff:
        """Return the settings in which two runs differ."""
        return self.send(calls.config_difference(a, b))

    def series(
        self, uid: str, names: Sequence[str], *, points: int = 500, axis: str = "step", from_step: int = 0
    ) -> models.Series:
        """Return curves of a run, such as "reward" or "tokens_per_second"."""
        return self.send(calls.series(uid, names, points=points, axis=axis, from_step=from_step))

    def steps(
        self, uid: str, *, from_step: int = 0, to_step: int = 2**31 - 1, limit: int = 1_000_000
    ) -> Iterator[dict[str, Any]]:
        """Yield a run's steps with all their figures."""
        return self.pages(calls.steps(uid, from_step=from_step, to_step=to_step), limit)

    def events(
        self, uid: str, *, kinds: Sequence[str] = (), direction: str = "asc", limit: int = 1_000_000
    ) -> Iterator[models.Event]:
        """Yield a run's events."""
        return self.pages(calls.events(uid, kinds=kinds, direction=direction), limit)

    def follow_events(self, uid: str, *, kinds: Sequence[str] = (), after: int = 0) -> Iterator[models.Event | None]:
        """Yield events as they are stored, without end; None at least every 15 seconds."""
        for one in self.follow(calls.follow_events(uid, kinds=kinds, after=after)):
            yield json.loads(one.data) if one.kind == "message" else None

    def logs(self, uid: str, attempt: int) -> list[models.LogFile]:
        """Return the log files of an attempt."""
        return self.send(calls.logs(uid, attempt))

    def log(self, uid: str, attempt: int, name: str, *, tail: int = 200) -> models.LogChunk:
        """Return the last lines of a log file."""
        return self.send(calls.log(uid, attempt, name, tail=tail))

    def follow_log(self, uid: str, attempt: int, name: str, *, start: int) -> Iterator[models.LogChunk | None]:
        """Yield what is written to a log file from byte `start` on, without end; None at least every 15 seconds."""
        for one in self.follow(calls.follow_log(uid, attempt, name, start=start)):
            yield json.loads(one.data) if one.kind == "message" else None

    @contextmanager
    def export(self, uid: str = "", table: str = "steps", *, form: str = "csv") -> Iterator[Iterator[bytes]]:
        """Give the bytes of a run's table, or without a run of the table of all runs, as they arrive."""
        call = calls.export(uid, table, form=form)
        with in_words(self.url), self._http.stream(call.method, call.path, params=dict(call.params)) as response:
            if response.is_error:
                response.read()
                raise refusal(response, self.url)
            yield response.iter_bytes()

    def import_directory(self, directory: str) -> models.ImportReceipt:
        """Bring in a run directory on the service's machine."""
        return self.send(calls.import_directory(directory))

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

    def pages(self, call: Call[Result], most: int = PAGE) -> Iterator[Result]:
        """Yield at most `most` items of a list, one page a request."""
        cursor = None
        while most > 0:
            page = self.send(call.page(most, cursor))
            yield from page["items"]
            most -= len(page["items"])
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
