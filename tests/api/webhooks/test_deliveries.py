"""Messages of webhooks to real receivers: signed, tried again, sent once by several services."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from typing import Any

import pytest
from sqlalchemy import select, update

from rhyme_openrlhf.api.ingest.announce import Announcement, announce
from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.credentials import issue_token
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Run, Token, Webhook, WebhookDelivery
from rhyme_openrlhf.api.store.webhooks import KEPT_SECONDS, NO_OPERATOR, active_ids, forget_old, new_secret
from rhyme_openrlhf.api.webhooks import deliveries, sending
from rhyme_openrlhf.api.webhooks.deliveries import CLAIM_SECONDS, LONGEST_PAUSE, PAUSES, Deliveries, next_try
from tests.api.webhooks.receivers import Receiver, receiving
from tests.api.webhooks.stored import webhook

UID = "a" * 16


def ends(store: Database, status: str, uid: str = UID, message: str = "", origin: str = "reported") -> None:
    """A run is announced, runs and ends."""
    attempt_uid = uid[::-1][:-1] + "b"
    with store.writing() as session:
        announce(session, Announcement(attempt_uid, uid, "a <run>", "/runs/a", {}, origin), time.time())
    with store.writing() as session:
        run, attempts = run_status.lock_run(session, session.scalars(select(Run.id).where(Run.uid == uid)).one())
        run_status.began(run, attempts, attempts[-1], 5.0)
        run_status.move(run, attempts, attempts[-1], status, message, 9.0)


def log(store: Database) -> list[WebhookDelivery]:
    with store.reading() as session:
        return list(session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.id)))


def turns(service: Deliveries, number: int = 1) -> None:
    async def walk() -> None:
        for _ in range(number):
            await service.turn()
            await service.settled()

    asyncio.run(walk())


@pytest.fixture
def receiver(starts_listener: None) -> Any:
    with receiving() as found:
        yield found


def test_the_end_of_a_run_is_told_once_and_signed(database: Database, receiver: Receiver) -> None:
    rule = webhook(database, receiver.url, "failed", "finished")
    webhook(database, receiver.url, "stalled")
    ends(database, "failed", message="out of memory")
    ends(database, "stopped", "c" * 16)
    ends(database, "succeeded", "d" * 16, origin="imported")
    turns(Deliveries(database, False), 2)
    assert receiver.verified(rule.secret) and not receiver.verified(new_secret())
    first, second = receiver.contents()
    assert first["event"] == "failed" and first["time"] == 9.0 and first["webhook"] == "team"
    assert first["text"] == "Run “a <run>” has ended as failed: out of memory"
    assert first["run"]["uid"] == UID and first["run"]["url"] == f"http://here/runs/{UID}"
    assert first["run"]["verdict"] == "Failed after step 0: out of memory."
    assert second["event"] == "finished" and second["run"]["status"] == "stopped"
    assert second["run"]["verdict"] == "Stopped after step 0."
    assert [(one.status, one.error, one.tries, one.next_at) for one in log(database)] == [(200, "", 1, None)] * 2


def test_a_message_exists_exactly_if_its_end_does(database: Database, receiver: Receiver) -> None:
    webhook(database, receiver.url, "failed")
    with pytest.raises(ZeroDivisionError), database.writing() as session:
        announce(session, Announcement("b" * 16, UID, "a run", "/runs/a", {}), 1.0)
        run, attempts = run_status.lock_run(session, session.scalars(select(Run.id)).one())
        run_status.move(run, attempts, attempts[-1], "failed", "", 9.0)
        session.flush()
        raise ZeroDivisionError
    assert log(database) == []
    ends(database, "lost")
    # It reports again, and is lost again.
    with database.writing() as session:
        run, attempts = run_status.lock_run(session, session.scalars(select(Run.id)).one())
        for status in ("running", "lost"):
            assert run_status.move(run, attempts, attempts[-1], status, "", 9.0)
    assert [one.key for one in log(database)] == [f"{'a' * 15}b_lost"]


def test_slacks_form_calls_nobody(database: Database, receiver: Receiver) -> None:
    webhook(database, receiver.url, "failed", form="slack")
    ends(database, "failed", message="<!channel>\n&")
    turns(Deliveries(database, False))
    text = "Run “a &lt;run&gt;” has ended as failed: &lt;!channel&gt; &amp;"
    verdict = "Failed after step 0: &lt;!channel&gt; &amp;."
    assert receiver.contents() == [{"text": f"{text}\n{verdict}\nhttp://here/runs/{UID}"}]


LYING = {
    "no HTTP": b"\x16\x03\x01 I speak something else\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n",
    "less than it says": b"HTTP/1.1 500 No\r\nContent-Length: 900\r\n\r\nlittle",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
    "a refusal": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 23\r\n\r\n<b>no\x1b[31m</b>\x00 service",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", LYING)
def test_what_a_lying_receiver_says_is_no_success(database: Database, receiver: Receiver, kind: str) -> None:
    with receiving() as elsewhere:
        receiver.answer = LYING[kind].replace(b"%s", elsewhere.url.encode())
        webhook(database, receiver.url, "failed")
        ends(database, "failed")
        # A clock that stands still: on a busy machine seconds pass between a try and the look at it.
        now = time.time()
        turns(Deliveries(database, False, lambda: now), 2)
        assert elsewhere.got == []
    (row,) = log(database)
    assert len(receiver.got) == row.tries == 1 and row.delivered_at is None
    assert row.next_at == now + PAUSES[0]
    assert row.status == {"a redirect": 302, "less than it says": 500, "a refusal": 403}.get(kind)
    assert row.error and row.error.isprintable() and len(row.error) < 300 and "/hook" not in row.error
    if kind == "a refusal":
        assert row.error == "it answered 403 <b>no [31m</b> service"


@pytest.mark.parametrize("endless", [False, True])
def test_a_slow_receiver_costs_its_own_messages_time_and_nobody_elses(
    database: Database, receiver: Receiver, endless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It holds for the good receiver too, which a busy machine may keep waiting for seconds.
    monkeypatch.setattr(sending, "SECONDS", 5.0)
    head = b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFF\r\n"
    given = {"answer": head, "endless": True} if endless else {"seconds": 60.0}
    with receiving(**given) as slow:
        webhook(database, slow.url, "failed")
        webhook(database, receiver.url, "failed")
        ends(database, "failed")
        ends(database, "failed", "c" * 16)

        async def walk() -> int:
            """Return how often the slow one was asked before the good one had both messages."""
            service = Deliveries(database, False)
            await service.turn()
            async with asyncio.timeout(60):
                # The slow one's thread may be late to note its first request.
                while len(receiver.got) < 2 or not slow.got:
                    # Meanwhile the store takes other writes at once.
                    await asyncio.to_thread(ends, database, "stopped", f"{len(receiver.got):016x}")
                    await asyncio.sleep(0.01)
            asked = len(slow.got)
            await service.settled()
            return asked

        asked = asyncio.run(walk())
        assert len(slow.got) == 2
    failed = [one for one in log(database) if one.delivered_at is None]
    assert len(failed) == 2
    if endless:
        # Its first bytes are enough.
        assert all(one.status == 500 and len(one.error) < 300 for one in failed)
    else:
        # One request after the other, and the good receiver had both messages during the first.
        first, second = (one.next_at or 0.0 for one in failed)
        assert second - first > 4.9 and asked == 1
        assert {one.error for one in failed} == {"it did not answer within 5 s"}


def test_a_receiver_that_is_down_gets_it_when_it_is_back_and_is_given_up_in_the_end(
    database: Database, starts_listener: None
) -> None:
    with receiving() as gone:
        url = gone.url
    webhook(database, url, "failed")
    ends(database, "failed")
    clock = [time.time()]
    service = Deliveries(database, False, now=lambda: clock[0])
    for number, pause in enumerate(PAUSES, start=1):
        turns(service, 2)
        (row,) = log(database)
        assert (row.tries, row.status, row.next_at) == (number, None, clock[0] + pause) and "Connect" in row.error
        clock[0] += pause
    turns(service, 2)
    (row,) = log(database)
    assert (row.tries, row.next_at, row.delivered_at) == (len(PAUSES) + 1, None, None)
    # Another one, whose receiver comes back.
    with receiving(answer=b"HTTP/1.1 503 x\r\nRetry-After: 100\r\nContent-Length: 0\r\n\r\n") as back:
        with database.writing() as session:
            session.execute(update(Webhook).values(url=back.url))
        ends(database, "failed", "c" * 16)
        turns(service)
        assert log(database)[1].next_at == clock[0] + 100
        back.answer = b"HTTP/1.1 204 No Content\r\n\r\n"
        clock[0] += 100
        turns(service, 2)
        row = log(database)[1]
        assert (row.tries, row.status, row.error) == (2, 204, "") and row.delivered_at == clock[0]
        ids = {headers["webhook-id"] for headers, _ in back.got}
        assert len(back.got) == 2 and len(ids) == 1


def test_a_wish_to_wait_has_a_limit() -> None:
    assert next_try(1, 0.0, 5.0) == 5.0 + PAUSES[0]
    assert next_try(1, 1e9, 5.0) == 5.0 + LONGEST_PAUSE
    assert next_try(len(PAUSES) + 1, 0.0, 5.0) is None


def test_several_services_send_each_message_once(database: Database, receiver: Receiver) -> None:
    webhook(database, receiver.url, "failed")
    for number in range(12):
        ends(database, "failed", f"{number:016x}")

    async def walk() -> None:
        services = [Deliveries(database, False) for _ in range(3)]
        for _ in range(3):
            await asyncio.gather(*(one.turn() for one in services))
            await asyncio.gather(*(one.settled() for one in services))

    asyncio.run(walk())
    assert sorted(one["run"]["uid"] for one in receiver.contents()) == [f"{number:016x}" for number in range(12)]
    assert all(one.delivered_at for one in log(database))


def test_the_message_of_a_service_that_died_is_sent_by_another(database: Database, receiver: Receiver) -> None:
    rule = webhook(database, receiver.url, "failed")
    ends(database, "failed")
    clock = [time.time()]
    dead, other = (Deliveries(database, False, now=lambda: clock[0]) for _ in range(2))
    claimed = dead._claim(rule.id)
    assert claimed is not None
    turns(other)
    assert receiver.got == []
    clock[0] += CLAIM_SECONDS
    turns(other)
    # What the first one says when it wakes comes too late.
    dead._store(claimed, sending.Outcome(500, "it answered 500"))
    (row,) = log(database)
    assert len(receiver.got) == 1 and row.tries == 2 and row.delivered_at == clock[0]


def test_a_receiver_inside_is_refused_where_only_public_ones_are_wanted(database: Database, receiver: Receiver) -> None:
    urls = [
        receiver.url,
        receiver.url.replace("127.0.0.1", "localhost"),
        "http://[::ffff:127.0.0.1]/",
        "http://10.1.2.3/",
    ]
    for url in urls:
        webhook(database, url, "failed")
    ends(database, "failed")
    turns(Deliveries(database, True))
    assert receiver.got == []
    assert all("is not a public address" in one.error for one in log(database)) and len(log(database)) == len(urls)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("1.1.1.1", True), ("2606:4700:4700::1111", True), ("::ffff:1.1.1.1", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False), ("255.255.255.255", False), ("240.0.0.1", False), ("::", False), ("::1", False),
        ("::ffff:127.0.0.1", False), ("::7f00:1", False), ("::1.1.1.1", False), ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::a00:1", False), ("2002:7f00:1::", False), ("2001:0:7f00:1::", False), ("fec0::1", False),
        ("fe80::1", False), ("fc00::1", False), ("ff02::1", False), ("2001:db8::1", False), ("100::1", False),
        ("5f00::1", False),
    ],
)  # fmt: skip
def test_an_address_that_may_lead_inside_is_not_public(address: str, public: bool) -> None:
    assert sending.is_public(ipaddress.ip_address(address)) == public


def test_the_address_that_was_checked_is_connected_to(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def public(target: Any) -> str:
        asked.append(target.host)
        return "127.0.0.1"

    monkeypatch.setattr(sending, "_public_address", public)
    url = receiver.url.replace("127.0.0.1", "hooks.example.invalid")
    content = {"text": "x", "run": None}
    outcome = asyncio.run(sending.post(url, "json", new_secret(), "msg_1", content, True))
    assert outcome == sending.Outcome(200) and asked == ["hooks.example.invalid"]
    assert receiver.got[0][0]["host"] == url.removeprefix("http://").removesuffix("/hook")


@pytest.mark.parametrize(
    "url", ["http://a..b/", "http://" + "a" * 80 + ".invalid/", "https://127.0.0.1:9/", "http://0/"]
)
def test_an_address_that_leads_nowhere_is_a_sentence_in_the_log(url: str) -> None:
    outcome = asyncio.run(sending.post(url, "json", new_secret(), "msg_1", {"text": "x", "run": None}, False))
    assert outcome.status is None and outcome.error


def test_deleted_webhooks_send_nothing_and_old_messages_leave_the_log(database: Database, receiver: Receiver) -> None:
    first = webhook(database, receiver.url, "failed")
    webhook(database, receiver.url, "failed")
    ends(database, "failed")
    with database.writing() as session:
        session.delete(session.get(Webhook, first.id))
    turns(Deliveries(database, False))
    assert len(receiver.got) == len(log(database)) == 1
    with database.writing() as session:
        forget_old(session, time.time())
    assert len(log(database)) == 1
    with database.writing() as session:
        forget_old(session, time.time() + KEPT_SECONDS + 60)
    assert log(database) == []


@pytest.mark.parametrize("change", [{"role": "viewer"}, {"revoked_at": 2.0}, {"expires_at": 2.0}])
def test_who_is_no_operator_any_more_hears_of_no_run(
    database: Database, receiver: Receiver, change: dict[str, Any]
) -> None:
    with database.writing() as session:
        maker, another = (issue_token(session, name, "operator", 1.0).row.id for name in ("maker", "another"))
    mine = webhook(database, receiver.url, "failed", "stalled", maker_id=maker)
    theirs = webhook(database, receiver.url, "failed", maker_id=another)
    receiver.answer = b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n"
    ends(database, "failed")
    turns(Deliveries(database, False))
    assert len(receiver.got) == 2
    with database.writing() as session:
        session.execute(update(Token).where(Token.id == maker).values(**change))
    # Neither what waits, nor what happens from now on.
    ends(database, "failed", "c" * 16)
    later = Deliveries(database, False, lambda: time.time() + PAUSES[0] + 1)
    turns(later, 2)
    assert [one.webhook_id for one in log(database)] == [mine.id, theirs.id, theirs.id]
    given_up = log(database)[0]
    assert (given_up.next_at, given_up.tries, given_up.error) == (None, 1, NO_OPERATOR)
    assert len(receiver.got) == 4
    with database.reading() as session:
        assert active_ids(session, time.time()) == {theirs.id}


def test_a_service_sends_by_itself(database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "POLL_SECONDS", 0.01)
    webhook(database, receiver.url, "failed")

    async def walk() -> None:
        async with Deliveries(database, False).running():
            await asyncio.to_thread(ends, database, "failed")
            async with asyncio.timeout(20):
                while not receiver.got:
                    await asyncio.sleep(0.01)

    asyncio.run(walk())
    assert receiver.contents()[0]["event"] == "failed"
