"""Progress as bars on a terminal: one for the run, and below it a transient one for what the step is doing.

Invariants: the run's bar is always there; the step's bar exists only while a step generates (counting its samples) or
trains (moving, because training does not report how far it is); messages are printed above the bars and stay.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from rhyme_openrlhf.telemetry.events import (
    ProcessReady,
    Recorded,
    RolloutFinished,
    RolloutProgress,
    RolloutStarted,
    RunFinished,
    RunStarted,
    TrainStep,
    WeightsPublished,
)
from rhyme_openrlhf.telemetry.progress_state import ProgressState
from rhyme_openrlhf.telemetry.wording import without_controls

# With a bar this wide both levels' texts fit into 80 columns.
_BAR_WIDTH = 10
# Only the elapsed time changes between events; a faster refresh would take CPU from engines on a small machine.
_REFRESHES_PER_SECOND = 2


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
