"""Live streams over a real socket: resumed without loss or doubling, counted, and ended with their reader's right."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import event

from rhyme_openrlhf.api.ingest.store_batch import ingest
from rhyme_openrlhf.api.ingest.validation import prepare
from rhyme_openrlhf.api.store import credentials

STREAM = f"/api/v1/runs/{'a' * 16}/events/stream"


@pytest.fixture
def served(api: Any, starts_listener: None) -> Iterator[str]:
    """The base URL of `api` behind a real server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(api.app, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        end = time.monotonic() + 20
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        server.force_exit = True
        thread.join(timeout=20)


@contextlib.contextmanager
def reading(
    url: str, token: str, path: str = STREAM, last_id: str | None = None, **parameters: Any
) -> Iterator[Iterator[tuple[str, str, Any]]]:
    """The stream's (event, id, data). `token`: or a session's cookie."""
    caller = {"Cookie": token} if "=" in token else {"Authorization": f"Bearer {token}"}
    headers = {**caller, **({"Last-Event-ID": last_id} if last_id else {})}
    # A proxy of the environment is not for this machine's own addresses.
    # Nothing here speaks TLS; reading all certificates for each client takes longer than most streams here.
    client = httpx.Client(trust_env=False, verify=False, timeout=20)
    with client, client.stream("GET", url + path, params=parameters, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield parsed(answer.iter_lines())


def parsed(lines: Iterator[str]) -> Iterator[tuple[str, str, Any]]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields.get("event", "message"), fields["id"], json.loads(fields["data"])
            fields = {}


def test_a_reader_that_comes_back_misses_nothing_and_gets_nothing_twice(
    api: Any, served: str, record: Callable[..., list[dict[str, Any]]]
) -> None:
    api.announce()
    events = record(steps=20)
    writer = threading.Thread(target=lambda: [api.send(events[i : i + 7]) for i in range(0, len(events), 7)])
    seen: list[tuple[str, int]] = []
    last: str | None = None
    writer.start()
    # Lets go after every few events, wherever that is.
    for part in range(1, 200):
        with reading(served, api.tokens["viewer"], last_id=last, after=0) as stream:
            for kind, identity, data in stream:
                last = identity
                if kind == "open":
                    continue
                seen.append((data["source"], data["sequence"]))
                if len(seen) % (5 + part % 11) == 0 or len(seen) == len(events):
                    break
        if len(seen) == len(events):
            break
    writer.join()
    assert seen == [(event["source"], event["sequence"]) for event in events]


def test_a_stream_begins_now_and_names_where_that_is(reported: Any, served: str) -> None:
    with reading(served, reported.tokens["viewer"]) as stream:
        kind, identity, _ = next(stream)
        newest = reported.viewer.get(
            f"/api/v1/runs/{'a' * 16}/events", params={"direction": "desc", "limit": 1}
        ).json()["items"][0]["id"]
        assert (kind, identity) == ("open", str(newest))
        row = {"kind": "note", "time": 1.0, "source": "late", "sequence": 0, "level": "info", "text": "now\nhere"}
        reported.send([row])
        assert next(stream)[2]["body"]["text"] == "now\nhere"


def test_only_the_kinds_asked_for(reported: Any, served: str) -> None:
    with reading(served, reported.tokens["viewer"], after=0, kind="train_step") as stream:
        assert [next(stream)[2].get("kind") for _ in range(4)] == [None, "train_step", "train_step", "train_step"]


@pytest.mark.parametrize("last_id", ["x", "-1", "1.5", "9" * 19, "9" * 20, "\N{SUPERSCRIPT TWO}"])
def test_an_id_that_is_none_is_refused(reported: Any, last_id: str) -> None:
    answer = reported.viewer.get(STREAM, headers={"Last-Event-ID": last_id.encode("utf-8")})
    assert answer.status_code == 422


def test_a_stream_ends_when_its_token_is_revoked(reported: Any, served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported.service.live.rights, "seconds", 0.1)
    token = reported.operator.post("/api/v1/tokens", json={"name": "t", "role": "viewer"}).json()
    with reading(served, token["token"]) as stream:
        next(stream)
        reported.operator.delete(f"/api/v1/tokens/{token['id']}")
        assert list(stream) == []


def test_events_that_another_process_stored_are_found_by_a_look(reported: Any, served: str) -> None:
    row = {"kind": "note", "time": 1.0, "source": "late", "sequence": 0, "level": "info", "text": "not told"}
    with reading(served, reported.tokens["viewer"]) as stream:
        assert next(stream)[0] == "open"
        with reported.service.database.writing() as session:
            ingest(session, "b" * 16, prepare([row]), time.time(), alive=True)
        assert next(stream)[2]["body"]["text"] == "not told"


def test_many_idle_streams_ask_the_database_no_more_than_one_does(reported: Any, served: str) -> None:
    paths = [STREAM, "/api/v1/live/runs"] * 8
    asked: list[str] = []
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(reading(served, reported.tokens["viewer"], path)) for path in paths]
        for stream in streams:
            next(stream)
        time.sleep(0.2)
        began = time.monotonic()
        event.listen(reported.service.database.engine, "before_cursor_execute", lambda *call: asked.append(call[2]))
        # Streams that ask for themselves have asked as often in one tick.
        while (selects := sum(one.startswith("SELECT") for one in asked)) < 24:
            assert time.monotonic() - began < 20
            time.sleep(0.01)
        ticks = (time.monotonic() - began) / reported.service.settings.live_poll_s + 1
    # A tick looks at runs (two questions: runs, tags) and at events (one); who may still read is asked more seldom.
    assert selects <= 4 * ticks


def test_streams_are_counted(reported: Any, served: str) -> None:
    streams = reported.service.limits.streams
    with reading(served, reported.tokens["viewer"]) as stream:
        next(stream)
        assert streams.taken == 1
        for _ in range(reported.service.settings.streams - 1):
            streams.all.acquire()
        answer = reported.viewer.get(STREAM)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        for _ in range(reported.service.settings.streams - 1):
            streams.all.release()
    end = time.monotonic() + 20
    while streams.taken and time.monotonic() < end:
        time.sleep(0.02)
    assert streams.taken == 0
    assert "rhyme:streams_open 0.0" in reported.viewer.get("/metrics").text


def test_one_token_takes_a_quarter_of_the_streams(reported: Any, served: str) -> None:
    streams, most = reported.service.limits.streams, reported.service.settings.streams // 4
    token, kept = reported.tokens["viewer"], []
    with contextlib.ExitStack() as open_ones:
        for number in range(most):
            path = STREAM if number % 2 else "/api/v1/live/runs"
            kept.append(open_ones.enter_context(reading(served, token, path)))
            next(kept[-1])
        assert streams.taken == most
        for path in (STREAM, "/api/v1/live/runs"):
            refused = reported.viewer.get(path)
            assert refused.status_code == 503 and "of this token are open already" in refused.json()["detail"]
        next(open_ones.enter_context(reading(served, reported.tokens["operator"])))


def signed_in_by_link(api: Any, url: str) -> str:
    """The cookie of a person whom a link has signed in."""
    with api.service.database.writing() as session:
        code = credentials.issue_code(session, time.time(), 60)
    answer = httpx.post(f"{url}/api/v1/session", json={"token": code}, trust_env=False, verify=False)
    assert answer.status_code == 200, answer.text
    return answer.headers["set-cookie"].partition(";")[0]


def test_each_person_with_a_link_has_a_share(reported: Any, served: str) -> None:
    """All sessions of links belong to one token."""
    most = reported.service.settings.streams // 4
    one, another = (signed_in_by_link(reported, served) for _ in range(2))
    with contextlib.ExitStack() as open_ones:
        mine = [open_ones.enter_context(reading(served, one)) for _ in range(most)]
        for stream in mine:
            next(stream)
        with pytest.raises(AssertionError, match="of this token are open already"):
            open_ones.enter_context(reading(served, one))
        next(open_ones.enter_context(reading(served, another)))


def test_a_person_gets_a_stream_when_others_have_taken_all(reported: Any, served: str) -> None:
    streams, count = reported.service.limits.streams, reported.service.settings.streams
    token = reported.tokens["viewer"]
    with contextlib.ExitStack() as open_ones:
        mine = [open_ones.enter_context(reading(served, token)) for _ in range(3)]
        for stream in mine:
            next(stream)
        for number in range(count - 3):
            streams.acquire(f"person {number}", lambda: pytest.fail("one with a single stream lost it"))
        theirs = open_ones.enter_context(reading(served, reported.tokens["operator"]))
        next(theirs)
        # The oldest one of who has most ends in order, and the place is taken again.
        assert not list(mine[0]) and streams.taken == count
        # Now nobody has two more than this one.
        with pytest.raises(AssertionError, match=f"{count} live streams are open already"):
            open_ones.enter_context(reading(served, reported.tokens["operator"]))
        assert streams.taken == count


def test_a_log_is_followed_and_resumed(api: Any, served: str) -> None:
    api.announce()
    log = api.root / ("a" * 16) / "logs" / "driver.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")
    path = f"/api/v1/runs/{'a' * 16}/attempts/1/log-stream/driver.log"
    with reading(served, api.tokens["viewer"], path, tail=1) as stream:
        assert next(stream)[:2] == ("open", "4")
        assert next(stream)[2]["text"] == "two\n"
        with log.open("a") as file:
            file.write("three\n")
        _, identity, piece = next(stream)
        assert piece["text"] == "three\n"
    with log.open("a") as file:
        file.write("four\n")
    with reading(served, api.tokens["viewer"], path, last_id=identity) as stream:
        next(stream)
        assert next(stream)[2]["text"] == "four\n"
        log.write_text("anew\n")
        assert next(stream)[2]["text"] == "anew\n"


def test_changes_of_runs_are_told(reported: Any, served: str) -> None:
    with reading(served, reported.tokens["viewer"], "/api/v1/live/runs") as stream:
        kind, _, run = next(stream)
        assert kind == "message" and run["uid"] == "a" * 16
        reported.operator.patch(f"/api/v1/runs/{'a' * 16}", json={"name": "renamed"})
        assert next(stream)[2]["name"] == "renamed"
