"""The reporter beside a driver: it outlives a killed one long enough, is started again, and nobody waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rhyme_openrlhf.run import reporting
from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE
from tests.telemetry.control_server import TOKEN, ControlServer, Fault, make_run, written

DEADLINE_S = 120.0
# A driver with a reaper and a reporter, that writes events until it is told to end.
DRIVER = """
import json, os, sys, threading, time
from pathlib import Path
from rhyme_openrlhf.settings.options import from_mapping
from rhyme_openrlhf.settings.config import ControlSettings
from rhyme_openrlhf.telemetry.event_log import EventLog
from rhyme_openrlhf.telemetry.events import Note, RunFinished
from rhyme_openrlhf.telemetry.run_directory import RunDirectory
from rhyme_openrlhf.run import reporting
from rhyme_openrlhf.run.reaper import finish, start_reaper
run = Path(sys.argv[1])
settings = from_mapping(ControlSettings, json.loads((run / "config.json").read_text())["settings"]["control"])
reporting.RESTART_SECONDS = 0.5
reporting.END_SECONDS = float(sys.argv[2])
reaper = start_reaper(os.getpid())
reporter = reporting.Reporting(RunDirectory(run), settings, reaper)
assert "RHYME_CONTROL_TOKEN" not in os.environ
log = EventLog(run / "events.jsonl")
print(reporter._process.pid, reaper.pid, flush=True)
while not (run / "end").exists():
    log.write(Note("info", "x"), "driver")
    time.sleep(0.002)
log.write(RunFinished("succeeded", "", 1.0), "driver")
reporter.close()
finish(reaper)
reporter.wait()
"""


@pytest.fixture
def server(starts_listener: None) -> Iterator[ControlServer]:
    running = ControlServer()
    yield running
    running.close()


class Driver:
    """The driver's process, and those it told of."""

    def __init__(self, run: Path, patience_s: float = DEADLINE_S) -> None:
        """`patience_s`: for the reporter's end. A real run's 5 s are too short for the last batch on a busy machine."""
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(run), str(patience_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN_VARIABLE: TOKEN},
        )
        assert self.process.stdout is not None
        self.reporter, self.reaper = (psutil.Process(int(pid)) for pid in self.process.stdout.readline().split())

    def end(self) -> str:
        """Let it end in order, with the end of its output, which others may wait for; what it said."""
        (self.run / "end").touch()
        _, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, err
        return err


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("starts_python")
def test_an_orderly_end_has_everything_sent(tmp_path: Path, server: ControlServer) -> None:
    driver = Driver(make_run(tmp_path / "run", server.url))
    until(lambda: server.stored, "the first batch")
    said = driver.end()
    assert server.stored == written(driver.run)
    assert server.heartbeats[-1] is False
    assert said == ""
    assert gone(driver.reporter) and gone(driver.reaper)


@pytest.mark.usefixtures("starts_python")
def test_a_killed_driver_has_everything_sent(tmp_path: Path, server: ControlServer) -> None:
    """A response that takes longer than the reaper's grace must not be cut off."""
    driver = Driver(make_run(tmp_path / "run", server.url))
    until(lambda: server.stored, "the first batch")
    time.sleep(2.5)  # the reaper looks every two seconds: it has seen the reporter below the driver
    server.fault = lambda number: 503
    server.retry_after = "8"
    batches = server.batches
    until(lambda: server.batches > batches, "a batch that is put off")
    os.kill(driver.process.pid, signal.SIGKILL)
    driver.process.wait(DEADLINE_S)
    server.fault = lambda number: "ok"
    until(lambda: gone(driver.reporter), "the reporter's end")
    assert server.stored == written(driver.run)
    assert server.heartbeats[-1] is False
    until(lambda: gone(driver.reaper), "the reaper's end")


@pytest.mark.usefixtures("starts_python")
def test_a_reporter_that_dies_is_started_again(tmp_path: Path, server: ControlServer) -> None:
    driver = Driver(make_run(tmp_path / "run", server.url))
    until(lambda: server.stored, "the first batch")
    driver.reporter.kill()
    before = len(server.stored)
    until(lambda: len(server.stored) > before + 1000, "a new reporter")
    said = driver.end()
    assert server.stored == written(driver.run) and said == ""


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("fault", ["hang", "stopped"])
def test_a_run_does_not_wait_for_a_reporter_that_hangs(tmp_path: Path, server: ControlServer, fault: Fault) -> None:
    driver = Driver(make_run(tmp_path / "run", server.url), patience_s=1.0)
    until(lambda: server.stored, "the first batch")
    if fault == "stopped":
        driver.reporter.send_signal(signal.SIGSTOP)
    else:
        server.fault = lambda number: fault
    written_before = len(written(driver.run))
    until(lambda: len(written(driver.run)) > written_before + 500, "the driver to go on")
    said = driver.end()
    assert "still sending the last events" in said and f"Later: rhyme runs import {driver.run}" in said
    # One that hangs ends by itself after half a minute, which a busy machine may need for the driver's end.
    assert fault == "hang" or not gone(driver.reporter)
    with suppress(psutil.NoSuchProcess):
        driver.reporter.kill()


@pytest.mark.usefixtures("starts_python")
def test_without_a_control_plane_there_is_no_reporter(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", "")
    program = DRIVER.replace("print(reporter._process.pid, reaper.pid, flush=True)", "assert reporter._process is None")
    (run / "end").touch()
    subprocess.run([sys.executable, "-c", program, str(run), "5"], check=True, timeout=DEADLINE_S)
    assert not (run / "logs" / "reporter.log").exists()


@pytest.mark.usefixtures("starts_python")
def test_a_reporter_without_a_token_is_not_started_for_ever(tmp_path: Path, server: ControlServer) -> None:
    run = make_run(tmp_path / "run", server.url)
    # The reporter's imports may take long: first ends the thread that would start it again.
    joined = "next(one for one in threading.enumerate() if one.name == 'reporter').join()"
    program = DRIVER.replace('assert "RHYME', f'{joined}; assert "RHYME')
    (run / "end").touch()
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-c", program, str(run), "5"],
        env=environment, timeout=DEADLINE_S, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0
    assert "the run is not reported" in ended.stderr
    assert (run / "logs" / "reporter.log").read_text().count("there is no access token") == 1
    assert json.loads((run / "config.json").read_text())["command"] == ["rhyme", "train"]


def test_after_the_systems_watch_has_stopped_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a look is under way that takes a while."""
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(reporting.ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(reporting.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(reporting, "SystemProbe", lambda *_: SimpleNamespace(gpus=SimpleNamespace(missing="no GPU")))
    looks, recorded = threading.Event(), []
    services: Any = SimpleNamespace(
        settings=SimpleNamespace(telemetry=SimpleNamespace(system_s=0.001)),
        on_gpus=False,
        record_all=lambda events, source: recorded.append((events, source)),
    )
    watch = reporting.SystemWatch(services, Path(), {})

    def look() -> list[Note]:
        looks.set()
        time.sleep(0.3)
        return [Note("info", "looked")]

    monkeypatch.setattr(watch, "_look", look)
    watch.start()
    assert looks.wait(DEADLINE_S)
    watch.stop()
    assert recorded == [([Note("info", "looked")], "system")] and not watch._thread.is_alive()
