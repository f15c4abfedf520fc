"""Progress as plain lines, for a log file or a terminal that cannot do more.

Invariants: whole lines only, without carriage returns and colour codes; one line when a process that the first rollout
waits for is ready, and one after every HEARTBEAT_S without a line until then; one when a step starts, one when it is
finished, and in between at most one every PROGRESS_INTERVAL_S. Seconds are of the events' own time.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self, TextIO

from rhyme_openrlhf.telemetry import wording
from rhyme_openrlhf.telemetry.events import (
    ProcessReady,
    Recorded,
    RolloutProgress,
    RolloutStarted,
    RunStarted,
    SystemSample,
    TrainStep,
)
from rhyme_openrlhf.telemetry.progress_state import ProgressState

# Often enough to see that a long rollout is alive, seldom enough that the log of a day's run stays readable.
PROGRESS_INTERVAL_S = 10.0
# Engines take a minute or two to start.
HEARTBEAT_S = 15.0


class LinesDisplay:
    """Prints `[mm:ss] ...` lines to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._state = ProgressState()
        self._last_line_time = float("-inf")

    def show(self, recorded: Recorded) -> None:
        """Take in one event and print what it changes."""
        self._state.apply(recorded)
        event = recorded.event
        if isinstance(event, RunStarted):
            self._print(recorded, self._state.run_start_line(event))
        elif isinstance(event, RolloutStarted):
            self._print(recorded, self._state.rollout_start_line(event))
        elif isinstance(event, RolloutProgress):
            if recorded.time - self._last_line_time >= PROGRESS_INTERVAL_S:
                label = self._state.step_label(event.step)
                self._print(recorded, f"{label}  {self._state.rollout_line(event)}")
        elif isinstance(event, ProcessReady | SystemSample):
            # Machines report every few seconds, also while nothing else happens.
            is_new = isinstance(event, ProcessReady)
            line = self._state.start_line()
            if line and (is_new or recorded.time - self._last_line_time >= HEARTBEAT_S):
                self._print(recorded, line)
        elif isinstance(event, TrainStep):
            self._print(recorded, self._state.step_line(event))
            self._state.forget(event.step)
        else:
            message = self._state.message(recorded)
            if message is not None:
                self._print(recorded, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def _print(self, recorded: Recorded, text: str) -> None:
        self._last_line_time = recorded.time
        # Notes may quote other programs: their carriage returns and newlines would break the line.
        shown = wording.without_controls(" ".join(text.splitlines()))
        line = f"[{wording.clock(self._state.elapsed(recorded))}] {shown}\n"
        # A log under LANG=C is ASCII; a "·" that cannot be printed must not end a training run.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding))
        self._stream.flush()
