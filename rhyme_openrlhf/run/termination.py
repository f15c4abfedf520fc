"""SIGTERM, as schedulers send it before they kill: the run stops after its step, with a checkpoint, if there is time.

Invariants: a run that is told to end has ended its training within the grace time, one way or the other; it is
interrupted once, and never after `close`.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rhyme_openrlhf.telemetry.run_directory import write_json
from rhyme_openrlhf.training.failure import Interrupted

ASKED_BY = "SIGTERM"
# Code in C, and callbacks, may drop what a signal handler raises. So the interruption is repeated until the ending has
# begun, which closes the termination at once.
INSIST_SECONDS = 5.0


class Termination:
    """Ends the driver's main thread: in time after SIGTERM, at once by `interrupt`."""

    def __init__(self, stop_request: Path, grace_s: float) -> None:
        """`stop_request` is the file that the trainer looks for between two steps (run_directory.py)."""
        self._stop_request = stop_request
        self._grace_s = grace_s
        self._interrupting = self._due = False
        # Only the handler sets it, and the main thread never waits for it: so setting it there cannot lock.
        self._requested = threading.Event()
        self._over = threading.Event()
        self._waiting: threading.Thread | None = None

    @property
    def requested(self) -> bool:
        """Return whether SIGTERM came."""
        return self._requested.is_set()

    @property
    def interrupts(self) -> bool:
        """Return whether the main thread is interrupted: a KeyboardInterrupt in it is this one then, not Ctrl-C."""
        return self._interrupting

    def install(self) -> None:
        """Have SIGTERM handled here, from now on or again. In the main thread."""
        signal.signal(signal.SIGTERM, self._handle)
        if self._waiting is None:
            self._waiting = threading.Thread(target=self._wait, name="termination", daemon=True)
            self._waiting.start()

    def came_to_ray(self, error: BaseException) -> bool:
        """Return whether SIGTERM came while Ray's handler stood here, which raises this `error`; it is noted then."""
        came = isinstance(error, SystemExit) and error.code == signal.SIGTERM
        if came:
            self._requested.set()
        return came

    def interrupt(self) -> None:
        """Raise Interrupted in the main thread, from any thread; Ray's waits look for signals once a second."""
        if not self._interrupting and not self._over.is_set():
            self._interrupting = True
            threading.Thread(target=self._insist, name="interruption", daemon=True).start()

    def close(self) -> None:
        """Interrupt nothing from now on, because the training is over."""
        self._over.set()

    def _insist(self) -> None:
        while not self._over.is_set():
            self._due = True
            _thread.interrupt_main(signal.SIGTERM)
            self._over.wait(INSIST_SECONDS)

    def _wait(self) -> None:
        self._requested.wait()
        if not self._over.wait(self._grace_s):
            self.interrupt()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over.is_set():
            return
        if self._interrupting:
            # Signals from elsewhere must not interrupt the ending.
            due, self._due = self._due, False
            if due:
                raise Interrupted
            return
        if not self.requested:
            # Where it cannot be written, the grace time passes and nothing more.
            with suppress(OSError):
                write_json(self._stop_request, {"requested_at": time.time(), "by": ASKED_BY})
            self._requested.set()
