"""Starts the reporter (telemetry/reporter.py) beside a driver, and again when it died.

Invariants: the run never waits for it, except at its very end for END_SECONDS at most, so that a container or job that
ends with its first process has its last events sent; a reporter that cannot be started or does not stay up costs the
run nothing but a line on the terminal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from rhyme_openrlhf.run.reaper import spare
from rhyme_openrlhf.settings.control import ControlSettings
from rhyme_openrlhf.telemetry.reporter import CANNOT_START, FLUSH_SECONDS
from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE, RunDirectory

END_SECONDS = 5.0
# A reporter that dies at once every time must not become a load.
RESTART_SECONDS = 10.0


class Reporting:
    """The reporter of one run, kept running until `close`. Without --control.url there is none."""

    def __init__(self, run: RunDirectory, settings: ControlSettings, reaper: subprocess.Popen[bytes]) -> None:
        """Start it. The token leaves this process's environment here, before anything of the run inherits it."""
        self._run = run
        self._settings = settings
        self._reaper = reaper
        self._token = os.environ.pop(TOKEN_VARIABLE, "")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        if settings.url:
            self._start()
            threading.Thread(target=self._keep, name="reporter", daemon=True).start()

    def close(self) -> None:
        """The run is over: the reporter sends the rest and ends. Returns at once."""
        with self._lock:
            self._closing.set()
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()

    def wait(self) -> None:
        """Give the reporter a moment; say so when it is not done."""
        if self._process is None:
            return
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            told = f"still sending the last events to {self._settings.url} (for {FLUSH_SECONDS:g} s at most)"
        else:
            if code == 0:
                return
            told = f"not everything was reported to {self._settings.url}"
        print(f"rhyme train: {told}; see {self._log}. Later: rhyme runs import {self._run.path}", file=sys.stderr)

    @property
    def _log(self) -> str:
        return str(self._run.logs / "reporter.log")

    def _start(self) -> None:
        """Start one, unless the run is over meanwhile."""
        command = [sys.executable, "-m", "rhyme_openrlhf.telemetry.reporter", str(self._run.path)]
        with self._lock:
            if self._closing.is_set():
                return
            try:
                with open(self._log, "ab") as log:
                    self._process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, TOKEN_VARIABLE: self._token},
                        start_new_session=True,
                    )
            except OSError as error:
                print(f"rhyme train: the reporter could not be started: {error.strerror}", file=sys.stderr)
                return
            spare(self._reaper, self._process.pid)

    def _keep(self) -> None:
        """Start it again whenever it died while the run goes on."""
        while not self._closing.is_set():
            started = time.monotonic()
            if self._process is not None and self._process.wait() == CANNOT_START:
                print(f"rhyme train: the run is not reported, see {self._log}", file=sys.stderr)
                return
            self._closing.wait(max(0.0, RESTART_SECONDS - (time.monotonic() - started)))
            self._start()
