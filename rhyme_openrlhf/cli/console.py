"""The console that commands print tables to. Invariant: in a file or pipe no cell is cut."""

from __future__ import annotations

import sys

from rich.console import Console

# Wide enough for every table of ours.
PIPE_WIDTH = 240


def console() -> Console:
    """Return a console as wide as the terminal; in a file or pipe, wide enough for every cell."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
