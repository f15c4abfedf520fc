"""The asynchronous client: the methods of `Client`, to be awaited or used in `async for`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import httpx

from rhyme_openrlhf.client import calls, models
from rhyme_openrlhf.client.calls import ENDED, PAGE, Arguments, Call
from rhyme_openrlhf.client.errors import UnreachableError, content, in_words, refusal
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


class AsyncClient:
    """`Client` for asyncio; use it in an `async with` block."""

    def __init__(
        self, url: str = "", token: str = "", *, token_file: str = "", transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        access = resolve(url, token, token_file)
        self.url = access.url
        self._http = httpx.AsyncClient(**options(access), transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def whoami(self) -> models.Who:
        """Return the user of the token."""
        return await self.send(calls.whoami())

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
    ) -> AsyncIterator[models.Run]:
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

    async def run(self, uid: str) -> models.RunDetail:
        """Return a run with its configuration and attempts."""
        return await self.send(calls.run(uid))

    async def find(self, name: str) -> str:
        """Return the uid of a run by its uid, the beginning of its uid, its name, or "last"."""
        lookup = Lookup(name)
        return lookup.uid or lookup.chosen([run async for run in self.pages(*lookup.wanted())])

    async def start(
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
        return await self.send(call)

    async def clone(
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
        return await self.send(call)

    async def stop(self, uid: str) -> models.RunDetail:
        """Ask a run to end after its step, with a checkpoint."""
        return await self.send(calls.stop(uid))

    async def resume(self, uid: str, *, key: str = "") -> models.RunDetail:
        """Continue a run from its last checkpoint; only once for a key."""
        return await self.send(calls.resume(uid, key=key))

    async def wait(
        self, uid: str, *, statuses: Iterable[str] = ENDED, limit_s: float = 86_400.0, poll_s: float = POLL_SECONDS
    ) -> models.RunDetail:
        """Wait until a run has one of `statuses`, by default until it has ended, and return it.

        After `limit_s` seconds it returns the run as it is then.
        """
        wanted, end = frozenset(statuses), time.monotonic() + limit_s
        while True:
            run = await self.run(uid)
            if run["status"] in wanted or time.monotonic() >= end:
                return run
            await asyncio.sleep(poll_s)

    async def edit(
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
        return await self.send(call)

    async def archive(self, uid: str) -> models.RunDetail:
        """Hide a run from the default list."""
        return await self.send(calls.archive(uid))

    async def unarchive(self, uid: str) -> models.RunDetail:
        """Show an archived run in the default list again."""
        return await self.send(calls.unarchive(uid))

    async def delete(self, uid: str) -> None:
        """Delete an archived run that has ended, with everything it reported; its run directory stays."""
        return await self.send(calls.delete(uid))

    async def compare(self, uids: Sequence[str], *, points: int = 500) -> models.Comparison:
        """Return figures and curves of runs side by side."""
        return await self.send(calls.compare(uids, points=points))

    async def config_difference(self, a: str, b: str) -> models.ConfigDiff:
        """Return the settings in which two runs differ."""
        return await self.send(calls.config_difference(a, b))

    async def series(
        self, uid: str, names: Sequence[str], *, points: int = 500, axis: str = "step", from_step: int = 0
    ) -> models.Series:
        """Return curves of a run, such as "reward" or "tokens_per_second"."""
        return await self.send(calls.series(uid, names, points=points, axis=axis, from_step=from_step))

    def steps(
        self, uid: str, *, from_step: int = 0, to_step: int = 2**31 - 1, limit: int = 1_000_000
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield a run's steps with all their figures."""
        return self.pages(calls.steps(uid, from_step=from_step, to_step=to_step), limit)

    def events(
        self, uid: str, *, kinds: Sequence[str] = (), direction: str = "asc", limit: int = 1_000_000
    ) -> AsyncIterator[models.Event]:
        """Yield a run's events."""
        return self.pages(calls.events(uid, kinds=kinds, direction=direction), limit)

    async def follow_events(
        self, uid: str, *, kinds: Sequence[str] = (), after: int = 0
    ) -> AsyncIterator[models.Event | None]:
        """Yield events as they are stored, without end; None at least every 15 seconds."""
        async for one in self.follow(calls.follow_events(uid, kinds=kinds, after=after)):
            yield json.loads(one.data) if one.kind == "message" else None

    async def logs(self, uid: str, attempt: int) -> list[models.LogFile]:
        """Return the log files of an attempt."""
        return await self.send(calls.logs(uid, attempt))

    async def log(self, uid: str, attempt: int, name: str, *, tail: int = 200) -> models.LogChunk:
        """Return the last lines of a log file."""
        return await self.send(calls.log(uid, attempt, name, tail=tail))

    async def follow_log(
        self, uid: str, attempt: int, name: str, *, start: int
    ) -> AsyncIterator[models.LogChunk | None]:
        """Yield what is written to a log file from byte `start` on, without end; None at least every 15 seconds."""
        async for one in self.follow(calls.follow_log(uid, attempt, name, start=start)):
            yield json.loads(one.data) if one.kind == "message" else None

    @asynccontextmanager
    async def export(
        self, uid: str = "", table: str = "steps", *, form: str = "csv"
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the bytes of a run's table, or without a run of the table of all runs, as they arrive."""
        call = calls.export(uid, table, form=form)
        with in_words(self.url):
            async with self._http.stream(call.method, call.path, params=dict(call.params)) as response:
                if response.is_error:
                    await response.aread()
                    raise refusal(response, self.url)
                yield response.aiter_bytes()

    async def import_directory(self, directory: str) -> models.ImportReceipt:
        """Bring in a run directory on the service's machine."""
        return await self.send(calls.import_directory(directory))

    async def send(self, call: Call[Result]) -> Result:
        """Send a request and return its response; repeat it while the service asks to come back later."""
        with in_words(self.url):
            for left in reversed(range(TRIES)):
                response = await self._http.request(
                    call.method, call.path, params=dict(call.params), json=call.body, headers=dict(call.headers)
                )
                if response.status_code not in PUT_OFF or not left:
                    break
                await asyncio.sleep(pause_after(response))
        found: Result = content(response, self.url)
        return found

    async def pages(self, call: Call[Result], most: int = PAGE) -> AsyncIterator[Result]:
        """Yield at most `most` items of a list, one page a request."""
        cursor = None
        while most > 0:
            page = await self.send(call.page(most, cursor))
            for one in page["items"]:
                yield one
            most -= len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    async def follow(self, call: Call[Any]) -> AsyncIterator[SseEvent]:
        """Yield the events of a stream without end; pings come as events of kind "ping"."""
        last_id = ""
        heard, pause = time.monotonic(), 0.5
        while True:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
            try:
                async with self._http.stream(
                    call.method, call.path, params=dict(call.params), headers=headers, timeout=STREAM_TIMEOUT
                ) as response:
                    if response.is_error:
                        await response.aread()
                        if response.status_code < 500 and response.status_code not in PUT_OFF:
                            raise refusal(response, self.url)
                    else:
                        parser = SseParser()
                        async for line in response.aiter_lines():
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
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
