"""What is sent next and what is given up: every event goes out once it can, a bad one alone is left out."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry.batches import (
    BATCH_EVENTS,
    LONGEST_LAST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    LONGEST_RETRY_AFTER_SECONDS,
    UNKNOWN_SOURCE,
    Batch,
    Outbox,
    batch_body,
    cut_batch,
    excess,
    pause,
)

SOURCES = ("driver", "trainer", "engine-0")


def line(number: int, source: str = "driver", text: str = "") -> bytes:
    row = {"kind": "note", "time": 1.0, "source": source, "sequence": number, "level": "info", "text": text}
    return json.dumps(row).encode() + b"\n"


def rest(lines: Iterable[bytes], position: int) -> list[bytes]:
    """The lines of a log from byte `position` on."""
    data = b"".join(lines)[position:]
    return data.splitlines(keepends=True)


def test_a_batch_ends_where_it_is_full() -> None:
    lines = [line(number) for number in range(10)]
    assert cut_batch(lines, 100, most_events=4).end == 100 + sum(map(len, lines[:4]))
    by_size = cut_batch(lines, 100, most_events=100, most_bytes=2 * len(lines[0]) + 1)
    assert (by_size.start, len(by_size.lines)) == (100, 2)
    # One that is larger than a batch goes alone.
    assert len(cut_batch([line(0, text="x" * 5000), line(1)], 0, 100, most_bytes=1000).lines) == 1


def test_a_torn_last_line_waits() -> None:
    whole, torn = line(0), line(1)[:-5]
    batch = cut_batch([whole, torn], 0, 100)
    assert (batch.end, batch.lines) == (len(whole), (whole.rstrip(),))
    assert cut_batch([torn], 7, 100) == Batch(7, 7)


def test_what_is_no_event_is_counted_and_passed() -> None:
    lines = [b"not json\n", line(0), b"[1]\n", b"\xff\n", b'{"kind": "note"}\n']
    batch = cut_batch(lines, 0, 100)
    assert (len(batch.lines), batch.unreadable, batch.end) == (1, {UNKNOWN_SOURCE: 4}, sum(map(len, lines)))


def test_the_body_is_one_json_object() -> None:
    lines = [line(number, text='a "quote" and \u2028') for number in range(3)]
    batch = cut_batch(lines, 0, 100)
    body = json.loads(batch_body(12.5, batch, {"driver": 3}, alive=False))
    assert body["events"] == [json.loads(one) for one in lines]
    assert {key: body[key] for key in ("sent_at", "dropped", "heartbeat")} == {
        "sent_at": 12.5,
        "dropped": {"driver": 3},
        "heartbeat": {"alive": False},
    }
    assert json.loads(batch_body(1.0, Batch(0, 0), {}, alive=True))["events"] == []


@given(
    events=st.lists(st.tuples(st.sampled_from(SOURCES), st.booleans()), max_size=80),
    most=st.integers(1, 64),
    lost_answers=st.lists(st.booleans(), max_size=20),
)
def test_all_but_the_bad_ones_arrive_in_order(
    events: list[tuple[str, bool]], most: int, lost_answers: list[bool]
) -> None:
    """A server that refuses any batch with a bad event, and whose answers get lost now and then."""
    lines = [line(number, source) for number, (source, _) in enumerate(events)]
    bad = {number for number, (_, is_bad) in enumerate(events) if is_bad}
    size = sum(map(len, lines))
    outbox = Outbox(most_events=most)
    stored: list[int] = []
    answers = iter(lost_answers)
    requests = 0
    while outbox.position < size:
        before = (outbox.position, outbox.most_events)
        batch = cut_batch(rest(lines, outbox.position), outbox.position, outbox.most_events)
        numbers = [json.loads(one)["sequence"] for one in batch.lines]
        requests += 1
        if bad.intersection(numbers):
            gone = outbox.refused(batch)
            assert gone == (len(numbers) == 1)
            assert (outbox.position, outbox.most_events) != before
            continue
        stored += [number for number in numbers if number not in stored]
        if not next(answers, False):
            outbox.accepted(batch)
    assert stored == [number for number in range(len(events)) if number not in bad]
    assert sum(outbox.given_up.values()) == len(bad)
    for source in SOURCES:
        assert outbox.given_up.get(source, 0) == sum(is_bad for by, is_bad in events if by == source)
    # Finding one bad event costs its halvings (7 for 80 events) twice at most: on the way down, and behind it.
    assert requests <= 1 + len(events) // most + len(lost_answers) + 15 * len(bad) + 1


def test_batches_are_whole_again_behind_the_bad_event() -> None:
    lines = [line(number) for number in range(8)]
    outbox = Outbox()
    batch = cut_batch(lines, 0, outbox.most_events)
    assert not outbox.refused(batch)
    assert outbox.most_events == 4
    outbox.accepted(cut_batch(lines, 0, 4))
    assert outbox.most_events == 4
    outbox.accepted(cut_batch(lines[4:], outbox.position, 4))
    assert (outbox.most_events, outbox.position) == (BATCH_EVENTS, sum(map(len, lines)))


@given(position=st.integers(0, 10**9), given_up=st.dictionaries(st.sampled_from(SOURCES), st.integers(1, 100)))
def test_where_it_stood_is_read_back(position: int, given_up: dict[str, int]) -> None:
    kept = json.loads(json.dumps(Outbox(position, given_up, 7).to_dict("a" * 16)))
    assert Outbox.from_dict(kept, "a" * 16) == Outbox(position, given_up, 7)
    assert Outbox.from_dict(kept, "b" * 16) == Outbox()


@pytest.mark.parametrize(
    "row",
    [
        None,
        [],
        "x",
        {},
        {"attempt_uid": "a", "position": -1, "given_up": {}, "sent": 1},
        {"attempt_uid": "a", "position": 1},
    ],
)
def test_a_damaged_file_means_from_the_start(row: object) -> None:
    assert Outbox.from_dict(row, "a") == Outbox()


@given(
    failures=st.integers(1, 10_000),
    retry_after=st.none() | st.floats(-1e9, 1e9),
    chance=st.floats(0, 1, exclude_max=True),
    ending=st.booleans(),
)
def test_a_pause_is_bounded_and_never_shorter_than_asked(
    failures: int, retry_after: float | None, chance: float, ending: bool
) -> None:
    seconds = pause(failures, retry_after, chance, ending)
    longest = LONGEST_LAST_PAUSE_SECONDS if ending else LONGEST_PAUSE_SECONDS
    asked = min(max(retry_after or 0.0, 0.0), LONGEST_RETRY_AFTER_SECONDS)
    assert max(asked, 0.25) <= seconds <= max(asked, longest)


def test_pauses_grow() -> None:
    grown = [pause(failures, None, 0.0, False) for failures in range(1, 8)]
    assert grown == [0.25, 0.5, 1.0, 2.0, 4.0, 7.5, 7.5]


def test_excess() -> None:
    assert (excess(10, 20), excess(20, 20), excess(25, 20)) == (0, 0, 5)
