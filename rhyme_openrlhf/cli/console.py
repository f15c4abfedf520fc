"""Where commands print their tables. Invariant: in a file or pipe no cell is cut."""

from __future__ import annotations

import sys

from rich.console import Console

# Wide enough for every table of ours.
PIPE_WIDTH = 240


def console() -> Console:
    """As wide as the terminal, and wide enough for every cell elsewhere."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
