"""The reporter against a server that fails in every way: nothing is lost, nothing is doubled, and it always ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rhyme_openrlhf.telemetry import batches, control_connection, reporter
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import Note, RunFinished
from rhyme_openrlhf.telemetry.reporter import Reporter, read_report
from rhyme_openrlhf.telemetry.run_directory import REPORTER_FILE, STOP_REQUEST, TOKEN_VARIABLE
from tests.telemetry.control_server import ATTEMPT, RUN, TOKEN, ControlServer, Fault, make_run, written

DEADLINE_S = 120.0
SOURCES = ("driver", "trainer", "engine-0")


@pytest.fixture
def server(starts_listener: None) -> Iterator[ControlServer]:
    running = ControlServer()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reporter in this process waits for nothing long."""
    monkeypatch.setattr(reporter, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(reporter, "BATCH_AGE_SECONDS", 0.02)
    monkeypatch.setattr(reporter, "SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(batches, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(batches, "LONGEST_PAUSE_SECONDS", 0.1)


class Running:
    """A reporter in a thread of this process."""

    def __init__(self, run: Path, token: str = TOKEN) -> None:
        self.ending = threading.Event()
        self.reporter = Reporter(read_report(run), token, self.ending)
        self._thread = threading.Thread(target=self.reporter.run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.ending.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the reporter does not end"

    def wait_s(self, seconds: float) -> None:
        """Give up requests of the next connection after this time."""
        self.reporter._connection._connection.timeout = seconds

    def fails(self, times: int) -> None:
        """Wait until this many requests in a row have failed."""
        until(lambda: self.reporter._failures >= times, "requests that fail")


def write(run: Path, count: int, finish: bool = True, pause_s: float = 0.0, size: int = 20) -> None:
    """Append `count` events of three sources."""
    with EventLog(run / "events.jsonl") as log:
        for number in range(count):
            log.write(Note("info", f"{number} " + "x" * size), SOURCES[number % 3])
            if pause_s:
                time.sleep(pause_s)
        if finish:
            log.write(RunFinished("succeeded", "", 1.0), "driver")


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)


def test_everything_arrives_once_and_the_end_is_told(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    running = Running(run)
    write(run, 5000)
    running.end()
    assert server.stored == written(run)
    assert set(server.times.values()) == {1}
    assert server.heartbeats[-1] is False and all(server.heartbeats[:-1])
    (announced,) = server.announced
    assert (announced["run"], announced["name"], announced["run_directory"]) == (RUN, "trial", str(run))
    assert announced["config"] == json.loads((run / "config.json").read_text())
    assert running.reporter.unsent() == ""


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_through_any_fault(
    tmp_path: Path, server: ControlServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down, slow, 500, 429, 503, 413, cut, hanging, nonsense, and answers that get lost after the batch was stored."""
    monkeypatch.setattr(control_connection, "REQUEST_SECONDS", 0.3)
    chance = random.Random(seed)
    faults: list[Fault] = ["ok"] * 8 + ["cut", "slow", "lose", "lose", "nonsense", 500, 502, 429, 503, 413]
    chosen = [chance.choice(faults) for _ in range(60)]

    def fault(number: int) -> Fault:
        if number == 3:
            # Soon given up; after it, all answers are waited for, because those of a busy machine took more than 0.3 s.
            running.wait_s(DEADLINE_S)
            return "hang"
        # How many batches there are depends on the machine's speed, and one that is too large is not stored.
        return "lose" if number > 5 and not server.lost else chosen[number] if number < 60 else "ok"

    server.fault = fault
    server.most_events = 150
    run = make_run(tmp_path / "run", server.url)
    running = Running(run)
    write(run, 1500, pause_s=0.001)
    running.end()
    assert server.stored == written(run)
    assert max(server.times.values()) > 1, "no answer was lost: the test shows nothing"
    assert not running.reporter.unsent()


def test_a_server_that_comes_late_gets_all(tmp_path: Path, starts_listener: None) -> None:
    first = ControlServer()
    run = make_run(tmp_path / "run", first.url)
    first.close()
    running = Running(run)
    write(run, 500)
    running.fails(3)
    late = ControlServer(port=first.port)
    running.end()
    late.close()
    assert late.stored == written(run)


def test_only_the_bad_event_is_left_out(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    write(run, 3000)
    server.bad = {f"{number} " + "x" * 20 for number in (0, 7, 8, 1234, 2999)}
    running = Running(run)
    running.end()
    missing = set(written(run)) - set(server.stored)
    assert {written(run)[key]["text"] for key in missing} == server.bad
    assert sum(server.dropped.values()) == len(server.bad)
    assert "5 events were given up" in running.reporter.unsent()
    # About log2(2000) = 11 halvings for each, and the way back.
    assert server.batches < 150


def test_a_retry_after_is_obeyed(tmp_path: Path, server: ControlServer) -> None:
    asked: list[float] = []

    def fault(number: int) -> Fault:
        asked.append(time.monotonic())
        return 429 if number == 1 else "ok"

    server.fault, server.retry_after = fault, "1"
    run = make_run(tmp_path / "run", server.url)
    write(run, 10)
    Running(run).end()
    assert asked[1] - asked[0] >= 1.0
    assert server.stored == written(run)


def test_of_too_much_that_waits_the_oldest_goes(tmp_path: Path, starts_listener: None) -> None:
    first = ControlServer()
    run = make_run(tmp_path / "run", first.url, outbox_mb=1)
    first.close()
    write(run, 4000, size=500)
    assert (run / "events.jsonl").stat().st_size > 2 * 1024 * 1024
    running = Running(run)
    until(lambda: running.reporter._outbox.given_up, "the first events to be given up")
    server = ControlServer(port=first.port)
    running.end()
    server.close()
    events = list(written(run))
    kept = [key for key in events if key in server.stored]
    assert kept == events[-len(kept) :], "not the oldest were left out"
    assert 0.9 * 1024 * 1024 < len(kept) * len(json.dumps(written(run)[kept[-2]])) < 1.1 * 1024 * 1024
    missing = [source for source, _ in events[: -len(kept)]]
    assert server.dropped == {source: missing.count(source) for source in SOURCES}


def test_a_stop_is_passed_on_once(tmp_path: Path, server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "HEARTBEAT_SECONDS", 0.05)
    run = make_run(tmp_path / "run", server.url)
    running = Running(run)
    until(lambda: len(server.heartbeats) > 3, "heartbeats")
    before = time.time()
    assert not (run / STOP_REQUEST).exists()
    server.stop = True
    until((run / STOP_REQUEST).exists, "the stop request")
    first = json.loads((run / STOP_REQUEST).read_text())
    beats = len(server.heartbeats)
    until(lambda: len(server.heartbeats) > beats + 3, "more heartbeats")
    running.end()
    assert json.loads((run / STOP_REQUEST).read_text()) == first
    assert first["by"] == server.url and before <= first["requested_at"] <= time.time()


def test_a_server_that_forgot_the_run_is_told_all_again(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    write(run, 100, finish=False)
    running = Running(run)
    until(lambda: len(server.stored) == 100, "the first events")
    server.stored.clear()
    server.known = False
    write(run, 100)
    running.end()
    assert server.stored == written(run)
    assert len(server.announced) == 2


def test_a_position_that_cannot_be_kept_does_not_matter(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    (run / REPORTER_FILE / "in the way").mkdir(parents=True)
    write(run, 3000)
    Running(run).end()
    assert server.stored == written(run) and set(server.times.values()) == {1}


def test_a_new_start_goes_on_where_the_last_one_ended(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    for _ in range(3):
        write(run, 50)
        Running(run).end()
    assert server.stored == written(run) and set(server.times.values()) == {1}


def test_a_renewed_token_is_read(tmp_path: Path, server: ControlServer, capsys: pytest.CaptureFixture[str]) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    server.token = "rhyme_the_next_one"
    run = make_run(tmp_path / "run", server.url, token_file=str(token_file))
    write(run, 10)
    running = Running(run)
    running.fails(2)
    token_file.write_text(server.token)
    running.end()
    assert server.stored == written(run)
    said = capsys.readouterr().err
    assert "answered 401: who are you?" in said and "takes events again" in said
    assert TOKEN not in said and server.token not in said


def test_a_torn_last_line_does_not_hold_up_the_end(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    write(run, 10, finish=False)
    expected = written(run)
    with (run / "events.jsonl").open("ab") as log:
        log.write(b'{"kind": "note", "ti')
    Running(run).end()
    assert server.stored == expected


# --- as the process it is


def start(run: Path, patch: str = "") -> subprocess.Popen[bytes]:
    """The reporter's process; `patch` are statements on its module, named r."""
    program = f"import sys\nimport rhyme_openrlhf.telemetry.reporter as r\n{patch}\nsys.exit(r.main(sys.argv[1:]))"
    with (run / "logs" / "reporter.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(run)],
            stdin=subprocess.PIPE,
            stderr=log,
            env={**os.environ, TOKEN_VARIABLE: TOKEN},
        )


@pytest.mark.usefixtures("starts_python")
def test_killed_again_and_again_nothing_is_lost(tmp_path: Path, server: ControlServer) -> None:
    chance = random.Random(1)
    server.fault = lambda number: "slow" if number % 3 else "ok"
    run = make_run(tmp_path / "run", server.url)
    fast = "r.BATCH_AGE_SECONDS = 0.01; r.POLL_SECONDS = 0.005"
    for _ in range(8):
        process = start(run, fast)
        # A process needs a second to start on a busy machine: each is killed in the middle of its own batches.
        for known in range(server.batches, server.batches + chance.randint(1, 5)):
            write(run, 100, finish=False)
            until(lambda known=known: server.batches > known, "a batch")
        time.sleep(chance.random() / 10)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert process.stdin is not None
        process.stdin.close()
    write(run, 100)
    last = start(run, fast)
    last.communicate(timeout=DEADLINE_S)
    assert last.returncode == 0
    assert server.stored == written(run)


@pytest.mark.usefixtures("starts_python")
def test_the_process_is_nice_and_keeps_the_token_to_itself(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    write(run, 10)
    process = start(run)
    until(lambda: server.stored, "the first batch")
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= os.getpriority(os.PRIO_PROCESS, 0) + min(
        reporter.NICENESS, 19 - os.getpriority(os.PRIO_PROCESS, 0)
    )
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    for path in run.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert json.loads((run / REPORTER_FILE).read_text())["attempt_uid"] == ATTEMPT


@pytest.mark.usefixtures("starts_python")
def test_terminated_with_its_job_it_sends_the_rest(tmp_path: Path, server: ControlServer) -> None:
    """Ray stops a job by SIGTERM to all of its processes; the driver's last events come after it."""
    run = make_run(tmp_path / "run", server.url)
    write(run, 10, finish=False)
    process = start(run)
    until(lambda: server.stored, "the first batch")
    process.terminate()
    process.terminate()
    write(run, 1000)
    until(lambda: len(server.stored) == 1011, "the rest")
    assert process.poll() is None
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == reporter.SENT
    assert server.stored == written(run) and server.heartbeats[-1] is False


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("fault", ["hang", 500])
def test_it_ends_in_time_when_the_server_does_not_take_the_rest(tmp_path: Path, fault: Fault) -> None:
    server = ControlServer(lambda number: fault)
    run = make_run(tmp_path / "run", server.url)
    write(run, 100)
    process = start(run, "r.FLUSH_SECONDS = 1.5")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == reporter.NOT_SENT
    server.close()
    said = (run / "logs" / "reporter.log").read_text()
    # Its start, on a busy machine the longer part, is not in that time.
    assert "gave up after 1.5 s: " in said
    assert "MB of events are not sent" in said and f"rhyme runs import {run}" in said


@pytest.mark.parametrize(
    ("control", "token", "said"),
    [
        ({"url": ""}, TOKEN, "without --control.url"),
        ({}, "", "there is no access token"),
        ({}, "two words", "RHYME_CONTROL_TOKEN holds is no access token"),
        ({"token_file": "/nowhere/token"}, "", "the token file /nowhere/token cannot be read"),
        ({"attempt_uid": "../../x"}, TOKEN, "--control.attempt_uid must be 16 hexadecimal digits"),
    ],
)
def test_what_it_cannot_start_with_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    control: dict[str, str],
    token: str,
    said: str,
) -> None:
    run = make_run(tmp_path / "run", **{"url": "http://127.0.0.1:9", **control})
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    # What it does to its own process must not be done to this one: children would ignore SIGTERM too.
    monkeypatch.setattr(os, "nice", lambda by: by)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert reporter.main([str(run)]) == reporter.CANNOT_START
    printed = capsys.readouterr().err
    assert said in printed
    assert not token or token not in printed


def test_a_directory_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(reporter.ReporterError, match=r"config\.json is not the record of a run"):
        read_report(tmp_path)


@pytest.mark.usefixtures("starts_python")
def test_it_starts_with_the_standard_library_alone() -> None:
    script = "import sys, rhyme_openrlhf.telemetry.reporter; print({n.split('.')[0] for n in sys.modules})"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not set(eval(shown)) & {"numpy", "torch", "ray", "psutil", "rich", "httpx"}
