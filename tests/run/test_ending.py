"""The ending of a run: what it is called for every kind of error, and parts that fail, hang or are interrupted."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from io import BufferedWriter, TextIOWrapper
from pathlib import Path

import pytest

from rhyme_openrlhf.run.ending import Ending, LossyFile, Outcome, Reserve, outcome_of
from rhyme_openrlhf.training.failure import Interrupted, StopRequested


def failing(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), KeyError("x"), SystemExit(3), KeyboardInterrupt(), Interrupted()]
)
def test_a_part_that_fails_costs_one_line_and_the_next_part_is_run(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = Ending()
    assert ending.part("close the record", lambda: failing(error)) is None
    assert ending.part("add", lambda: 3) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"rhyme train: could not close the record: {type(error).__name__}")
    assert ending.failed == ["close the record"]


def test_a_part_that_hangs_is_left_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    never = threading.Event()
    ending = Ending(limit_s=0.05)
    assert ending.part("end Ray", never.wait) is None
    never.set()
    assert capsys.readouterr().err == "rhyme train: could not end Ray: not done within 0.05 s\n"


def test_ctrl_c_skips_the_part_that_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    # A shell's background jobs ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    never = threading.Event()

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        never.wait()

    ending = Ending(limit_s=30)
    ending.part("keep the logs", interrupted)
    never.set()
    signal.signal(signal.SIGINT, before)
    assert ending.part("add", lambda: 3) == 3
    assert capsys.readouterr().err == "rhyme train: could not keep the logs: KeyboardInterrupt: no message\n"


def test_a_closed_terminal_ends_no_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        ending.part("close the record", lambda: failing(ValueError("x")))
        monkeypatch.undo()
        # What is left in the buffer would be written when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert ending.part("add", lambda: 3) == 3


def test_output_that_goes_to_a_full_disk_changes_no_exit_code(starts_python: None) -> None:
    code = "from rhyme_openrlhf.run.ending import Ending, say; Ending().part('print', lambda: say('summary'))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr.startswith("rhyme train: could not print: OSError: [Errno 28]")


@pytest.mark.parametrize(
    ("error", "terminated", "expected"),
    [
        (KeyError("x"), False, Outcome("failed", "KeyError: 'x'", 1)),
        (TypeError("x"), False, Outcome("failed", "TypeError: x", 1)),
        (SystemExit(3), False, Outcome("failed", "SystemExit: 3", 1)),
        (GeneratorExit(), False, Outcome("failed", "GeneratorExit: no message", 1)),
        (MemoryError(), False, Outcome("failed", "MemoryError: no message", 1)),
        (KeyError("x"), True, Outcome("stopped", "ended by SIGTERM (KeyError: 'x')", 143)),
        (KeyboardInterrupt(), False, Outcome("stopped", "interrupted", 130)),
        (Interrupted(), False, Outcome("stopped", "ended by SIGTERM", 143)),
        (StopRequested(), False, Outcome("stopped", "stopped on request", 0)),
        (StopRequested(), True, Outcome("stopped", "ended by SIGTERM after its step", 143)),
    ],
)
def test_every_kind_of_error_has_a_name_and_an_exit_code(
    error: BaseException, terminated: bool, expected: Outcome
) -> None:
    assert outcome_of(error, terminated, lambda: "") == expected


@pytest.mark.parametrize("error", [KeyError("x"), Interrupted()])
def test_a_failure_is_explained_by_the_death_behind_it(error: BaseException) -> None:
    assert outcome_of(error, False, lambda: "engine 0 died") == Outcome("failed", "engine 0 died", 1)


def test_room_is_taken_on_the_disk_and_given_back(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path)
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) >= 256 * 1024
    reserve.release()
    reserve.release()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_has_no_room_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def refused(path: Path, data: bytes) -> None:
        write(path, data[:4096])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refused)
    with pytest.raises(OSError, match="No space left"):
        Reserve(tmp_path)
    assert not list(tmp_path.iterdir())


def test_whoever_prints_into_a_log_on_a_full_disk_goes_on() -> None:
    with TextIOWrapper(BufferedWriter(LossyFile("/dev/full", "w")), "utf-8", line_buffering=True) as log:
        for _ in range(3):
            print("words", file=log)
    assert log.closed
