"""The console of commands' tables, and refusals. Invariant: in a file or pipe no cell is cut."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rhyme_openrlhf.settings.options import BAD_INPUT

if TYPE_CHECKING:
    from rich.console import Console

# Wide enough for every table of ours.
PIPE_WIDTH = 240


def console() -> Console:
    """Return a console as wide as the terminal; in a file or pipe, wide enough for every cell."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as plain aligned text, for logs and pipes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def print_table(
    rows: Sequence[tuple[str, ...]], colours: Mapping[str, str], header: tuple[str, ...] | None = None
) -> None:
    """Print rows as plain aligned text; on a terminal, with the cells that `colours` names in their colour."""
    if not sys.stdout.isatty():
        print(aligned([header, *rows] if header else rows))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*header or (), box=None, show_header=header is not None, header_style="bold", pad_edge=False)
    for row in rows:
        # Text, not str: rich would read "[gpu]" in a command as markup.
        table.add_row(*(Text(cell, colours.get(cell, ""), overflow="fold") for cell in row))
    console().print(table)


def refuse(command: str, reason: Exception | str) -> int:
    """Print why a command cannot do what it was asked for, in one sentence; return the exit code."""
    print(f"{command}: error: {reason}", file=sys.stderr)
    return BAD_INPUT
