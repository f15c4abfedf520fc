"""All processes of a run end with it, also when its driver is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rhyme_openrlhf.run.reaper import left_after, reap

# A driver that starts a reaper and a child with a grandchild, and tells their numbers; the grandchild ignores SIGTERM.
DRIVER = """
import os, subprocess, sys, time
from rhyme_openrlhf.run.reaper import finish, start_reaper
reaper = start_reaper(os.getpid())
child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import signal, time;"
child += " signal.signal(15, signal.SIG_IGN); time.sleep(100)'], start_new_session=True); print(p.pid, flush=True)"
child += "; time.sleep(100)"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
open(sys.argv[1] + ".part", "w").write(f"{started.pid} {started.stdout.readline()} {reaper.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(4)
if sys.argv[2] == "orderly":
    finish(reaper)
    sys.exit(0)
time.sleep(100)
"""
DEADLINE_S = 30.0
HOUR_S = 3600.0


def processes(path: Path) -> list[psutil.Process]:
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, "the driver did not start"
        time.sleep(0.05)
    return [psutil.Process(int(number)) for number in path.read_text().split()]


def wait_until_gone(left: list[psutil.Process]) -> None:
    # Orphans become children of a process that may not wait for them: a zombie has ended.
    end = time.monotonic() + DEADLINE_S
    while [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.1)


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("way", ["orderly", "killed", "terminated"])
def test_nothing_is_left(tmp_path: Path, way: str) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "numbers"), way])
    left = processes(tmp_path / "numbers")
    assert all(process.is_running() for process in left)
    if way != "orderly":
        # The reaper looks every two seconds, once it has started: let it have seen them, also on a busy machine.
        time.sleep(8)
    if way == "killed":
        os.kill(driver.pid, signal.SIGKILL)
    if way == "terminated":
        # As Ray stops a job: all of its processes get it, children first. The grandchild does not mind.
        child, grandchild, reaper = left
        for process in (grandchild, reaper, child, psutil.Process(driver.pid)):
            process.terminate()
    driver.wait(DEADLINE_S)
    wait_until_gone(left)


@pytest.mark.usefixtures("starts_python")
def test_a_child_that_was_born_after_the_last_look_is_ended_too() -> None:
    program = "import subprocess; child = subprocess.Popen(['sleep', '100']); print(child.pid, flush=True)"
    program += "; child.wait()"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    reap({psutil.Process(parent.pid)})
    assert parent.wait(DEADLINE_S) == -signal.SIGKILL
    wait_until_gone([child])


def test_what_has_ended_is_not_waited_for() -> None:
    """Also while its parent, here this process, has not asked how it ended."""
    ended, alive = subprocess.Popen(["true"]), subprocess.Popen(["sleep", str(HOUR_S)])
    processes = [psutil.Process(ended.pid), psutil.Process(alive.pid)]
    try:
        assert left_after(HOUR_S, processes[:1]) == []
        assert left_after(0.1, processes) == processes[1:]
    finally:
        alive.kill()
        for process in (ended, alive):
            process.wait(DEADLINE_S)
