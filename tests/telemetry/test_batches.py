"""The reporter's batches: every event goes out once it can, a bad one alone is left out."""

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
    find_event,
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
    body = json.loads(batch_body(12.5, batch, {"driver": 3}, False, {"driver": 2}))
    assert body["events"] == [json.loads(one) for one in lines]
    assert {key: body[key] for key in ("sent_at", "dropped", "heartbeat", "known")} == {
        "sent_at": 12.5,
        "dropped": {"driver": 3},
        "heartbeat": {"alive": False},
        "known": {"driver": 2},
    }
    assert json.loads(batch_body(1.0, Batch(0, 0), {}, True, {}))["events"] == []


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


COUNTS = st.dictionaries(st.sampled_from(SOURCES), st.integers(1, 100))


@given(position=st.integers(0, 10**9), given_up=COUNTS, confirmed=COUNTS)
def test_where_it_stood_is_read_back(position: int, given_up: dict[str, int], confirmed: dict[str, int]) -> None:
    stood = Outbox(position, given_up, 7, confirmed=confirmed)
    kept = json.loads(json.dumps(stood.to_dict("a" * 16)))
    assert Outbox.from_dict(kept, "a" * 16) == stood
    assert Outbox.from_dict(kept, "b" * 16) == Outbox()
    # An earlier version's.
    del kept["confirmed"]
    assert Outbox.from_dict(kept, "a" * 16) == Outbox(position, given_up, 7)


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


def test_what_the_server_has_lost_is_found_and_sent_again() -> None:
    lines = [line(number // 3, SOURCES[number % 3]) for number in range(30)]
    outbox = Outbox()
    outbox.accepted(cut_batch(lines, 0, 100))
    assert outbox.confirmed == dict.fromkeys(SOURCES, 10)
    # Less than it confirmed of two sources; one has what it had, one is not of this run.
    said = {"driver": 10, "trainer": 7, "engine-0": 4, "elsewhere": 0}
    lost = outbox.lost(said)
    assert lost == {"trainer": 7, "engine-0": 4}
    position = find_event(lines, lost)
    # Event 4 of engine-0 comes before event 7 of the trainer.
    assert position == sum(map(len, lines[:14]))
    outbox.go_back(position or 0, lost)
    assert (outbox.position, outbox.confirmed) == (position, {"driver": 10, "trainer": 7, "engine-0": 4})
    # Told the same again, it does not go back again.
    assert outbox.lost(said) == {}
    batch = cut_batch(rest(lines, outbox.position), outbox.position, 1)
    assert outbox.known(batch) == {"engine-0": 4}
    assert outbox.known(Batch(0, 0)) == outbox.confirmed
    outbox.accepted(batch)
    assert outbox.confirmed["engine-0"] == 5
    assert find_event(lines, {"trainer": 10, "nobody": 0}) is None


def test_what_was_given_up_causes_no_way_back() -> None:
    lines = [line(number) for number in range(10)]
    outbox = Outbox()
    outbox.accepted(cut_batch(lines, 0, 3))
    outbox.gave_up({"driver": 4}, sum(map(len, lines[:7])))
    bad = cut_batch(rest(lines, outbox.position), outbox.position, 1)
    assert outbox.refused(bad)
    assert outbox.lost({"driver": 3}) == {}
    outbox.accepted(cut_batch(rest(lines, outbox.position), outbox.position, 1))
    assert outbox.lost({"driver": 9}) == {}


@pytest.mark.parametrize("following", [None, 3, [], {"driver": None}, {"driver": "0"}, {}])
def test_an_answer_without_what_comes_next_changes_nothing(following: object) -> None:
    outbox = Outbox()
    outbox.accepted(cut_batch([line(0)], 0, 3))
    assert outbox.lost(following) == {}


def test_a_line_that_is_nested_too_deep_to_be_read_is_passed() -> None:
    deep = b'{"kind": "note", "source": "driver", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    batch = cut_batch([deep, line(1)], 0, 100)
    assert (len(batch.lines), batch.unreadable) == (1, {UNKNOWN_SOURCE: 1})
    assert find_event([deep, line(1)], {"driver": 0}) == len(deep)
