"""The Python clients: both have the same methods, their types are the service's, and they speak to a real service."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import pytest

pytest.importorskip("rhyme_openrlhf.api.app")

from rhyme_openrlhf.client import AccessError, AsyncClient, Client, ClientError, UnreachableError, models
from rhyme_openrlhf.client.errors import refusal
from tests.api.http_service import BASE, api, make_api, numbered, record, store  # noqa: F401 (fixtures)

RUN = "a" * 16
# The types of `models.py`, and their names in the description of the API.
DESCRIBED = {
    "Run": "RunSummary", "Attempt": "AttemptView", "RunDetail": "RunDetail", "Event": "EventView", "Curve": "CurveView",
    "Series": "SeriesView", "LogFile": "LogFileView", "LogChunk": "LogChunk", "Compared": "Compared",
    "Comparison": "Comparison", "Difference": "Difference", "ConfigDiff": "ConfigDiff",
    "SampledSteps": "SampledSteps", "SampleGroup": "SampleGroup",
    "RunFile": "RunFileView", "RunFiles": "RunFiles", "ImportReceipt": "ImportReceipt", "Who": "Who",
    "Experiment": "ExperimentView", "SavedView": "SavedViewView", "SweptRun": "SweptRun",
    "Spread": "SpreadView", "MeanCurve": "MeanCurveView", "GroupFigure": "GroupFigureView", "GroupedRun": "GroupedRun",
    "Group": "GroupView", "Groups": "Groups", "Sweep": "Sweep",
    "Token": "TokenView", "IssuedToken": "IssuedToken", "AuditEntry": "AuditEntryView", "Phase": "PhaseView",
    "EarlierRun": "EarlierRunView", "Verdict": "VerdictView", "Reason": "ReasonView",
    "QueuedRun": "QueuedRunView", "Queue": "QueueView",
    "Webhook": "WebhookView", "IssuedWebhook": "IssuedWebhook", "Delivery": "DeliveryView",
}  # fmt: skip


def public(kind: type) -> dict[str, Any]:
    return {name: one for name, one in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_both_clients_have_the_same_methods() -> None:
    one, other = public(Client), public(AsyncClient)
    assert set(one) == set(other) and len(one) > 45
    for name, method in one.items():
        mine, theirs = inspect.signature(method), inspect.signature(other[name])
        assert mine.parameters == theirs.parameters, name


def test_types_are_those_of_the_service(api: Any) -> None:  # noqa: F811
    described = api.app.openapi()["components"]["schemas"]
    kinds = {
        name: kind
        for name, kind in vars(models).items()
        if inspect.isclass(kind) and kind.__module__ == models.__name__
    }
    assert set(kinds) == set(DESCRIBED)
    for name, kind in kinds.items():
        assert set(get_type_hints(kind)) == set(described[DESCRIBED[name]]["properties"]), name


def asynchronous(api: Any, role: str = "operator") -> AsyncClient:  # noqa: F811
    return AsyncClient(BASE, api.tokens[role], transport=httpx.ASGITransport(app=api.app))


def test_the_asynchronous_client_reads_and_edits(api: Any, record: Any) -> None:  # noqa: F811
    api.announce()
    api.send(record())

    async def walk() -> None:
        async with asynchronous(api) as client:
            assert (await client.whoami())["role"] == "operator"
            assert [run["uid"] async for run in client.runs(text="a run")] == [RUN]
            assert await client.find("last") == await client.find("a run") == await client.find("aaaa") == RUN
            assert [step["step"] async for step in client.steps(RUN)] == [1, 2, 3]
            assert len([one async for one in client.events(RUN, limit=5)]) == 5
            (curve,) = (await client.series(RUN, ["reward"]))["curves"]
            assert curve["count"] == 3
            run = await client.wait(RUN)
            assert run["status"] == "succeeded"
            edited = await client.edit(RUN, tags=["b", "a"], based_on=run["etag"])
            assert edited["tags"] == ["a", "b"]
            with pytest.raises(ClientError) as late:
                await client.edit(RUN, notes="late", based_on=run["etag"])
            assert (late.value.status, late.value.code) == (412, "changed_meanwhile")
            async with client.export(RUN, "steps") as pieces:
                assert (b"".join([piece async for piece in pieces])).count(b"\r\n") == 4
            with pytest.raises(ClientError, match="several|no run"):
                await client.find("nothing")
            await client.archive(RUN)
            await client.delete(RUN)
            with pytest.raises(ClientError) as gone:
                await client.run(RUN)
            assert gone.value.code == "not_found"
        async with asynchronous(api, "viewer") as viewer:
            with pytest.raises(AccessError) as refused:
                await viewer.stop(RUN)
            assert refused.value.code == "forbidden"

    asyncio.run(walk())


def test_a_client_without_a_service_says_so() -> None:
    with (
        Client("http://127.0.0.1:9", "token") as client,
        pytest.raises(UnreachableError, match="no control plane answers"),
    ):
        client.run(RUN)


def test_a_refused_argument_is_named_as_its_option() -> None:
    errors = [{"field": "body.arguments.ckpt.path", "message": "must be an absolute path"}]
    answer = httpx.Response(422, json={"detail": "the run cannot be started", "errors": errors})
    told = str(refusal(answer, BASE))
    assert told == "the run cannot be started (--ckpt.path: must be an absolute path)"


class Stream(httpx.SyncByteStream):
    """Two events; says when it was closed."""

    closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield b'id: 1\ndata: {"id": 1}\n\n'
        yield b'id: 2\ndata: {"id": 2}\n\n'

    def close(self) -> None:
        self.closed = True


def test_the_blocking_client_runs_inside_an_event_loop_and_ends_what_is_no_longer_read() -> None:
    stream = Stream()
    found = httpx.MockTransport(lambda request: httpx.Response(200, stream=stream))

    async def inside() -> None:
        with Client(BASE, "token", transport=found) as client:
            for event in client.follow_events(RUN):
                assert event == {"id": 1} and not stream.closed
                break
            assert stream.closed

    asyncio.run(inside())
