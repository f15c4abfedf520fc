"""Shows a running run on the terminal, from the stream of its events.

`make_display` picks the form: bars for a terminal, plain lines for a log file. A display only prints: it keeps no
record and computes no figure of its own.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console

from rhyme_openrlhf.telemetry.events import Recorded
from rhyme_openrlhf.telemetry.progress_bars import BarsDisplay
from rhyme_openrlhf.telemetry.progress_lines import LinesDisplay


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
        """Nothing to end."""


def make_display(mode: str, stream: TextIO) -> Display:
    """The display for `--run.progress`: "bars", "lines", "off", or "auto" (bars if `stream` is a terminal, else lines).

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
