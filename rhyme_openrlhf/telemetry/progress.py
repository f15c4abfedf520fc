"""Shows a running run on the terminal, from the stream of its events: bars on a terminal, plain lines in a log file.

A display only prints: it keeps no record and computes no figure of its own (`progress_state.py` does).

Invariants of bars:
- The run's bar is always there.
- The step's bar exists only while a step generates or trains. It counts samples; in training it only moves, because
  training does not report how far it is.
- Messages are printed above the bars and stay.

Invariants of lines, whose seconds are of the events' own time:
- Whole lines only, without carriage returns and colour codes.
- One line when a process that the first rollout waits for is ready; until then one after every HEARTBEAT_S without.
- One line when a step starts, one when it is finished, and in between at most one every PROGRESS_INTERVAL_S.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from rhyme_openrlhf.telemetry import wording
from rhyme_openrlhf.telemetry.events import (
    ProcessReady,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    SystemSample,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.progress_state import ProgressState
from rhyme_openrlhf.telemetry.wording import without_controls

# With a bar this wide both levels' texts fit into 80 columns.
_BAR_WIDTH = 10
# Only the elapsed time changes between events; a faster refresh would take CPU from engines on a small machine.
_REFRESHES_PER_SECOND = 2
# Often enough to see that a long rollout is alive, seldom enough that the log of a day's run stays readable.
PROGRESS_INTERVAL_S = 10.0
# Engines take a minute or two to start.
HEARTBEAT_S = 15.0


class Display(Protocol):
    """Shows events. Used in a `with` block and from one thread at a time."""

    def show(self, recorded: Recorded) -> None:
        """Take in one event and print what it changes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NoDisplay:
    """Prints nothing."""

    def show(self, recorded: Recorded) -> None:
        """Ignore the event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End nothing."""


class BarsDisplay:
    """Draws on `console` from `__enter__` to `__exit__`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = ProgressState()
        self._progress = Progress(
            # Texts of events may hold square brackets, which are no markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR_WIDTH),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
        )
        self._run_task = self._progress.add_task(self._state.run_line(), total=None)
        self._step_task: TaskID | None = None

    def show(self, recorded: Recorded) -> None:
        """Take in one event and redraw what it changes."""
        self._state.apply(recorded)
        event = recorded.event
        if isinstance(event, RunStarted):
            self._print(self._state.run_start_line(event))
        elif isinstance(event, RolloutStarted):
            self._replace_step_bar(f"samples 0/{event.samples}", event.samples)
        elif isinstance(event, RolloutProgress):
            self._update_step_bar(event)
        elif isinstance(event, RolloutFinished):
            self._replace_step_bar(f"training on {self._state.step_label(event.step)}", None)
        elif isinstance(event, TrainStep):
            self._state.forget(event.step)
            # In an asynchronous run the step's bar already shows the next step's rollout.
            if event.step == self._state.step:
                self._remove_step_bar()
        elif isinstance(event, RunFinished):
            self._remove_step_bar()
        message = self._state.message(recorded)
        if message is not None:
            self._print(message)
        if isinstance(
            event, RunStarted | ProcessReady | RolloutStarted | RolloutFinished | TrainStep | WeightsPublished
        ):
            self._update_run_bar()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_step_bar()
        self._progress.stop()

    def _update_run_bar(self) -> None:
        self._progress.update(
            self._run_task,
            description=self._state.run_line(),
            completed=self._state.steps_done,
            total=self._state.total_steps(),
            refresh=True,
        )

    def _update_step_bar(self, event: RolloutProgress) -> None:
        if self._step_task is None or event.step != self._state.step:
            return
        self._progress.update(
            self._step_task,
            description=self._state.rollout_line(event),
            completed=event.samples_done,
            total=event.samples_total,
            refresh=True,
        )

    def _replace_step_bar(self, description: str, total: int | None) -> None:
        self._remove_step_bar()
        self._step_task = self._progress.add_task(description, total=total)

    def _remove_step_bar(self) -> None:
        if self._step_task is not None:
            self._progress.remove_task(self._step_task)
            self._step_task = None

    def _print(self, text: str) -> None:
        self._console.print(Text(without_controls(text)))


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
        shown = without_controls(" ".join(text.splitlines()))
        line = f"[{wording.clock(self._state.elapsed(recorded))}] {shown}\n"
        # A log under LANG=C is ASCII; a "·" that cannot be printed must not end a training run.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def make_display(mode: str, stream: TextIO) -> Display:
    """Return the display for `--run.progress`: "bars", "lines", "off" or "auto".

    "auto" is bars if `stream` is a terminal, else lines.
    Raises ValueError for another mode.
    """
    if mode == "auto":
        # A dumb terminal (an editor's, many CI systems') cannot move its cursor up, which bars need.
        bars = stream.isatty() and not Console(file=stream).is_dumb_terminal
        mode = "bars" if bars else "lines"
    if mode == "bars":
        return BarsDisplay(Console(file=stream))
    if mode == "lines":
        return LinesDisplay(stream)
    if mode == "off":
        return NoDisplay()
    raise ValueError(f"progress must be one of auto, bars, lines, off; got {mode!r}")
