"""Batches into both databases: the rows follow from the events alone."""

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from rhyme_openrlhf.api.ingest.announce import (
    MOST_ATTEMPTS,
    OBJECTS,
    Announcement,
    AnnouncementConflictError,
    AnnouncementError,
    announce,
)
from rhyme_openrlhf.api.ingest.decoding import FormError
from rhyme_openrlhf.api.ingest.store_batch import Receipt, UnknownAttemptError, ingest, remove_attempts
from rhyme_openrlhf.api.ingest.validation import BadEventError, prepare
from rhyme_openrlhf.api.read.run_json import run_summary
from rhyme_openrlhf.api.store import run_status
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.json_values import COUNT_MAX, MOST_VALUES
from rhyme_openrlhf.api.store.lookup import find_run
from rhyme_openrlhf.api.store.models import Artifact, Attempt, Run
from rhyme_openrlhf.api.store.record import EpochRow, EventSource, Step
from rhyme_openrlhf.telemetry.event_json import parse
from rhyme_openrlhf.telemetry.summary import summarize
from tests.examples import examples

Rows = list[dict[str, Any]]
NOW = 1_800_000_000.0
_uids = (f"{number:016x}" for number in itertools.count(1))


def attempt_of(database: Database, run_uid: str) -> str:
    """A new attempt of a run, which is made if it is not there."""
    uid = next(_uids)
    with database.writing() as session:
        announce(session, Announcement(uid, run_uid, "made up", "/runs/x", {"command": ["rhyme"]}), NOW)
    return uid


def send(database: Database, attempt: str, rows: Rows, **keywords: Any) -> Receipt:
    arrived = prepare(rows)
    with database.writing() as session:
        return ingest(session, attempt, arrived, NOW, **keywords)


def run_of(database: Database, uid: str) -> Run:
    with database.reading() as session:
        return session.execute(select(Run).where(Run.uid == uid)).scalar_one()


def by_source(rows: Rows) -> dict[str, Rows]:
    sources: dict[str, Rows] = {}
    for row in rows:
        sources.setdefault(row["source"], []).append(row)
    return sources


@pytest.mark.parametrize("batch", [1, 7, 10_000])
def test_figures_are_those_of_the_summary(database: Database, make_run: Callable[..., Rows], batch: int) -> None:
    rows = make_run(seed=1)
    run_uid = next(_uids)
    attempt = attempt_of(database, run_uid)
    for chunk in itertools.batched(rows, batch) if hasattr(itertools, "batched") else _chunks(rows, batch):
        send(database, attempt, list(chunk))
    summary = summarize(recorded for row in rows if (recorded := parse(row)))
    run = run_of(database, run_uid)
    assert run.reward == pytest.approx(summary.reward_last_epoch, abs=1e-6)
    assert run.tokens_per_second == pytest.approx(summary.tokens_per_second, rel=1e-6)
    assert run.speculation_rate == summary.speculation_rate
    assert run.bubble_fraction == pytest.approx(summary.bubble_fraction, abs=1e-6)
    assert (run.steps_total, run.step, run.status) == (summary.steps_planned, summary.steps, summary.status)
    assert (run.engines, run.epoch, run.dropped_events) == (3, 2, 0)
    with database.reading() as session:
        epochs = {e.epoch: e for e in session.execute(select(EpochRow).where(EpochRow.steps_begun > 0)).scalars()}
        steps = list(session.execute(select(Step)).scalars())
    for one in summary.epochs:
        stored = epochs[one.epoch]
        assert stored.steps == one.steps
        assert stored.reward_sum / stored.rewarded_samples == pytest.approx(one.reward, abs=1e-6)
        assert stored.accepted / stored.engine_tokens == one.speculation_rate
        assert stored.response_tokens / stored.samples == one.mean_response_length
    for cause, seconds in summary.bubble_seconds.items():
        assert sum(getattr(step, f"bubble_{cause}") for step in steps) == pytest.approx(seconds, abs=1e-4)
    assert all(step.engines == 3 and step.moves == 1 and step.switches == 1 for step in steps)


def _chunks(rows: Rows, size: int) -> list[Rows]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


