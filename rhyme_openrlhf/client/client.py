"""The clients: they send the requests of `calls.py`, with a limit for every wait and a sentence for every failure.

Streams go on by Last-Event-ID after a broken connection, so nothing is shown twice or missed.

Invariant: everything is written once, for `AsyncClient`. `Client` runs the same coroutines without an event loop.
There they await httpx's blocking client and a blocking sleep, so they are never suspended.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

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


class Sent(Generic[Given, Result]):
    """A method that sends the request of `make`, with its parameters and description."""

    def __init__(self, make: Callable[Given, Call[Result]]) -> None:
        self._make = make

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Given, Call[Result]]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[Given, Result]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[Given, Coroutine[Any, Any, Result]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Callable[Given, Any]:
        return self._make if client is None else _after(self._make, client.send)


class Listed(Generic[Given, Result]):
    """A method that yields the items of the list of `make`."""

    def __init__(self, make: Callable[Given, Call[Result]]) -> None:
        self._make = make

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Given, Call[Result]]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[Given, Iterator[Result]]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[Given, AsyncIterator[Result]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Callable[Given, Any]:
        return self._make if client is None else _after(self._make, client.pages)


def _after(make: Callable[Given, Call[Any]], send: Callable[[Call[Any]], Any]) -> Callable[Given, Any]:
    @functools.wraps(make)
    def method(*given: Given.args, **named: Given.kwargs) -> Any:
        return send(make(*given, **named))

    return method


class _Requests:
    """The requests of both clients."""

    whoami = Sent(calls.whoami)
    tokens = Listed(calls.tokens)
    make_token = Sent(calls.make_token)
    revoke_token = Sent(calls.revoke_token)
    audit = Listed(calls.audit)
    webhooks = Listed(calls.webhooks)
    make_webhook = Sent(calls.make_webhook)
    edit_webhook = Sent(calls.edit_webhook)
    delete_webhook = Sent(calls.delete_webhook)
    test_webhook = Sent(calls.test_webhook)
    deliveries = Listed(calls.deliveries)
    runs = Listed(calls.runs)
    views = Listed(calls.views)
    save_view = Sent(calls.save_view)
    rename_view = Sent(calls.rename_view)
    delete_view = Sent(calls.delete_view)
    run = Sent(calls.run)
    queue = Sent(calls.queue)
    start = Sent(calls.start)
    sweep = Sent(calls.sweep)
    experiments = Listed(calls.experiments)
    groups = Sent(calls.groups)
    stop_experiment = Sent(calls.stop_experiment)
    clone = Sent(calls.clone)
    stop = Sent(calls.stop)
    resume = Sent(calls.resume)
    edit = Sent(calls.edit)
    archive = Sent(calls.archive)
    unarchive = Sent(calls.unarchive)
    delete = Sent(calls.delete)
    compare = Sent(calls.compare)
    config_difference = Sent(calls.config_difference)
    series = Sent(calls.series)
    steps = Listed(calls.steps)
    events = Listed(calls.events)
    logs = Sent(calls.logs)
    log = Sent(calls.log)
    files = Sent(calls.files)
    sampled_steps = Sent(calls.sampled_steps)
    sample_groups = Listed(calls.sample_groups)
    import_directory = Sent(calls.import_directory)


class AsyncClient(_Requests):
    """`Client` for asyncio; use it in an `async with` block."""

    _pause: Callable[[float], Awaitable[None]] = staticmethod(asyncio.sleep)

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

    async def find(self, name: str) -> str:
        """Return the uid of a run by its uid, the beginning of its uid, its name, or "last"."""
        lookup = Lookup(name)
        return lookup.uid or lookup.chosen([run async for run in self.pages(lookup.candidates())])

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
            await self._pause(poll_s)

    def follow_events(
        self, uid: str, *, kinds: Sequence[str] = (), after: int = 0
    ) -> AsyncIterator[models.Event | None]:
        """Yield events as they are stored, without end; None at least every 15 seconds."""
        return self._messages(calls.follow_events(uid, kinds=kinds, after=after))

    def follow_log(self, uid: str, attempt: int, name: str, *, start: int) -> AsyncIterator[models.LogChunk | None]:
        """Yield what is written to a log file from byte `start` on, without end; None at least every 15 seconds."""
        return self._messages(calls.follow_log(uid, attempt, name, start=start))

    async def _messages(self, call: Call[Any]) -> AsyncIterator[Any]:
        async with aclosing(self.follow(call)) as found:
            async for one in found:
                yield json.loads(one.data) if one.kind == "message" else None

    @asynccontextmanager
    async def export(
        self, uid: str = "", table: str = "steps", *, form: str = "csv"
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the bytes of a run's table, or without a run of the table of all runs, as they arrive."""
        async with self._bytes(calls.export(uid, table, form=form)) as found:
            yield found

    @asynccontextmanager
    async def download(self, uid: str, attempt: int, kinds: Sequence[str] = ()) -> AsyncIterator[AsyncIterator[bytes]]:
        """Give the bytes of an archive (.tar.gz) of an attempt's files, as they arrive.

        Without `kinds`: record, logs and samples.
        """
        async with self._bytes(calls.download(uid, attempt, kinds)) as found:
            yield found

    async def samples(self, uid: str, step: int | None = None) -> Any:
        """Return all samples of a step, by default the newest, as a pandas.DataFrame: a row a sample."""
        try:
            import pandas
        except ImportError:
            raise ClientError("a data frame needs pandas: pip install pandas") from None
        async with self._bytes(calls.sample_table(uid, step)) as found:
            content = b"".join([piece async for piece in found])
        return pandas.read_parquet(io.BytesIO(content))

    @asynccontextmanager
    async def _bytes(self, call: Call[Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        with in_words(self.url):
            async with self._http.stream(call.method, call.path, params=dict(call.params)) as response:
                if response.is_error:
                    await response.aread()
                    raise refusal(response, self.url)
                yield response.aiter_bytes()

    async def send(self, call: Call[Result]) -> Result:
        """Send a request and return its response; repeat it while the service asks to come back later."""
        with in_words(self.url):
            for left in reversed(range(TRIES)):
                response = await self._http.request(
                    call.method, call.path, params=dict(call.params), json=call.body, headers=dict(call.headers)
                )
                if response.status_code not in PUT_OFF or not left:
                    break
                await self._pause(pause_after(response))
        found: Result = content(response, self.url)
        return found

    async def pages(self, call: Call[Result]) -> AsyncIterator[Result]:
        """Yield the items of a list, one page a request."""
        cursor, left = None, call.most
        while left > 0:
            page = await self.send(call.page(left, cursor))
            for one in page["items"]:
                yield one
            left -= len(page["items"])
            cursor = page["next_cursor"]
            if cursor is None:
                return

    async def follow(self, call: Call[Any]) -> AsyncGenerator[SseEvent, None]:
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
            await self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class _BlockingResponse:
    """A response of httpx's blocking client, read by the asynchronous one's methods."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    async def aread(self) -> bytes:
        return self._response.read()

    async def aiter_lines(self) -> AsyncIterator[str]:
        for line in self._response.iter_lines():
            yield line

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        for piece in self._response.iter_bytes():
            yield piece


class _BlockingHttp:
    """httpx's blocking client behind the asynchronous one's methods."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    async def request(self, *given: Any, **named: Any) -> httpx.Response:
        return self._http.request(*given, **named)

    @asynccontextmanager
    async def stream(self, *given: Any, **named: Any) -> AsyncIterator[_BlockingResponse]:
        with self._http.stream(*given, **named) as response:
            yield _BlockingResponse(response)

    async def aclose(self) -> None:
        self._http.close()


class _Blocking(AsyncClient):
    """An asynchronous client whose coroutines are never suspended."""

    def __init__(self, access: Access, transport: httpx.BaseTransport | None) -> None:
        self.url = access.url
        self._http = cast(httpx.AsyncClient, _BlockingHttp(httpx.Client(**options(access), transport=transport)))

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _finished(work: Awaitable[Result]) -> Result:
    """Return the result of a coroutine that is never suspended."""
    try:
        cast(Coroutine[Any, Any, Result], work).send(None)
    except StopIteration as end:
        return cast(Result, end.value)
    raise AssertionError("a blocking client's coroutine was suspended")


def _one_by_one(found: AsyncIterator[Result]) -> Iterator[Result]:
    try:
        while True:
            yield _finished(anext(found))
    except StopAsyncIteration:
        return
    finally:
        _finished(cast(Any, found).aclose())


def _at_once(
    method: Callable[Concatenate[AsyncClient, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Client, Given], Result]:
    @functools.wraps(method)
    def face(client: Client, /, *given: Given.args, **named: Given.kwargs) -> Result:
        return _finished(method(client._inner, *given, **named))

    return face


def _items(
    method: Callable[Concatenate[AsyncClient, Given], AsyncIterator[Result]],
) -> Callable[Concatenate[Client, Given], Iterator[Result]]:
    @functools.wraps(method)
    def face(client: Client, /, *given: Given.args, **named: Given.kwargs) -> Iterator[Result]:
        return _one_by_one(method(client._inner, *given, **named))

    return face


def _pieces(
    method: Callable[Concatenate[AsyncClient, Given], AbstractAsyncContextManager[AsyncIterator[bytes]]],
) -> Callable[Concatenate[Client, Given], AbstractContextManager[Iterator[bytes]]]:
    @functools.wraps(method)
    @contextmanager
    def face(client: Client, /, *given: Given.args, **named: Given.kwargs) -> Iterator[Iterator[bytes]]:
        held = method(client._inner, *given, **named)
        pieces = _finished(held.__aenter__())
        try:
            yield _one_by_one(pieces)
        finally:
            _finished(held.__aexit__(*sys.exc_info()))

    return face


class Client(_Requests):
    """Requests to one control plane; use it in a `with` block.

    Without arguments it uses the address and token of `rhyme runs`. A run is named by its uid; `find` gives the uid of
    a name. Methods raise ClientError.
    """

    def __init__(
        self, url: str = "", token: str = "", *, token_file: str = "", transport: httpx.BaseTransport | None = None
    ) -> None:
        self._inner = _Blocking(resolve(url, token, token_file), transport)
        self.url = self._inner.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    close = _at_once(AsyncClient.close)
    find = _at_once(AsyncClient.find)
    wait = _at_once(AsyncClient.wait)
    follow_events = _items(AsyncClient.follow_events)
    follow_log = _items(AsyncClient.follow_log)
    export = _pieces(AsyncClient.export)
    download = _pieces(AsyncClient.download)
    samples = _at_once(AsyncClient.samples)
    send = _at_once(AsyncClient.send)
    pages = _items(AsyncClient.pages)
    follow = _items(AsyncClient.follow)


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
