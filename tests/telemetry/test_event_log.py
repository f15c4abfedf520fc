"""The record on disk: whole lines, own numbers per source, torn lines, growing files."""

import errno
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.telemetry.event_json import EventError
from rhyme_openrlhf.telemetry.event_log import EventLog, follow, read_events
from rhyme_openrlhf.telemetry.events import Note, Recorded, WeightsLoaded
from tests.examples import examples


def note(number: int) -> Note:
    return Note(level="info", text=f"line {number}\nwith a second line, a · and a \u2028")


def record(path: Path, count: int, source: str = "driver") -> list[Recorded]:
    with EventLog(path) as log:
        return [log.write(note(i), source, time=float(i)) for i in range(count)]


def stop_after(looks: int, between: Callable[[int], None] = lambda look: None) -> Callable[[], bool]:
    """A `stop` that is true at its `looks`-th call and runs `between(call)` at each: a writer without a thread."""
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        between(calls)
        return calls >= looks

    return stop


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = record(path, 5)
    assert list(read_events(path)) == written
    assert path.read_bytes().count(b"\n") == 5


def test_each_source_is_counted_from_zero(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for source in ("driver", "engine-0", "driver", "engine-0", "engine-0"):
            log.write(note(0), source)
    numbers = [(r.source, r.sequence) for r in read_events(tmp_path / "events.jsonl")]
    assert numbers == [("driver", 0), ("engine-0", 0), ("driver", 1), ("engine-0", 1), ("engine-0", 2)]


def test_time_is_now_if_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rhyme_openrlhf.telemetry.event_log.clock.time", lambda: 1234.5)
    with EventLog(tmp_path / "events.jsonl") as log:
        assert log.write(note(0), "driver").time == 1234.5


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        written = log.write(note(0), "driver")
        assert list(read_events(path)) == [written]


def test_a_bad_event_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        with pytest.raises(EventError):
            log.write(WeightsLoaded(version=1, engine=0, seconds="fast"), "engine-0")  # type: ignore[arg-type]
        assert log.write(note(0), "engine-0").sequence == 0
    assert len(list(read_events(path))) == 1


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:

        def write(source: str) -> None:
            for i in range(50):
                log.write(note(i), source)

        threads = [threading.Thread(target=write, args=(source,)) for source in ("a", "a", "b", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for source in ("a", "b"):
        assert [r.sequence for r in read_events(path) if r.source == source] == list(range(100))


def test_a_second_writer_continues(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    record(path, 3)
    record(path, 2)
    assert [r.sequence for r in read_events(path)] == [0, 1, 2, 3, 4]


def test_writing_after_close_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write(note(0), "driver")


@settings(max_examples=examples(50), deadline=None)
@given(cut=st.integers(0, 10_000))
def test_a_file_torn_anywhere_gives_its_whole_lines_and_can_be_continued(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        written = record(path, 4)
        whole = path.read_bytes()
        torn = whole[: cut % (len(whole) + 1)]
        path.write_bytes(torn)
        kept = written[: torn.count(b"\n")]
        assert list(read_events(path)) == kept
        assert list(follow(path, stop_after(1), poll_s=0)) == kept
        with EventLog(path) as log:
            more = log.write(note(9), "driver", time=9.0)
        assert more.sequence == len(kept)
        assert list(read_events(path)) == [*kept, more]


class FillingLog(EventLog):
    """A log on a disk that has room for `room` bytes more."""

    room = 0

    def _append(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super()._append(data[: self.room])
        self.room -= taken
        return taken


@settings(max_examples=examples(50), deadline=None)
@given(rooms=st.lists(st.integers(0, 200), max_size=12))
def test_lines_are_whole_on_a_disk_that_fills_and_empties(rooms: list[int]) -> None:
    """Each event is whole, or its writer was told that it is lost; one that has begun is never lost."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        kept = []
        with FillingLog(path) as log:
            for number, room in enumerate([*rooms, 10_000]):
                log.room = room
                with suppress(OSError):
                    kept.append(log.write(note(number), "driver", time=1.0))
        assert list(read_events(path)) == kept and kept[-1].sequence == len(rooms)


@pytest.mark.parametrize("line", [b"{not json}\n", b"[1]\n", b'{"kind": "note"}\n', b"\xff\n"])
def test_a_whole_line_that_is_no_event_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    record(path, 2)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(EventError, match=r"events\.jsonl, line 3"):
        list(read_events(path))


def test_events_of_a_newer_writer_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "kind_of_the_future"}\n')
    written = record(path, 1)
    assert list(read_events(path)) == written


def test_follow_waits_for_the_file_and_gives_what_was_written_before_the_stop(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(look: int) -> None:
        if look >= 3:
            record(path, 1)

    texts = [r.sequence for r in follow(path, stop_after(5, write), poll_s=0)]
    assert texts == [0, 1, 2]


def test_follow_reads_a_torn_line_once_it_is_whole(tmp_path: Path) -> None:
    path, source = tmp_path / "events.jsonl", tmp_path / "source.jsonl"
    written = record(source, 3)
    whole = source.read_bytes()
    middle = len(whole) // 2  # inside the second line

    def write(look: int) -> None:
        path.write_bytes(whole[:middle] if look == 1 else whole)

    assert list(follow(path, stop_after(2, write), poll_s=0)) == written


def test_follow_skips_a_line_that_is_no_event_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(Note("info", "before"), "a")
    with path.open("a") as file:
        file.write("no event\n")
    with EventLog(tmp_path / "other.jsonl") as log:
        log.write(Note("info", "after"), "a")
    path.write_bytes(path.read_bytes() + (tmp_path / "other.jsonl").read_bytes())
    errors: list[Exception] = []
    found = [recorded.event for recorded in follow(path, stop_after(1), poll_s=0, unreadable=errors.append)]
    assert found == [Note("info", "before"), Note("info", "after")]
    (error,) = errors
    assert isinstance(error, EventError) and "line 2" in str(error)


def test_follow_forgets_a_torn_line_that_a_new_writer_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    record(path, 2)
    path.write_bytes(path.read_bytes()[:-5])

    def write(look: int) -> None:
        if look == 2:
            record(path, 1)

    assert [r.sequence for r in follow(path, stop_after(2, write), poll_s=0)] == [0, 1]
