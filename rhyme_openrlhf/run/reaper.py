"""Ends what a run started on this machine, however the run ended: by itself, by Ctrl-C, or by `kill -9`.

    python -m rhyme_openrlhf.run.reaper DRIVER_PID     standard input: a pipe that the driver holds open

A process of its own, in a session of its own. While the driver lives it notes every process below it (Ray's, their
workers, and the engine cores below those). When its standard input closes, because the driver closed it or died, it
kills those that are left. A line `spare PID` on the pipe names a process that gets SPARED_SECONDS more than the others:
the one that still sends the last events.

Invariants:
- Only processes that were seen below the driver are killed, and only while their start time is still the same.
- Nothing is killed while the driver holds the pipe.
- The driver never waits for a spared process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

LOOK_SECONDS = 2.0
# What Ray's shutdown has asked to end gets this long to do it.
GRACE_SECONDS = 3.0
KILL_TIMEOUT_SECONDS = 10.0
# How often ending processes are looked at: the command that started the run waits for their end.
POLL_SECONDS = 0.05
PIPE_BYTES = 4096
# The reporter ends by itself after 30 s (telemetry/reporter.py); this is for one that hangs.
SPARED_SECONDS = 45.0
SPARE = b"spare "
# Its own limits, and as much again for a machine that is too busy to run it.
FINISH_SECONDS = 2 * (LOOK_SECONDS + GRACE_SECONDS + KILL_TIMEOUT_SECONDS)


def start_reaper(driver_pid: int) -> subprocess.Popen[bytes]:
    """Start the reaper of a driver. Close its `stdin` at the end and wait for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rhyme_openrlhf.run.reaper", str(driver_pid)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def finish(reaper: subprocess.Popen[bytes]) -> None:
    """Have the processes that are left of a finished run ended."""
    assert reaper.stdin is not None
    reaper.stdin.close()
    try:
        reaper.wait(FINISH_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"rhyme train: the reaper (process {reaper.pid}) is still ending processes of this run", file=sys.stderr)


def spare(reaper: subprocess.Popen[bytes], pid: int) -> None:
    """Have a process that sends the last events killed later than the others, if at all."""
    assert reaper.stdin is not None
    with suppress(OSError):  # the reaper is gone, and with it what could end that process too early
        reaper.stdin.write(SPARE + f"{pid}\n".encode())
        reaper.stdin.flush()


def below(root: psutil.Process) -> set[psutil.Process]:
    """Return the processes below `root` (psutil compares them by pid and start time), without this one."""
    try:
        return set(root.children(recursive=True)) - {psutil.Process()}
    except psutil.NoSuchProcess:
        return set()


def reap(seen: set[psutil.Process]) -> None:
    """Kill those of `seen`, and what is below them, that do not end by themselves within the grace time."""
    everything = seen.union(*(below(process) for process in seen))
    _kill(left_after(GRACE_SECONDS, everything))


def reap_spared(spared: set[psutil.Process]) -> None:
    """Kill the spared processes when their time is over, in a process of its own that nothing waits for."""
    if not any(process.is_running() for process in spared) or os.fork():
        return
    # A reader of the driver's output must see the driver's end, not this process's.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    _kill(left_after(SPARED_SECONDS, spared))


def left_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run after `seconds`, or as soon as none does.

    A zombie counts as ended: its parent may be the driver, which waits for this process. psutil's own wait would wait
    for the parent.
    """
    end = time.monotonic() + seconds
    left = list(processes)
    while left := [process for process in left if _runs(process)]:
        if time.monotonic() >= end:
            break
        time.sleep(POLL_SECONDS)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(left: list[psutil.Process]) -> None:
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    left_after(KILL_TIMEOUT_SECONDS, left)


def main(driver_pid: int) -> None:
    """Watch until standard input closes, then reap."""
    # Ray stops a job by SIGTERM to all of its processes: what is left of this one is still to be ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    driver = psutil.Process(driver_pid)
    seen: set[psutil.Process] = set()
    spared: set[psutil.Process] = set()
    told = b""
    deadline = 0.0
    while True:
        if time.monotonic() >= deadline:
            seen |= below(driver)
            seen = {process for process in seen if process.is_running()}
            deadline = time.monotonic() + LOOK_SECONDS
        readable, _, _ = select.select([sys.stdin], [], [], LOOK_SECONDS)
        if readable:
            # Not through sys.stdin, whose buffer select does not know.
            received = os.read(sys.stdin.fileno(), PIPE_BYTES)
            if not received:
                break
            *lines, told = (told + received).split(b"\n")
            for line in lines:
                spared |= _named(line)
    reap((seen | below(driver)) - spared)
    reap_spared(spared)


def _named(line: bytes) -> set[psutil.Process]:
    """Return the process of a `spare` line, if it is still there."""
    try:
        return {psutil.Process(int(line.removeprefix(SPARE)))}
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    main(int(sys.argv[1]))