@st.composite
def deliveries(draw: st.DrawFn, rows: Rows) -> list[Rows]:
    """The rows as batches: split anywhere, those of different sources in any order, some sent twice."""
    pending = {source: list(events) for source, events in by_source(rows).items()}
    sent: list[Rows] = []
    while pending:
        batch: Rows = []
        for source in draw(st.lists(st.sampled_from(sorted(pending)), min_size=1, unique=True)):
            count = draw(st.integers(1, len(pending[source])))
            batch += pending[source][:count]
            pending[source] = pending[source][count:]
            if not pending[source]:
                del pending[source]
        sent.append(batch)
        if draw(st.integers(0, 3)) == 0:
            sent.append(draw(st.sampled_from(sent)))
    return sent


@pytest.fixture
def whole(database: Database, stored_rows: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is stored of attempts that come one after the other, a batch each; stored once for all examples."""
    stored: list[Any] = []

    def rows_of(*attempts: Rows) -> Any:
        if not stored:
            uid = next(_uids)
            for rows in attempts:
                send(database, attempt_of(database, uid), rows)
            stored.append(stored_rows(database, uid))
        return stored[0]

    return rows_of


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_do_not_depend_on_how_events_came(
    database: Database,
    make_run: Callable[..., Rows],
    stored_rows: Callable[..., Any],
    whole: Callable[..., Any],
    data: st.DataObject,
) -> None:
    rows = make_run(seed=2, engines=2)
    parts = next(_uids)
    attempt = attempt_of(database, parts)
    received = [send(database, attempt, batch) for batch in data.draw(deliveries(rows))]
    assert sum(receipt.accepted for receipt in received) == len(rows)
    assert stored_rows(database, parts) == whole(rows)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_newer_attempt_replaces_what_it_does_again(
    database: Database,
    make_run: Callable[..., Rows],
    stored_rows: Callable[..., Any],
    whole: Callable[..., Any],
    data: st.DataObject,
) -> None:
    """However the reports of a killed attempt and of the one that resumed it are interleaved."""
    old, new = make_run(seed=3, engines=2, end=""), make_run(seed=4, steps=(3, 4, 5), engines=2)
    parts = next(_uids)
    attempts = [attempt_of(database, parts) for _ in range(2)]
    batches = [[(attempts[n], batch) for batch in data.draw(deliveries(rows))] for n, rows in enumerate((old, new))]
    while batches := [queue for queue in batches if queue]:
        attempt, batch = data.draw(st.sampled_from(batches)).pop(0)
        send(database, attempt, batch)
    stored = stored_rows(database, parts)
    assert stored == whole(old, new)
    assert run_of(database, parts).step == 5
    assert len(stored["events"]) == len(old) + len(new)
    assert [row[0] for row in stored["steps"]] == [1, 2, 3, 4, 5]


def test_a_batch_is_all_or_nothing(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any]
) -> None:
    rows = make_run(seed=5)
    uid = next(_uids)
    attempt = attempt_of(database, uid)
    before = stored_rows(database, uid)
    with pytest.raises(BadEventError, match=r"event 7 of the batch: .*'step'") as error:
        send(database, attempt, [*rows[:7], {**rows[1], "step": "one"}, *rows[8:]])
    assert error.value.position == 7
    with pytest.raises(RuntimeError), database.writing() as session:
        ingest(session, attempt, prepare(rows), NOW)
        raise RuntimeError
    assert stored_rows(database, uid) == before


def test_gaps_and_what_was_given_up_are_counted_once(database: Database, make_run: Callable[..., Rows]) -> None:
    rows = by_source(make_run(seed=6))
    uid = next(_uids)
    attempt = attempt_of(database, uid)
    rollout = rows["rollout"]
    send(database, attempt, rollout[:2])
    send(database, attempt, rollout[5:7], given_up={"rollout": 3})
    assert run_of(database, uid).dropped_events == 3
    # Late ones are duplicates to a live report.
    receipt = Receipt(accepted=0, duplicates=4, stop=False, following={"rollout": 7})
    assert send(database, attempt, rollout[2:6]) == receipt
    # The last events of a source, after which none came.
    send(database, attempt, [], given_up={"rollout": 3, "trainer": 2})
    assert run_of(database, uid).dropped_events == 5
    send(database, attempt, rows["trainer"][2:], given_up={"rollout": 3, "trainer": 2})
    assert run_of(database, uid).dropped_events == 5


def test_the_life_of_a_run(database: Database, make_run: Callable[..., Rows]) -> None:
    rows = make_run(seed=7)
    uid = next(_uids)
    attempt = attempt_of(database, uid)
    assert run_of(database, uid).status == "starting"
    assert not send(database, attempt, rows[:1]).stop
    assert run_of(database, uid).status == "running"
    with database.writing() as session:
        session.execute(select(Attempt).where(Attempt.uid == attempt)).scalar_one().stop_requested_at = NOW
    assert send(database, attempt, []).stop
    send(database, attempt, rows[1:], alive=False)
    run = run_of(database, uid)
    assert (run.status, run.started_at, run.finished_at) == ("succeeded", rows[0]["time"], rows[-1]["time"])
    # A resumed run runs again.
    second = attempt_of(database, uid)
    assert (run_of(database, uid).status, run_of(database, uid).finished_at) == ("starting", None)
    send(database, second, rows[:5])
    send(database, second, [], alive=False)
    assert run_of(database, uid).status == "crashed"
    # The end of the first, sent again, changes nothing.
    send(database, attempt, rows[-1:])
    assert run_of(database, uid).status == "crashed"


def test_unknown_attempts_and_bad_announcements(database: Database) -> None:
    with pytest.raises(UnknownAttemptError, match="announce it first"):
        send(database, "f" * 16, [])
    good: dict[str, Any] = {
        "attempt_uid": next(_uids), "run_uid": next(_uids), "name": "n", "run_directory": "/x", "config": {}
    }  # fmt: skip
    for field, value in {
        "attempt_uid": "../../etc",
        "run_uid": "A" * 16,
        "name": "",
        "config": {"command": "rhyme"},
        "run_directory": "/x\0",
        "origin": "launched",
    }.items():
        with pytest.raises(AnnouncementError):
            Announcement(**{**good, field: value})
    for config in (
        *({part: odd} for part in OBJECTS for odd in ("text", [], None, 5)),
        {"settings": {f"a{number}": {"b": 1} for number in range(MOST_VALUES // 4)}},
        {"settings": {"run": {"seed": 10**400}}},
        {"settings": {"run": {"seed": -(2**63) - 1}}},
        {"settings": {"run": {"\ud800": 1}}},
    ):
        with pytest.raises(AnnouncementError, match="^config"):
            Announcement(**{**good, "config": config})
    for uid in (5, ["a" * 16], None, 10**400):
        with pytest.raises(AnnouncementError, match="run uid must be 16 hexadecimal digits"):
            Announcement(**{**good, "run_uid": uid})
    with database.writing() as session:
        first = announce(session, Announcement(**good), NOW)
        again = announce(session, Announcement(**{**good, "config": {"settings": {"limit": float("inf")}}}), NOW)
        assert first is again
    with pytest.raises(AnnouncementConflictError), database.writing() as session:
        announce(session, Announcement(**{**good, "run_uid": next(_uids)}), NOW)
    assert run_of(database, good["run_uid"]).config == {"settings": {"limit": "inf"}}


def test_reporters_at_once(database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any]) -> None:
    """Four runs, each reported by two senders that send the same: a reporter that was started twice."""
    rows = make_run(seed=8)
    reference = next(_uids)
    send(database, attempt_of(database, reference), rows)
    uids = [next(_uids) for _ in range(4)]
    attempts = {uid: next(_uids) for uid in uids}
    errors: list[BaseException] = []

    def report(uid: str, size: int) -> None:
        try:
            with database.writing() as session:
                announce(session, Announcement(attempts[uid], uid, "made up", "/runs/x", {"command": ["rhyme"]}), NOW)
            for batch in _chunks(rows, size):
                send(database, attempts[uid], batch)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=report, args=(uid, size)) for uid in uids for size in (5, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    expected = stored_rows(database, reference)
    assert all(stored_rows(database, uid) == expected for uid in uids)


def test_what_the_store_has_lost_is_told_before_more_is_stored(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any]
) -> None:
    rows = make_run(seed=9)
    sources = by_source(rows)
    uid, attempt = next(_uids), next(_uids)
    with database.writing() as session:
        announce(session, Announcement(attempt, uid, "made up", "/runs/x", {"command": ["rhyme"]}), NOW)
    # The reporter was told that ten of its events are stored, and two are.
    assert send(database, attempt, sources["rollout"][:2]).following == {"rollout": 2}
    before = stored_rows(database, uid)
    later = sources["rollout"][10:12]
    receipt = send(database, attempt, later, known={"rollout": 10, "driver": 1}, alive=False)
    assert receipt == Receipt(accepted=0, duplicates=0, stop=False, following={"rollout": 2, "driver": 0})
    assert list(receipt.following)[:2] == ["rollout", "driver"]
    # Neither stored nor taken for the end of the run.
    assert stored_rows(database, uid) == before
    # From the first one that is missing on, nothing is lost.
    assert send(database, attempt, sources["rollout"][2:12], known={"rollout": 2}).accepted == 10
    assert run_of(database, uid).dropped_events == 0
    # A heartbeat names every source.
    send(database, attempt, sources["driver"][:1])
    assert send(database, attempt, []).following == {"rollout": 12, "driver": 1}


def test_an_attempt_that_is_removed_leaves_no_trace(
    database: Database, make_run: Callable[..., Rows], stored_rows: Callable[..., Any]
) -> None:
    """Three attempts repeat each other's steps, and each of them in turn is removed."""
    parts = [make_run(seed=20 + n, steps=steps, end="") for n, steps in enumerate([(1, 2, 3, 4), (2, 3), (3, 4, 5)])]
    for gone in range(3):
        whole, rest = next(_uids), next(_uids)
        for number, rows in enumerate(parts):
            send(database, attempt_of(database, whole), rows)
            if number != gone:
                send(database, attempt_of(database, rest), rows)
        with database.writing() as session:
            run, attempts = run_status.lock_run(session, session.scalars(select(Run.id).where(Run.uid == whole)).one())
            remove_attempts(session, run, attempts, [attempts[gone]])
        expected = stored_rows(database, rest)
        numbers = [number for number in (1, 2, 3) if number != gone + 1]
        with database.reading() as session:
            assert list(session.scalars(select(Attempt.number).join(Run).where(Run.uid == whole))) == numbers
        stored = stored_rows(database, whole, {number: place for place, number in enumerate(numbers, start=1)})
        # Attempts keep their numbers, and whether they resumed another.
        del stored["attempts"], expected["attempts"]
        assert stored == expected, gone


def note(source: str, sequence: int) -> dict[str, Any]:
    return {"kind": "note", "time": 1.0, "source": source, "sequence": sequence, "level": "info", "text": ""}


def test_gaps_whose_sum_no_database_adds_up_are_refused(database: Database) -> None:
    uid = next(_uids)
    attempt = attempt_of(database, uid)
    assert send(database, attempt, [note("a", COUNT_MAX)]).accepted == 1
    with pytest.raises(FormError, match="too large gaps"):
        send(database, attempt, [note("b", 1), note("c", COUNT_MAX)])
    # Nothing of it is stored, and what has no gap still is.
    assert send(database, attempt, [note("a", COUNT_MAX), note("b", 0)]).accepted == 1
    assert run_of(database, uid).dropped_events == COUNT_MAX
    # An earlier version has stored such gaps.
    with database.writing() as session:
        number = session.execute(select(Attempt.id).where(Attempt.uid == attempt)).scalar_one()
        stored = {"attempt_id": number, "next_sequence": 2**53 + 1, "gaps": 2**53, "dropped": 2**53}
        session.add_all(EventSource(**stored, source=f"s{n}") for n in range(1025))
    assert send(database, attempt, [note("b", 1)], given_up={}).accepted == 1
    with pytest.raises(FormError, match="too large gaps"):
        send(database, attempt, [note("b", 3)])


def test_sums_that_no_column_has_room_for_are_refused(database: Database, make_run: Callable[..., Rows]) -> None:
    uid = next(_uids)
    attempt = attempt_of(database, uid)
    (row,) = [row for row in make_run(seed=21, steps=(1,), engines=1) if row["kind"] == "engine_step"]
    largest = {name: COUNT_MAX if isinstance(value, int) else value for name, value in row["counters"].items()}
    rows = [{**row, "sequence": number, "engine": number, "counters": largest} for number in range(1100)]
    with pytest.raises(FormError, match="the sums of the events' numbers are too large"):
        send(database, attempt, rows)
    assert send(database, attempt, [note("a", 0)]).accepted == 1


def test_a_run_has_a_bounded_number_of_attempts(database: Database) -> None:
    uid = next(_uids)
    attempt_of(database, uid)
    run = run_of(database, uid)
    with database.writing() as session:
        session.add_all(
            Attempt(
                run_id=run.id, number=number, uid=next(_uids), resumes=True, message="", status="lost", queued_at=NOW
            )
            for number in range(2, MOST_ATTEMPTS + 1)
        )
    with pytest.raises(AnnouncementError, match="the run has 1000 attempts"):
        attempt_of(database, uid)


def test_a_run_that_was_stopped_for_a_night_ran_no_longer(database: Database, make_run: Callable[..., Rows]) -> None:
    """Its duration is `finished_at - started_at - paused_seconds`."""
    uid = next(_uids)
    begun = make_run(seed=1)[0]
    ended = {**note("driver", 1), "kind": "run_finished", "status": "stopped", "message": "", "seconds": 1.0}
    for begin, end in ((1000.0, 1060.0), (90_000.0, 90_030.0), (90_020.0, 90_050.0)):
        attempt = attempt_of(database, uid)
        send(database, attempt, [{**begun, "time": begin}])
        # What is under way has paused as long as before.
        assert run_of(database, uid).paused_seconds == (0.0 if begin == 1000.0 else 90_000.0 - 1060.0)
        send(database, attempt, [{**ended, "time": end}])
    run = run_of(database, uid)
    assert (run.started_at, run.finished_at, run.paused_seconds) == (1000.0, 90_050.0, 90_000.0 - 1060.0)
    with database.writing() as session:
        run, attempts = run_status.lock_run(session, run.id)
        remove_attempts(session, run, attempts, attempts[1:])
    assert run_of(database, uid).paused_seconds == 0.0


def test_a_run_that_waits_for_its_restart_does_not_run(database: Database, make_run: Callable[..., Rows]) -> None:
    uid = next(_uids)
    begun = make_run(seed=1)[0]
    ended = {**note("driver", 1), "kind": "run_finished", "status": "stopped", "message": "", "seconds": 1.0}

    def duration(now: float) -> float | None:
        with database.reading() as session:
            return run_summary(find_run(session, uid), None, None).duration(now)

    first = attempt_of(database, uid)
    assert duration(5000.0) is None
    send(database, first, [{**begun, "time": 1000.0}])
    assert duration(5000.0) == 4000.0
    send(database, first, [{**ended, "time": 1060.0}])
    # Resumed, and queued or starting: also for the second time, after an attempt that never started.
    for time in (2000.0, 3000.0):
        waiting = attempt_of(database, uid)
        assert (duration(time), run_of(database, uid).paused_at) == (60.0, 1060.0)
    send(database, waiting, [{**begun, "time": 4000.0}])
    assert (duration(4030.0), run_of(database, uid).paused_at) == (90.0, None)


def test_a_text_that_is_a_key_has_room_in_every_index(database: Database) -> None:
    uid = next(_uids)
    attempt = attempt_of(database, uid)
    # No database makes random letters shorter.
    draw = random.Random(1)
    paths = ["".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(count)) for count in (600, 700, 20_000)]
    saved = {"kind": "checkpoint_saved", "time": 1.0, "source": "trainer", "step": 1}
    rows = [{**saved, "sequence": number, "path": path} for number, path in enumerate(paths)]
    assert send(database, attempt, rows).accepted == len(rows)
    with database.reading() as session:
        assert list(session.scalars(select(Artifact.path))) == paths[:1]
    # Nor does a setting, a metric or a name of the longest kind.
    odd = "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(5000))
    config = {"settings": {odd: {odd: odd}}}
    with database.writing() as session:
        announce(session, Announcement(attempt, uid, odd[:200], odd, config), NOW)
    metrics = {"kind": "train_step", "step": 1, "epoch": 1, "seconds_by_part": {}, "metrics": {odd[:128]: 1.0}}
    note_of = {"time": 1.0, "source": odd[:64], "sequence": 0}
    assert send(database, attempt, [{**metrics, **note_of}]).accepted == 1
