"""SIGTERM asks for a stop and ends the run when that takes too long; by real signals to this process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from rhyme_openrlhf.run.termination import Termination
from rhyme_openrlhf.training.failure import Interrupted

DEADLINE_S = 30.0
NEVER_S = 3600.0


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(seconds: float) -> None:
    """What the main thread does meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_asks_for_a_stop_and_the_run_goes_on(tmp_path: Path) -> None:
    termination = Termination(tmp_path / "stop-request.json", NEVER_S)
    termination.install()
    assert not termination.requested
    terminate()
    assert termination.requested
    first = json.loads((tmp_path / "stop-request.json").read_text())
    assert first["by"] == "SIGTERM"
    # All of a job's processes get it, and some schedulers repeat it.
    terminate()
    assert json.loads((tmp_path / "stop-request.json").read_text()) == first
    termination.close()


def test_what_takes_too_long_is_interrupted_once(tmp_path: Path) -> None:
    termination = Termination(tmp_path / "stop-request.json", 0.2)
    termination.install()
    terminate()
    with pytest.raises(Interrupted):
        run(DEADLINE_S)
    terminate()
    termination.interrupt()
    termination.close()
    run(0.5)


def test_an_interruption_that_is_dropped_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rhyme_openrlhf.run.termination.INSIST_SECONDS", 0.5)
    termination = Termination(tmp_path / "stop-request.json", NEVER_S)
    termination.install()
    threading.Timer(0.3, termination.interrupt).start()
    came = 0
    while came < 2:
        try:
            run(DEADLINE_S)
            break
        except Interrupted:
            came += 1
    termination.close()
    assert came == 2


def test_a_request_that_cannot_be_written_ends_the_run_all_the_same(tmp_path: Path) -> None:
    termination = Termination(tmp_path / "missing" / "stop-request.json", 0.0)
    termination.install()
    with pytest.raises(Interrupted):
        terminate()
        run(DEADLINE_S)
    termination.close()


def test_the_supervisor_interrupts_at_once(tmp_path: Path) -> None:
    termination = Termination(tmp_path / "stop-request.json", NEVER_S)
    termination.install()
    threading.Timer(0.1, termination.interrupt).start()
    with pytest.raises(Interrupted):
        run(DEADLINE_S)
    assert not termination.requested and not (tmp_path / "stop-request.json").exists()
    termination.close()


def test_an_ending_is_not_interrupted(tmp_path: Path) -> None:
    termination = Termination(tmp_path / "stop-request.json", 0.1)
    termination.install()
    termination.close()
    terminate()
    termination.interrupt()
    run(0.5)
    assert not (tmp_path / "stop-request.json").exists()
